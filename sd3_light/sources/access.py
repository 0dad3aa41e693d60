"""Access to the files of a source, on disk or at a URL. A path is a text; `is_url` distinguishes the two."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from sd3_light.config.base import DataLocation, is_url
from sd3_light.config.faults import UserError
from sd3_light.inputs import open_regular
from sd3_light.remote_file import (
    RemoteEntry,
    RemoteFile,
    list_remote,
    read_remote,
    remote_entry,
    remote_is_folder,
    remote_version,
    shared_file,
)

FolderEntry = RemoteEntry | os.DirEntry[str]
CONTAINERS = (".tar", ".parquet")


def suffix_of(path: DataLocation) -> str:
    """Return the suffix of a path or URL in lower case."""
    return os.path.splitext(path)[1].lower()


def exists(path: DataLocation) -> bool:
    """Return whether a file or folder exists. A URL that this user may not read is a UserError."""
    if isinstance(path, Path):
        return path.exists()
    try:
        return is_folder(path) or bool(remote_entry(path))
    except FileNotFoundError:
        return False
    except PermissionError as error:
        raise UserError(str(error.strerror)) from error


def is_folder(path: DataLocation) -> bool:
    """Return whether a path is a folder; a URL with the suffix of a container is not."""
    if isinstance(path, Path):
        return path.is_dir()
    return suffix_of(path) not in CONTAINERS and remote_is_folder(path)


@contextmanager
def folder_entries(path: str) -> Iterator[Iterator[FolderEntry]]:
    """List a folder, in any order. Raises OSError."""
    if is_url(path):
        yield list_remote(path)
    else:
        with os.scandir(path) as entries:
            yield entries


def open_file(path: str) -> BinaryIO:
    """Open a file for reading, a URL with little memory. Raises OSError."""
    return cast(BinaryIO, io.BufferedReader(RemoteFile(path))) if is_url(path) else open_regular(path)


def open_container(path: str) -> BinaryIO:
    """Open a tar or Parquet file for a scan. At a URL it is the thread's open file, for `read_range` and versions."""
    return cast(BinaryIO, shared_file(path, reopen=True)) if is_url(path) else open_regular(path)


def read_file(path: str) -> bytes:
    """Return the bytes of a file. Raises OSError."""
    if is_url(path):
        return read_remote(path)
    with open_regular(path) as file:
        return file.read()


def read_range(path: str, offset: int, size: int) -> bytes:
    """Return ``size`` bytes from ``offset``. Raises OSError, and EOFError with the number of bytes that are missing."""
    if is_url(path):
        remote = shared_file(path)
        _require_length(offset + size, remote.size)
        return remote.read_at(offset, size)
    with open_regular(path) as file:
        _require_length(offset + size, os.fstat(file.fileno()).st_size)
        file.seek(offset)
        return file.read(size)


def _require_length(end: int, size: int) -> None:
    # nothing is allocated for bytes that the file does not have
    if end > size:
        raise EOFError(end - size)


def file_size(path: str) -> int:
    """Return the bytes of a file. Raises OSError."""
    return remote_entry(path).size if is_url(path) else os.stat(path).st_size


def version_of(path: str) -> str:
    """Return ``SIZE-MTIME_NS`` of a file on disk, ``SIZE-ETAG`` of one at a URL. Raises OSError."""
    # not cached: a stat takes a microsecond or two, and a cached result could hide a change
    if is_url(path):
        return remote_version(path)
    status = os.stat(path)
    return f"{status.st_size}-{status.st_mtime_ns}"
