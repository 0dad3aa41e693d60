"""Atomic writes: existing files survive failures, two writers never collide, and nothing half-written remains."""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from sd3_light import files
from sd3_light.config.faults import UserError
from sd3_light.files import atomic_file, new_file, new_folder, refuse_existing, write_atomically, write_errors
from sd3_light.inputs import open_regular, read_limited, require_regular
from sd3_light.system import machine
from tests.leftovers import ended_process

NewPath = Callable[[Path], AbstractContextManager[Path]]


@pytest.fixture
def strict_umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


@pytest.mark.parametrize("make", [atomic_file, new_file])
def test_a_file_of_the_safetensors_library_follows_the_umask(tmp_path: Path, strict_umask: int, make: NewPath) -> None:
    """The library itself creates files that only their owner can read."""
    with make(tmp_path / "x.safetensors") as temporary:
        save_file({"a": np.zeros(1)}, temporary)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o666 & ~strict_umask


def disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, disk_full)
        with pytest.raises(UserError, match=rf"cannot write {path}: No space left on device; free disk space") as error:
            write_atomically(path, b"new")
    assert "\n" not in str(error.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_an_error_of_the_writer_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def write() -> None:
        with atomic_file(path) as temporary:
            temporary.write_bytes(b"half")
            raise LookupError

    with pytest.raises(LookupError):
        write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    with atomic_file(path) as first:
        first.write_bytes(b"first")
        with atomic_file(path) as second:
            assert first != second
            second.write_bytes(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"


def test_an_existing_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("", "file", "link"):
        with pytest.raises(UserError, match="already exists"):
            refuse_existing(tmp_path / name)
    for name, reason in (("file/x", "Not a directory"), ("x" * 300, "name too long")):
        with pytest.raises(UserError, match=reason):
            refuse_existing(tmp_path / name)
    refuse_existing(tmp_path / "new" / "name")
    for read in (open_regular, read_limited, require_regular):
        with pytest.raises(OSError, match="not a valid path"):
            read(f"{tmp_path}/a\0b")


def test_the_first_of_two_commands_wins_and_the_other_reports_it(tmp_path: Path) -> None:
    def race(new: NewPath, path: Path, write: Callable[[Path, str], object]) -> None:
        with new(path) as outer:
            write(outer, "second")
            with new(path) as inner:
                write(inner, "first")

    with pytest.raises(UserError, match="file already exists"):
        race(new_file, tmp_path / "file", lambda path, word: path.write_text(word))
    with pytest.raises(UserError, match="folder already exists"):
        race(new_folder, tmp_path / "folder", lambda path, word: (path / word).mkdir())
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "first"
    assert os.listdir(tmp_path / "folder") == ["first"]
    io = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (OSError(28, "No space left on device"), SafetensorError(io)):
        with (
            pytest.raises(UserError, match=r"^cannot write out: No space left on device; free disk space"),
            write_errors(Path("out")),
        ):
            raise error
    with pytest.raises(SafetensorError), write_errors(Path("out")):
        raise SafetensorError("tensors share memory")


def test_a_disk_without_hard_links_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with new_file(tmp_path / "file") as temporary:
        temporary.write_text("whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "whole")]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, stop: type[BaseException]) -> None:
    def interrupted(new: NewPath) -> None:
        with new(tmp_path / "out") as temporary:
            (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
            raise stop

    for new in (new_file, new_folder):
        with pytest.raises(stop):
            interrupted(new)
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "weights").write_text("old")
    with pytest.raises(OSError, match="missing"):
        files.swap_folder(tmp_path / "missing", old, tmp_path / "aside")
    assert (old / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_was_renamed_aside_is_restored_after_a_kill(tmp_path: Path) -> None:
    dead = ended_process()
    for name, suffix in (("lost", "old"), ("there", "old"), ("half", "tmp")):
        (tmp_path / f".{name}.{machine()}~{dead}~0.{suffix}").mkdir()
    (tmp_path / f".half.{machine()}~{os.getpid()}~1.tmp").mkdir()  # its writer is still running
    (tmp_path / "there").mkdir()
    for name in ("lost", "there", "half"):
        files.sweep_leftovers(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == [f".half.{machine()}~{os.getpid()}~1.tmp", "lost", "there"]


def test_only_temporary_files_of_ended_processes_are_removed(tmp_path: Path) -> None:
    """A process of this machine that has ended, or any file that was not changed for a day."""
    now, dead = time.time(), ended_process()
    mine = tmp_path / f".a~b.safetensors.{machine()}~{os.getpid()}~0.tmp"
    killed = tmp_path / f".a.safetensors.{machine()}~{dead}~0.tmp"
    elsewhere = tmp_path / f".b.safetensors.elsewhere~{dead}~0.tmp"
    ancient = tmp_path / ".c.safetensors.elsewhere~1~0.tmp"
    shard = tmp_path / "d.safetensors"
    for path in (mine, killed, elsewhere, ancient, shard):
        path.touch()
    os.utime(ancient, (now - 90_000, now - 90_000))
    os.utime(shard, (0, 0))
    files.sweep_files(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere, shard])
