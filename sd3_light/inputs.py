"""Bounded reads of files that others wrote: regular files only, of limited size, JSON of limited depth.

What is refused raises OSError (with a ``strerror``) or ValueError, which every reader of damaged files handles.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

TEXT_BYTES = 1 << 26
"""Largest config, index of weights or other small text file."""
INDEX_BYTES = 1 << 32
"""Largest manifest of a cache or index of a checkpoint: both may list millions of entries."""
NOT_REGULAR = "not a regular file"
"""The ``strerror`` of a pipe, device or socket."""
MAX_DEPTH = 100
"""Deepest nesting of lists and tables in JSON and TOML."""
_PIECE = 1 << 16
_CONTAINERS = (dict, list)  # a tuple is tested faster than a union, and logs have millions of lines
_LONGEST_NAME = 255  # bytes of a file name, in every common file system
_LONGEST_PATH = 4095  # bytes, PATH_MAX of Linux


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading. A pipe, device, socket or folder is an OSError, and never waits for a writer."""
    try:
        return open(path, "rb", opener=regular_handle)
    except ValueError as error:  # a NUL character
        raise OSError(errno.EINVAL, "not a valid path", str(path)) from error


def regular_handle(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Return a file descriptor, as `os.open` does, or as the ``opener`` of `open`; refuses what `open_regular` does."""
    try:
        # before it is opened: some devices act on that
        _require_regular_mode(path, os.stat(path).st_mode)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    except ValueError as error:  # a NUL character
        raise OSError(errno.EINVAL, "not a valid path", str(path)) from error
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        _require_regular_mode(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def _require_regular_mode(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def require_regular(path: str | Path, limit: int | None = None) -> None:
    """Raise an OSError unless `open_regular` can open the file, for libraries that open it themselves.

    More than ``limit`` bytes are an OSError too.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", str(path))


def lines_of(file: BinaryIO, limit: int = TEXT_BYTES) -> Iterator[bytes]:
    """Yield the lines of an open file; one of more than ``limit`` bytes is a ValueError."""
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise ValueError(f"it has a line of more than {limit >> 20} MiB")
        yield line


def read_limited(path: str | Path, limit: int = TEXT_BYTES) -> bytes:
    """Return the bytes of a regular file; an OSError if there are more than ``limit``."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(max(size, _PIECE)) if size <= limit else b""
        if size > limit or file.read(1):  # a file may grow, and some of /proc have no size
            raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", str(path))
        return data


def parse_json(text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse JSON; nesting deeper than `MAX_DEPTH` is a ValueError, as is every other fault of the text."""
    try:
        value = json.loads(text, object_hook=object_hook)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from error
    require_shallow(value)
    return value


def read_json_file(path: str | Path, limit: int = TEXT_BYTES) -> Any:
    """Return the value in a JSON file. Raises OSError or ValueError."""
    return parse_json(read_limited(path, limit))


def require_shallow(value: Any) -> None:
    """Raise a ValueError if lists and tables are nested deeper than `MAX_DEPTH`."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, _CONTAINERS)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def path_problem(path: str | Path) -> str | None:
    """Return why no file can have this path; None if one can. The disk is not read."""
    text = os.fsencode(path)
    if b"\0" in text:
        return "a path cannot contain a NUL character"
    if len(text) > _LONGEST_PATH or max(map(len, text.split(b"/"))) > _LONGEST_NAME:
        return f"is too long for a path (at most {_LONGEST_NAME} bytes per name, {_LONGEST_PATH} in all)"
    return None


def is_inner_path(name: Any) -> bool:
    """Return whether a value names a file below the folder that it is relative to."""
    if not isinstance(name, str) or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        return False
    try:
        return path_problem(name) is None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
