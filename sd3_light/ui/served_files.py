"""Reads and replaces files below the served folders: no link is followed, and no change of others is overwritten."""

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.system import machine, umask
from sd3_light.ui.user_state import hold_lock

LARGEST_TEXT = 1 << 18
"""Bytes of a config that the pages edit."""
_LARGEST = 1 << 28  # bytes of another file that is changed
_LINKS = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)  # of an open that follows no link
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ChangedFileError(UserError):
    """The file is not the one that was read any more."""


@dataclass(frozen=True)
class ServedFiles:
    """The files below ``roots``, which are absolute. Everything else is refused with a UserError."""

    roots: Sequence[Path]

    def require(self, path: Path) -> Path:
        """Return the absolute path of a file or folder, which may not exist yet, if no part below its root is a link.

        For programs that open it themselves.
        """
        path, root = self._located(path)
        inner = root
        for name in path.relative_to(root).parts:
            inner /= name
            if inner.is_symlink():
                raise _link(inner)
        return path

    def problem(self, path: Path) -> str:
        """Return why a file cannot be changed; "" if it can, as far as its folders say."""
        try:
            with self._folder(path):
                return ""
        except UserError as error:
            return str(error)

    def read(self, path: Path, most: int = _LARGEST) -> bytes | None:
        """Return the bytes of a file, None if it does not exist."""
        with self._folder(path) as folder:
            return _read(folder, path, most)

    def require_bytes(self, path: Path, most: int = _LARGEST) -> bytes:
        """Return the bytes of a file that must exist."""
        data = self.read(path, most)
        if data is None:
            raise UserError(f"{path} does not exist any more; reload the page")
        return data

    def read_config(self, path: Path) -> tuple[str, str]:
        """Return the text of a config and its version."""
        data = self.require_bytes(path, LARGEST_TEXT)
        try:
            return data.decode("utf-8"), _version(data)
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: byte {error.start}; save it as UTF-8") from error

    def replace(self, path: Path, old: bytes | None, new: bytes) -> None:
        """Replace a file whose bytes must be ``old``; None: it must not exist. The change is atomic.

        Servers that write into the same folder wait for each other.
        """
        with self._folder(path) as folder:
            _replace(folder, path, old, new)

    def save_config(self, path: Path, text: str, version: str) -> str:
        """Replace a config that has this version, and return the new version. The line ends of the file stay."""
        old = self.require_bytes(path, LARGEST_TEXT)
        if _version(old) != version:
            raise _changed(path)
        new = _with_line_ends(text, old).encode()
        if len(new) > LARGEST_TEXT:
            raise UserError(f"{path} would be larger than {LARGEST_TEXT >> 10} KiB; shorten it")
        self.replace(path, old, new)
        return _version(new)

    def create(self, path: Path, data: bytes) -> None:
        """Write a new file, and its folders."""
        with self._folder(path, create=True) as folder:
            try:
                _replace(folder, path, None, data)
            except ChangedFileError as error:
                raise UserError(f"{path} exists; choose another folder. It was not changed") from error

    def touch(self, path: Path) -> None:
        """Create an empty file where nothing is yet."""
        with self._folder(path) as folder:
            if _read(folder, path, _LARGEST) is None:
                with suppress(FileExistsError):
                    _write(folder, path.name, b"", 0o666 & ~umask())

    def remove(self, path: Path, old: bytes) -> None:
        """Remove a file that this program has created and whose bytes must be ``old``."""
        with self._folder(path) as folder:
            hold_lock(folder, path.parent)
            _require(folder, path, old)
            try:
                os.unlink(path.name, dir_fd=folder)
            except OSError as error:
                raise UserError(f"cannot remove {path}: {error.strerror}; nothing was changed") from error

    def _located(self, path: Path) -> tuple[Path, Path]:
        """Return the absolute path and the served folder that it is below, the innermost of several."""
        if "\0" in str(path):
            raise UserError("a path cannot contain a NUL character")
        path = Path(os.path.abspath(path))
        outer = [root for root in self.roots if path.is_relative_to(root)]
        if not outer:
            served = ", ".join(map(str, self.roots))
            raise UserError(f"{path} is not below a served folder ({served}); start `sd3-light ui` with its folder too")
        return path, max(outer, key=lambda root: len(root.parts))

    @contextmanager
    def _folder(self, path: Path, create: bool = False) -> Iterator[int]:
        """Yield the handle of a file's folder, which was reached from its root without following a link."""
        located, root = self._located(path)
        if located == root or located.name != path.name:
            raise UserError(f"{path} is not the path of a file")
        handle = -1
        try:
            handle = os.open(root, _FOLDER)  # the user named it
            for name in located.relative_to(root).parts[:-1]:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=handle)
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        except OSError as error:
            if error.errno in _LINKS:
                raise _link(path) from error
            raise UserError(f"{path} cannot be opened: {error.strerror}; nothing was changed") from error
        finally:
            if handle >= 0:
                os.close(handle)


def _link(path: Path) -> UserError:
    return UserError(f"{path} is a link, or is reached through one, which is not followed; serve its folder")


def _changed(path: Path) -> ChangedFileError:
    return ChangedFileError(f"{path} has changed since the page read it; nothing was written. Reload the page")


def _require(folder: int, path: Path, old: bytes | None) -> None:
    if _read(folder, path, _LARGEST) != old:
        raise _changed(path)


def _read(folder: int, path: Path, most: int) -> bytes | None:
    try:
        before = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(before.st_mode):
        raise _link(path)
    if not stat.S_ISREG(before.st_mode):  # before it is opened: some devices act on that
        raise UserError(f"{path} is not a regular file")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path.name, flags, dir_fd=folder), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path} is not a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path} is larger than {most >> 10:,} KiB; change it with another program")
    return data


def _replace(folder: int, path: Path, old: bytes | None, new: bytes) -> None:
    hold_lock(folder, path.parent)
    _require(folder, path, old)
    temporary = f".{machine()}~{os.getpid()}~{uuid.uuid4().hex[:8]}.tmp"
    try:
        _write(folder, temporary, new, _mode(folder, path))
        _require(folder, path, old)  # an editor does not wait
        if old is None:
            os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        else:
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(OSError):  # the change is made, and some file systems cannot flush a folder
            os.fsync(folder)
    except FileExistsError as error:
        raise _changed(path) from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; nothing was changed") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)


def _mode(folder: int, path: Path) -> int:
    """Return the permissions of the file, or those of a new one."""
    try:
        return stat.S_IMODE(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return 0o666 & ~umask()


def _write(folder: int, name: str, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def _with_line_ends(text: str, old: bytes) -> str:
    """Return a text with the line ends of a file: browsers send LF."""
    if 2 * old.count(b"\r\n") <= old.count(b"\n"):
        return text
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
