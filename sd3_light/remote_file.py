"""Files and folders at a URL: listings, versions, and reads by range through a small window, with retries."""

import io
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from errno import EACCES, EIO, EISDIR, ENOENT
from typing import Any, TypeVar

from sd3_light.config.faults import UserError
from sd3_light.urls import RemoteForbidden, RemoteNotFound, with_retries

WINDOW_BYTES = 4 << 20
"""Most bytes that a file reads ahead."""
_FIRST_BYTES = 1 << 16
_VALIDATORS = ("ETag", "etag", "md5Hash", "Content-MD5", "generation", "LastModified", "last_modified", "Last-Modified")

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A file or folder at a URL. ``version`` is ``SIZE-ETAG`` of a file, "" where a listing does not have it."""

    name: str
    path: str
    is_folder: bool
    size: int
    version: str

    def is_dir(self) -> bool:
        """Return whether this is a folder, like `os.DirEntry`."""
        return self.is_folder


def list_remote(url: str) -> Iterator[RemoteEntry]:
    """Yield the entries of a folder in any order. The whole listing is in memory (about 1 kB per entry)."""
    for info in _request(url, _list):
        name = str(info["name"]).rstrip("/").rpartition("/")[2]
        entry = _entry(f"{url}/{name}", info)
        # stores without folders may have an empty object in place of one
        if name and (entry.is_folder or not str(info["name"]).endswith("/")):
            yield entry


def remote_entry(url: str) -> RemoteEntry:
    """Return what is at a URL now. Raises OSError if there is nothing."""
    return _entry(url, _request(url, lambda files, path: files.info(path)))


def remote_is_folder(url: str) -> bool:
    """Return whether a URL is a folder: something is below it."""
    try:
        # HTTP has no folders, only pages of links; elsewhere this would list the whole folder
        if url.startswith(("http://", "https://")):
            return bool(_request(url, lambda files, path: files.isdir(path)))
        return remote_entry(url).is_folder
    except FileNotFoundError:
        return False


def read_remote(url: str) -> bytes:
    """Return the bytes of a whole file. Raises OSError if it is missing or not readable by this user."""
    data: bytes = _request(url, _read_whole)
    return data


class RemoteFile(io.RawIOBase):
    """A file at a URL, read by range.

    Reads that follow each other closely share requests: the file then reads ahead, up to `WINDOW_BYTES`. A read
    elsewhere takes little more than its own bytes. Forked processes may share it, threads may not.
    """

    def __init__(self, url: str) -> None:
        entry = remote_entry(url)
        if entry.is_folder:
            raise IsADirectoryError(EISDIR, "a folder", url)
        self.url = url
        self.size = entry.size
        self.version = entry.version
        self._at = 0
        self._ahead = 0
        self._start = 0
        self._window = b""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset``, fewer at the end of the file. The position does not change."""
        end = min(offset + size, self.size)
        if end <= offset:
            return b""
        held = self._start + len(self._window)
        if not (self._start <= offset and end <= held):
            is_near = self._ahead > 0 and self._start <= offset <= held + self._ahead
            self._ahead = min(2 * self._ahead, WINDOW_BYTES) if is_near else _FIRST_BYTES
            kept = self._window[offset - self._start :] if self._start <= offset < held else b""
            self._window = kept + self._fetch(offset + len(kept), min(max(end, offset + self._ahead), self.size))
            self._start = offset
        data = self._window[offset - self._start : end - self._start]
        if len(self._window) > WINDOW_BYTES:
            self._start = end
            self._window = b""
        return data

    def _fetch(self, start: int, end: int) -> bytes:
        data: bytes = _request(self.url, lambda files, path: files.cat_file(path, start=start, end=end))
        if len(data) > end - start:
            raise UserError(f"{self.url}: its server ignores requests for a range; copy the file to another store")
        if len(data) < end - start:
            raise OSError(EIO, "it became shorter while it was read", self.url)
        return data

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return ``size`` bytes from the position, or the rest."""
        data = self.read_at(self._at, self.size if size is None or size < 0 else size)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` from the position."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


_current = threading.local()


def shared_file(url: str, reopen: bool = False) -> RemoteFile:
    """Return this thread's open file. It replaces that of another URL; ``reopen`` asks the store for its version."""
    file: RemoteFile | None = getattr(_current, "file", None)
    if file is None or file.url != url or reopen:
        _current.file = file = RemoteFile(url)
    return file


def remote_version(url: str) -> str:
    """Return ``SIZE-ETAG`` of a file: of this thread's open file, or from the store. Raises OSError."""
    file: RemoteFile | None = getattr(_current, "file", None)
    return file.version if file is not None and file.url == url else remote_entry(url).version


def _request(url: str, call: Callable[[Any, str], _Result]) -> _Result:
    """Return the result of a request; a missing or forbidden object is an OSError, an unreachable store a UserError."""
    try:
        return with_retries(url, call)
    except RemoteNotFound as error:
        raise FileNotFoundError(ENOENT, "no such object", url) from error
    except RemoteForbidden as error:
        raise PermissionError(EACCES, str(error)) from error


def _list(files: Any, path: str) -> list[dict[str, Any]]:
    files.invalidate_cache(path)
    try:
        listing: list[dict[str, Any]] = files.ls(path, detail=True)
        return listing
    finally:
        files.invalidate_cache(path)  # it would keep the listing in memory


def _read_whole(files: Any, path: str) -> bytes:
    # with a start, S3's library does not ask for the size first; a store rejects the range of an empty object
    try:
        data: bytes = files.cat_file(path, start=0)
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, ValueError):
        data = files.cat_file(path)
    return data


def _entry(url: str, info: Mapping[str, Any]) -> RemoteEntry:
    name = url.rpartition("/")[2]
    is_folder = info.get("type") == "directory"
    size = info.get("size")
    validator = next((str(info[key]).strip('"') for key in (*_VALIDATORS, "mtime") if info.get(key)), "")
    version = "" if is_folder or size is None else f"{size}-{validator}"
    return RemoteEntry(name, url, is_folder, size or 0, version)
