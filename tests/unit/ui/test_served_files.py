"""Writes below the served folders: atomic, through no link, and only over what the page has read."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sd3_light.config.faults import UserError
from sd3_light.ui import served_files
from sd3_light.ui.served_files import LARGEST_TEXT, create_text, read_served, require_served, save_text
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
    text, version = read_served([root], path)
    assert text == "a = 1\n"
    new = save_text([root], path, "a = 2 # 中\n", version)
    assert read_served([root], path) == ("a = 2 # 中\n", new)
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in root.iterdir()) == ["a.toml", "inner"]


def test_a_file_that_changed_since_it_was_read_is_not_written(root: Path) -> None:
    path = root / "a.toml"
    _, version = read_served([root], path)
    save_text([root], path, "another tab\n", version)
    with pytest.raises(UserError, match="has changed since this page read it"):
        save_text([root], path, "this tab\n", version)
    path.write_text("an editor\n")
    with pytest.raises(UserError, match="Nothing was written"):
        save_text([root], path, "this tab\n", version)
    assert path.read_text() == "an editor\n"
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        save_text([root], path, "this tab\n", version)


def test_a_failed_write_leaves_the_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "a.toml"
    _, version = read_served([root], path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(served_files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        save_text([root], path, "b\n", version)
    assert path.read_text() == "a = 1\n"
    assert len(list(root.iterdir())) == 2, "no temporary file stays"


def test_what_is_outside_is_refused(root: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "outside.toml", root / ".." / "outside.toml", Path("/etc/passwd"), root / "a\0b"):
        for call in (
            lambda path=path: read_served([root], path),
            lambda path=path: save_text([root], path, "x", ""),
            lambda path=path: create_text([root], path, "x"),
            lambda path=path: require_served([root], path),
        ):
            with pytest.raises(UserError, match=r"not below a served folder|NUL"):
                call()
    assert (tmp_path / "outside.toml").read_text() == "secret\n"


@pytest.mark.parametrize("link", ["file", "folder"])
def test_no_link_is_followed(root: Path, tmp_path: Path, link: str) -> None:
    if link == "file":
        path = root / "link.toml"
        path.symlink_to(tmp_path / "outside.toml")
    else:
        (root / "linked").symlink_to(tmp_path)
        path = root / "linked" / "outside.toml"
    with pytest.raises(UserError, match="is a link"):
        read_served([root], path)
    with pytest.raises(UserError, match="is a link"):
        save_text([root], path, "x", served_files._version(b"secret\n"))
    with pytest.raises(UserError, match=r"is a link|exists"):
        create_text([root], path, "x")
    with pytest.raises(UserError, match="is a link"):
        create_text([root], path.parent / "linked" / "new.toml" if link == "folder" else path / "new.toml", "x")
    with pytest.raises(UserError, match="is a link"):
        require_served([root], path)
    assert (tmp_path / "outside.toml").read_text() == "secret\n"
    assert not (tmp_path / "new.toml").exists()


def test_a_served_folder_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert read_served([tmp_path / "alias"], tmp_path / "alias" / "a.toml")[0] == "a = 1\n"


@pytest.mark.parametrize("kind", [name for name in SPECIAL if name != "folder"])
def test_special_files_are_not_read(root: Path, kind: str) -> None:
    path = root / "special.toml"
    SPECIAL[kind](path)
    with pytest.raises(UserError, match="cannot read"):
        read_served([root], path)


def test_other_encodings_and_long_texts_are_refused(root: Path) -> None:
    (root / "a.toml").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not UTF-8 text: byte 0"):
        read_served([root], root / "a.toml")
    (root / "a.toml").write_text("")
    with pytest.raises(UserError, match="would be larger than 256 KiB"):
        save_text([root], root / "a.toml", "x" * (LARGEST_TEXT + 1), read_served([root], root / "a.toml")[1])


def test_a_new_file_replaces_nothing(root: Path) -> None:
    create_text([root], root / "new" / "deep" / "b.toml", "b\n")
    assert (root / "new" / "deep" / "b.toml").read_text() == "b\n"
    with pytest.raises(UserError, match="exists; choose another folder"):
        create_text([root], root / "a.toml", "b\n")
    assert (root / "a.toml").read_text() == "a = 1\n"


def test_of_many_new_files_one_wins(root: Path) -> None:
    def create(number: int) -> bool:
        try:
            create_text([root], root / "race.toml", str(number))
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(16))) == 1
    assert os.listdir(root / "inner") == []
    assert not [path for path in root.iterdir() if path.suffix == ".tmp"]
