"""Writes below the served folders: atomic, through no link, and only over what the page has read."""

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.config.faults import UserError
from sd3_light.ui import served_files, user_state
from sd3_light.ui.served_files import LARGEST_TEXT, ServedFiles
from tests.refusals import refused
from tests.special_files import SPECIAL


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.toml").write_text("a = 1\n")
    (folder / "a.toml").chmod(0o640)
    (tmp_path / "outside.toml").write_text("secret\n")
    return folder


def test_a_file_is_replaced_and_keeps_its_permissions(root: Path) -> None:
    path = root / "a.toml"
    text, version = ServedFiles([root]).read_config(path)
    assert text == "a = 1\n"
    new = ServedFiles([root]).save_config(path, "a = 2 # 中\n", version)
    assert ServedFiles([root]).read_config(path) == ("a = 2 # 中\n", new)
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in root.iterdir()) == ["a.toml", "inner"]
    files, path = ServedFiles([root]), root / "a.toml"
    path.write_bytes(b"a = 1\r\nb = 2\r\n")
    version = files.save_config(path, "a = 1\nb = 3\n", files.read_config(path)[1])
    assert path.read_bytes() == b"a = 1\r\nb = 3\r\n"
    assert files.read_config(path)[1] == version


def test_a_file_that_changed_since_it_was_read_is_not_written(root: Path) -> None:
    path = root / "a.toml"
    _, version = ServedFiles([root]).read_config(path)
    ServedFiles([root]).save_config(path, "another tab\n", version)
    refused("has changed since the page read it", ServedFiles([root]).save_config, path, "this tab\n", version)
    path.write_text("an editor\n")
    refused("nothing was written", ServedFiles([root]).save_config, path, "this tab\n", version)
    assert path.read_text() == "an editor\n"
    path.unlink()
    refused("does not exist any more", ServedFiles([root]).save_config, path, "this tab\n", version)


def test_a_failed_write_leaves_the_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "a.toml"
    _, version = ServedFiles([root]).read_config(path)
    monkeypatch.setattr(served_files.os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    refused("No space left", ServedFiles([root]).save_config, path, "b\n", version)
    assert path.read_text() == "a = 1\n"
    assert len(list(root.iterdir())) == 2, "no temporary file stays"


def test_what_is_outside_is_refused(root: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "outside.toml", root / ".." / "outside.toml", Path("/etc/passwd"), root / "a\0b"):
        for call in (
            lambda path=path: ServedFiles([root]).read_config(path),
            lambda path=path: ServedFiles([root]).save_config(path, "x", ""),
            lambda path=path: ServedFiles([root]).create(path, b"x"),
            lambda path=path: ServedFiles([root]).require(path),
        ):
            refused(r"not below a served folder|NUL", call)
    assert (tmp_path / "outside.toml").read_text() == "secret\n"


@pytest.mark.parametrize("link", ["file", "folder"])
def test_no_link_is_followed(root: Path, tmp_path: Path, link: str) -> None:
    if link == "file":
        path = root / "link.toml"
        path.symlink_to(tmp_path / "outside.toml")
    else:
        (root / "linked").symlink_to(tmp_path)
        path = root / "linked" / "outside.toml"
    refused("is a link", ServedFiles([root]).read_config, path)
    refused("is a link", ServedFiles([root]).save_config, path, "x", served_files._version(b"secret\n"))
    refused("is a link", ServedFiles([root]).replace, path, b"secret\n", b"x")
    refused(r"is a link|exists", ServedFiles([root]).create, path, b"x")
    with pytest.raises(UserError, match="is a link"):
        ServedFiles([root]).create(path.parent / "linked" / "new.toml" if link == "folder" else path / "new.toml", b"x")
    refused("is a link", ServedFiles([root]).require, path)
    assert (tmp_path / "outside.toml").read_text() == "secret\n"
    assert not (tmp_path / "new.toml").exists()


@pytest.mark.parametrize("kind", [name for name in SPECIAL if name != "folder"])
def test_special_files_are_not_read(root: Path, kind: str) -> None:
    path = root / "special.toml"
    SPECIAL[kind](path)
    refused(r"is not a regular file|is a link|is larger", ServedFiles([root]).read_config, path)


def test_other_encodings_and_long_texts_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a.toml").write_bytes(b"\xff")
    refused("is not UTF-8 text: byte 0", ServedFiles([root]).read_config, root / "a.toml")
    (root / "a.toml").write_text("")
    version = ServedFiles([root]).read_config(root / "a.toml")[1]
    with pytest.raises(UserError, match="would be larger than 256 KiB"):
        ServedFiles([root]).save_config(root / "a.toml", "x" * (LARGEST_TEXT + 1), version)
    monkeypatch.setattr(user_state, "_LOCK_SECONDS", 0.1)
    with handle_of(root) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)
        refused("has locked", ServedFiles([root]).replace, root / "a.toml", b"", b"a")
    ServedFiles([root]).replace(root / "a.toml", b"", b"a")


