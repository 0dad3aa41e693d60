"""Names to write to: a taken one stays as it is, two commands never meet, and nothing half-written is left."""

import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from safetensors import SafetensorError

from sd3_light.config.faults import UserError
from sd3_light.data.files import machine
from sd3_light.export.places import new_file, new_folder, refuse_existing, sweep, writing

Place = Callable[[Path], AbstractContextManager[Path]]


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_taken_name_is_refused_whatever_has_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("", "file", "link"):
        with pytest.raises(UserError, match="exists already"):
            refuse_existing(tmp_path / name)
    for name, words in (("file/x", "Not a directory"), ("x" * 300, "name too long")):
        with pytest.raises(UserError, match=words):
            refuse_existing(tmp_path / name)
    refuse_existing(tmp_path / "new" / "name")


def test_of_two_commands_the_first_wins_and_the_other_says_so(tmp_path: Path) -> None:
    def race(place: Place, out: Path, write: Callable[[Path, str], object]) -> None:
        with place(out) as mine:
            write(mine, "second")
            with place(out) as other:
                write(other, "first")

    with pytest.raises(UserError, match="file exists already"):
        race(new_file, tmp_path / "file", lambda path, word: path.write_text(word))
    with pytest.raises(UserError, match="folder exists already"):
        race(new_folder, tmp_path / "folder", lambda path, word: (path / word).mkdir())
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "first"
    assert os.listdir(tmp_path / "folder") == ["first"]


def test_a_disk_without_links_is_written_to_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with new_file(tmp_path / "file") as mine:
        mine.write_text("whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "whole")]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_what_is_broken_off_leaves_nothing(tmp_path: Path, stop: type[BaseException]) -> None:
    def broken_off(place: Place) -> None:
        with place(tmp_path / "out") as mine:
            (mine / "half" if mine.is_dir() else mine).write_text("half")
            raise stop

    for place in (new_file, new_folder):
        with pytest.raises(stop):
            broken_off(place)
    assert not os.listdir(tmp_path)


def test_a_folder_that_stepped_aside_comes_back_after_a_kill(tmp_path: Path, dead: int) -> None:
    for name, kind in (("lost", "old"), ("there", "old"), ("half", "tmp")):
        (tmp_path / f".{name}.{machine()}~{dead}~0.{kind}").mkdir()
    (tmp_path / f".half.{machine()}~{os.getpid()}~1.tmp").mkdir()  # of a command that is still at work
    (tmp_path / "there").mkdir()
    for name in ("lost", "there", "half"):
        sweep(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == [f".half.{machine()}~{os.getpid()}~1.tmp", "lost", "there"]


def test_what_the_disk_refuses_is_one_line_and_what_is_ours_is_not_hidden() -> None:
    io = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (OSError(28, "No space left on device"), SafetensorError(io)):
        with (
            pytest.raises(UserError, match=r"^cannot write out: No space left on device; make room"),
            writing(Path("out")),
        ):
            raise error
    with pytest.raises(SafetensorError), writing(Path("out")):
        raise SafetensorError("tensors share memory")
