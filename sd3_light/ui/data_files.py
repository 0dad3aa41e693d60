"""Reads and replaces files below the served folders: no link is followed, and no change of others is overwritten."""

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.system import machine, umask

_LARGEST = 1 << 28  # bytes of a file that is changed
_LINKS = (errno.ELOOP, errno.ENOTDIR)  # of an open that follows no link


class ChangedFileError(UserError):
    """The file is not the one that was read any more."""


@dataclass(frozen=True)
class DataFiles:
    """The files below ``roots``, which are absolute. Everything else is refused with a UserError."""

    roots: Sequence[Path]

    def problem(self, path: Path) -> str:
        """Return why a file cannot be changed; "" if it can, as far as its folders say."""
        try:
            with self._folder(path):
                return ""
        except UserError as error:
            return str(error)

    def read(self, path: Path) -> bytes | None:
        """Return the bytes of a file, None if it does not exist."""
        with self._folder(path) as folder:
            return _read(folder, path)

    def replace(self, path: Path, old: bytes | None, new: bytes) -> None:
        """Replace a file whose bytes must be ``old``; None: it must not exist. The change is atomic.

        Servers that write into the same folder wait for each other.
        """
        with self._folder(path) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX)
            _require(folder, path, old)
            temporary = f".{machine()}~{os.getpid()}~{uuid.uuid4().hex[:8]}.tmp"
            try:
                _write(folder, temporary, new, _mode(folder, path))
                _require(folder, path, old)  # an editor does not wait
                if old is None:
                    os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                else:
                    os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except FileExistsError as error:
                raise _changed(path) from error
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}; nothing was changed") from error
            finally:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)

    def remove(self, path: Path, old: bytes) -> None:
        """Remove a file that this program has created and whose bytes must be ``old``."""
        with self._folder(path) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX)
            _require(folder, path, old)
            try:
                os.unlink(path.name, dir_fd=folder)
            except OSError as error:
                raise UserError(f"cannot remove {path}: {error.strerror}; nothing was changed") from error

    @contextmanager
    def _folder(self, path: Path) -> Iterator[int]:
        """Yield the handle of a file's folder, which was reached from its root without following a link."""
        path = Path(os.path.abspath(path))
        root = next((root for root in self.roots if path.is_relative_to(root) and path != root), None)
        if root is None:
            served = ", ".join(map(str, self.roots))
            raise UserError(f"{path} is not in a served folder ({served}); pass its folder to `sd3-light ui`")
        handle = -1
        try:
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the user named it
            for name in path.relative_to(root).parts[:-1]:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _LINKS:
                raise UserError(f"{path} is reached through a link, which is not followed; serve its folder") from error
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be opened: {reason}; nothing was changed") from error
        finally:
            if handle >= 0:
                os.close(handle)


def _changed(path: Path) -> ChangedFileError:
    return ChangedFileError(f"{path} has changed since the page read it; nothing was written. Reload the page")


def _require(folder: int, path: Path, old: bytes | None) -> None:
    if _read(folder, path) != old:
        raise _changed(path)


def _read(folder: int, path: Path) -> bytes | None:
    try:
        before = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(before.st_mode):
        raise UserError(f"{path} is a link, which is not followed; change the file that it points to")
    if not stat.S_ISREG(before.st_mode):
        raise UserError(f"{path} is not a regular file")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path.name, flags, dir_fd=folder), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path} is not a regular file")
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise UserError(f"{path} is larger than {_LARGEST >> 20} MiB; change it with another program")
    return data


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
