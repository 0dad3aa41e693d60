"""File-system calls that fail: count the writes of a run below a folder, then let one of them fail.

Opening for writing, renaming, linking, deleting, creating folders and changing times are seen by an audit hook, so no
caller can avoid it; writes to files, fsync and the safetensors library, which writes outside Python, are patched.
"""

import errno
import io
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.feather
import safetensors.torch
from safetensors import SafetensorError

from sd3_light.system import machine

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE)

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATH_EVENTS = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate", "os.utime")
_PATH_EVENTS += ("os.remove", "os.rmdir", "shutil.rmtree")
_FREEING = ("os.remove", "os.rmdir", "shutil.rmtree", "os.rename")  # these work on a full disk


@dataclass(frozen=True)
class Call:
    """The ``number``-th call of one kind on one path, relative to the folder, without the parts that vary."""

    kind: str
    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}({self.path})#{self.number}"


@dataclass
class Disk:
    """The calls below ``root`` so far; the one ``fails`` raises ``error``, with ``lasting`` all later ones as well."""

    root: Path
    fails: Call | None = None
    error: int = errno.ENOSPC
    lasting: bool = False
    calls: list[Call] = field(default_factory=list)
    failed: list[Call] = field(default_factory=list)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.RLock)

    def call(self, kind: str, path: Any) -> None:
        """Count a call; raise if it is to fail."""
        name = os.path.abspath(os.fsdecode(path))
        if not name.startswith(f"{self.root}{os.sep}"):
            return
        label = _stable(os.path.relpath(name, self.root))
        with self._lock:
            self._counts[kind, label] += 1
            call = Call(kind, label, self._counts[kind, label])
            self.calls.append(call)
            if call != self.fails and not (self.lasting and self.failed and self._still_fails(kind)):
                return
            self.failed.append(call)
        named = () if kind in ("write", "fsync") else (name,)  # errors of an open file do not name it
        raise OSError(self.error, os.strerror(self.error), *named)

    def _still_fails(self, kind: str) -> bool:
        return self.error != errno.ENOSPC or kind not in _FREEING


def _stable(path: str) -> str:
    """Return a path without machine, process, time and hashes, so that it names the same kind of file in every run."""
    path = re.sub(r"[^/]*-\d+-\d+-[0-9a-f]{6}\.alive", "OWNER.alive", path)
    path = re.sub(r"events\.out\.tfevents[^/]*", "EVENTS", path)
    path = re.sub(rf"\.{re.escape(machine())}~\d+~[0-9a-f]{{8}}(?=\.)", "", path)
    return re.sub(r"[0-9a-f]{16,}(?=\.)", "HASH", path)


_disk: Disk | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    disk = _disk
    if disk is None:
        return
    if event == "open":
        path, _, flags = args
        if isinstance(path, str | bytes | os.PathLike) and isinstance(flags, int) and flags & _WRITING:
            disk.call("open", path)
    elif event in _PATH_EVENTS and isinstance(args[0], str | bytes | os.PathLike):
        disk.call(event, args[0])


sys.addaudithook(_audit)  # it cannot be removed; outside `faulty_disk` it does nothing


class _File:
    """An open file whose writes are counted; one that fails writes half of its data, as a disk that fills up does."""

    def __init__(self, file: Any, path: Any) -> None:
        self._file, self._path = file, path

    def write(self, data: Any) -> Any:
        try:
            if _disk is not None:
                _disk.call("write", self._path)
        except OSError:
            if not isinstance(self._file, io.RawIOBase):  # a raw write that fails writes nothing
                self._file.write(data[: len(data) // 2])
                self._file.flush()
            raise
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_File":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._file)


@contextmanager
def faulty_disk(root: Path, fails: Any = None, error: int = errno.ENOSPC, lasting: bool = False) -> Iterator[Disk]:
    """Count the writing calls below ``root`` inside the block, and let the one that is given fail."""
    global _disk
    real_open, real_fsync, real_save = io.open, os.fsync, safetensors.torch.serialize_file
    real_feather, real_arrow = pyarrow.feather.write_feather, pa.OSFile
    disk = Disk(root.resolve(), fails, error, lasting)

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        handle = real_open(file, mode, *args, **options)
        is_counted = isinstance(file, str | os.PathLike) and set(mode) & set("wax+")
        return _File(handle, file) if is_counted else handle

    def fsync(handle: int) -> None:
        disk.call("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        real_fsync(handle)

    def write_feather(table: Any, target: Any, *args: Any, **options: Any) -> None:
        if isinstance(target, str):
            disk.call("write_feather", target)
        real_feather(table, target, *args, **options)

    def arrow_file(path: str, mode: str = "r") -> Any:
        disk.call("open", path)
        return real_arrow(path, mode)

    def save(tensors: Any, path: Any, *args: Any, **options: Any) -> None:
        try:
            disk.call("save_file", path)
        except OSError as failure:
            text = f"I/O error: {failure.strerror} (os error {failure.errno})"
            raise SafetensorError(f"Error while serializing: {text}") from None
        real_save(tensors, path, *args, **options)

    with (
        mock.patch("builtins.open", opened),
        mock.patch("io.open", opened),
        mock.patch("os.fsync", fsync),
        mock.patch("safetensors.torch.serialize_file", save),
        mock.patch("pyarrow.feather.write_feather", write_feather),
        mock.patch("pyarrow.OSFile", arrow_file),
    ):
        _disk = disk
        try:
            yield disk
        finally:
            _disk = None