def test_a_new_file_replaces_nothing(root: Path) -> None:
    ServedFiles([root]).create(root / "new" / "deep" / "b.toml", b"b\n")
    assert (root / "new" / "deep" / "b.toml").read_text() == "b\n"
    refused("exists; choose another folder", ServedFiles([root]).create, root / "a.toml", b"b\n")
    assert (root / "a.toml").read_text() == "a = 1\n"

    def create(number: int) -> bool:
        try:
            ServedFiles([root]).create(root / "race.toml", str(number).encode())
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(16))) == 1
    assert os.listdir(root / "inner") == []
    assert not [path for path in root.iterdir() if path.suffix == ".tmp"]


def test_a_file_that_changes_during_the_write_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    fsync, calls = os.fsync, list[int]()

    def change(handle: int) -> None:
        calls.append(handle)
        path.write_bytes(b"theirs")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", change)
    refused("has changed since the page read it", ServedFiles([tmp_path]).replace, path, b"old", b"mine")
    assert calls
    assert path.read_bytes() == b"theirs"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


NO_FILES = ["..", "inner/..", "inner/../..", "", "inner/../../outside.toml", "none/../../x", "a\0b", "x" * 300]


@pytest.mark.parametrize("name", NO_FILES)
def test_paths_that_name_no_file_below_a_root_are_refused(root: Path, tmp_path: Path, name: str) -> None:
    files, before = ServedFiles([root]), sorted(tmp_path.rglob("*"))
    for call in (
        lambda: files.read(root / name),
        lambda: files.replace(root / name, None, b"x"),
        lambda: files.create(root / name, b"x"),
        lambda: files.touch(root / name),
        lambda: files.remove(root / name, b"x"),
    ):
        refused("", call)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_turned_link_is_not_followed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, outside = root / "inner" / "a.toml", tmp_path / "outside"
    path.write_text("a\n")
    outside.mkdir()
    (outside / "a.toml").write_text("a\n")
    replace = served_files._replace

    def swapped(folder: int, *rest: Any) -> None:
        (root / "inner").rename(root / "moved")
        (root / "inner").symlink_to(outside)
        replace(folder, *rest)

    monkeypatch.setattr(served_files, "_replace", swapped)
    ServedFiles([root]).save_config(path, "b\n", ServedFiles([root]).read_config(path)[1])
    assert (outside / "a.toml").read_text() == "a\n"
    assert (root / "moved" / "a.toml").read_text() == "b\n"


def test_links_and_touched_files_are_kept(root: Path, tmp_path: Path) -> None:
    files = ServedFiles([root])
    files.touch(root / "b")
    assert (root / "b").read_bytes() == b""
    files.touch(root / "a.toml")
    assert (root / "a.toml").read_text() == "a = 1\n"
    (root / "link").symlink_to(tmp_path / "new")
    refused("is a link", files.touch, root / "link")
    assert not (tmp_path / "new").exists()
    (root / "folder").symlink_to(tmp_path)
    assert "is reached through one" in ServedFiles([root]).problem(root / "folder/outside.toml")
    assert "is not below a served folder" in ServedFiles([root]).problem(tmp_path / "outside.toml")
    os.mkfifo(root / "pipe.toml")
    refused("", ServedFiles([root]).replace, root / "pipe.toml", b"", b"new")
    (tmp_path / "named").symlink_to(root)  # the user named the link
    ServedFiles([tmp_path / "named"]).replace(tmp_path / "named/a.toml", b"a = 1\n", b"new")
    assert (root / "a.toml").read_bytes() == b"new"
    (root / "alias").symlink_to(tmp_path)
    refused("serve its folder", ServedFiles([root]).read, root / "alias" / "outside.toml")
    assert ServedFiles([root, root / "alias"]).read(root / "alias" / "outside.toml") == b"secret\n"


@contextmanager
def handle_of(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
