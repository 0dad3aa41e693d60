"""The list that `exclude` names: what it leaves out, and how it is edited."""

import json
from pathlib import Path

import pytest

from sd3_light.sources.exclusions import read_exclusions, with_exclusions
from sd3_light.sources.scan import scan
from sd3_light.sources.signature import signature
from tests.refusals import refused
from tests.unit.sources.inputs import captions, directory, png, rejects, scan_items, write_files


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three captioned images, one without a caption, and a table that lists a missing one."""
    names = ("a", "sub/b", "c")
    write_files(tmp_path / "set", {f"{name}.png": png() for name in (*names, "bare")})
    write_files(tmp_path / "set", {f"{name}.txt": name for name in names})
    return tmp_path / "set"


def write_list(images: Path, text: str) -> Path:
    path = images.parent / "exclude.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_listed_samples_and_rejects_are_left_out_and_counted(images: Path) -> None:
    listed = write_list(images, "# bad\nset#0/sub/b.png\n\n  set#0/bare.png\r\nset#1/a.png\nset#0/none.png\n")
    excluded: list[int] = []
    items = list(scan(directory(images, exclude=listed), 0, on_excluded=lambda: excluded.append(1)))
    assert set(captions(items)) == {"a.png", "c.png"}
    assert rejects(items) == {}
    assert len(excluded) == 2


def test_a_missing_or_unreadable_list_is_an_error(images: Path) -> None:
    refused(r"exclude: .*none\.txt does not exist; create it", scan_items, images, exclude=images / "none.txt")
    (images / "bytes.txt").write_bytes(b"\xff")
    refused("is not UTF-8 text: byte 0", scan_items, images, exclude=images / "bytes.txt")
    refused("cannot be read: Is a directory", scan_items, images, exclude=images)


def test_only_keys_of_a_directory_change_its_signature(images: Path) -> None:
    def sign(text: str) -> str:
        return signature(directory(images, exclude=write_list(images, text)), 0)

    assert sign("") == signature(directory(images), 0) == sign("# a comment\nother#0/a.png\nset#1/a.png\n")
    assert len({sign(""), sign("set#0/a.png\n"), sign("set#0/c.png\n")}) == 3
    assert sign("set#0/a.png\nset#0/c.png\n") == sign("set#0/c.png\n\nset#0/a.png")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_editing_keeps_all_other_lines(tmp_path: Path, ending: str) -> None:
    text = ending.join(["\ufeff# mine", "set#0/a.png  ", "", "set#0/b.png"])
    edited = with_exclusions(text, ["set#0/c.png", "set#0/a.png"], ["set#0/b.png"])
    assert edited == ending.join(["\ufeff# mine", "set#0/a.png  ", "", "set#0/c.png", ""])
    assert with_exclusions(edited, [], ["set#0/c.png"]) == ending.join(["\ufeff# mine", "set#0/a.png  ", "", ""])


HOSTILE = ["#a", '"a"', " a", "a\nb", "a\u2028b", "a\rb", "a\x1cb", "\ufeffa", '"', "猫.png", "\u202egnp.a"]


def test_any_key_survives(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(with_exclusions("", HOSTILE, []), encoding="utf-8", newline="")
    assert read_exclusions(path) == set(HOSTILE)
    assert with_exclusions(path.read_text(encoding="utf-8"), [], HOSTILE) == ""
    path.write_text('"broken\n' + json.dumps(["a"]) + "\n", encoding="utf-8")
    assert read_exclusions(path) == {'["a"]'}
