"""Files below the served folders: no link is followed, and they are written only if they are as the page read them."""

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.inputs import regular_handle
from sd3_light.system import machine

LARGEST_TEXT = 1 << 18
"""Bytes of a file that the pages edit."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)


def require_served(roots: Sequence[Path], path: Path) -> Path:
    """Return the absolute path if it is below a served folder and no part below that is a link. Raises UserError."""
    path, root = _located(roots, path)
    inner = root
    for name in path.relative_to(root).parts:
        inner /= name
        if inner.is_symlink():
            raise UserError(f"{inner} is a link; pages change only real files and folders below the served ones")
    return path


def read_served(roots: Sequence[Path], path: Path) -> tuple[str, str]:
    """Return the text of a file and its version. Raises UserError."""
    path, _ = _located(roots, path)
    try:
        with _open_folder(roots, path.parent) as folder:
            data = _read(path.name, folder)
            return data.decode("utf-8"), _version(data)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise _unusable("read", path, error) from error


def save_text(roots: Sequence[Path], path: Path, text: str, version: str) -> str:
    """Replace a file that still has this version, and return the new version. Raises UserError if it has changed."""
    path, _ = _located(roots, path)
    data = text.encode("utf-8")
    if len(data) > LARGEST_TEXT:
        raise UserError(f"{path} would be larger than {LARGEST_TEXT >> 10} KiB; shorten it")
    try:
        with _open_folder(roots, path.parent) as folder:
            if _version(_read(path.name, folder)) != version:
                raise UserError(
                    f"{path} has changed since this page read it; copy your text, reload the page, and edit again. "
                    "Nothing was written"
                )
            mode = stat.S_IMODE(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode)
            with _temporary(path.name, data, folder) as temporary:
                os.chmod(temporary, mode, dir_fd=folder)
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise _unusable("write", path, error) from error
    return _version(data)


def create_text(roots: Sequence[Path], path: Path, text: str) -> None:
    """Write a new file, and its folders. Raises UserError if it exists."""
    path, _ = _located(roots, path)
    try:
        with (
            _open_folder(roots, path.parent, create=True) as folder,
            _temporary(path.name, text.encode(), folder) as temporary,
        ):
            os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError as error:
        raise UserError(f"{path} exists; choose another folder. It was not changed") from error
    except OSError as error:
        raise _unusable("write", path, error) from error


def _located(roots: Sequence[Path], path: Path) -> tuple[Path, Path]:
    """Return the absolute path and the served folder that it is below."""
    if "\0" in str(path):
        raise UserError("a path cannot contain a NUL character")
    path = Path(os.path.abspath(os.path.expanduser(path)))
    root = next((root for root in roots if path.is_relative_to(root)), None)
    if root is None:
        raise UserError(f"{path} is not below a served folder; start `sd3-light ui` with its folder too")
    return path, root


@contextmanager
def _open_folder(roots: Sequence[Path], folder: Path, create: bool = False) -> Iterator[int]:
    """Yield a folder's file descriptor, reached from a served folder without following a link."""
    folder, root = _located(roots, folder)
    handle = os.open(root, _FOLDER)
    try:
        for name in folder.relative_to(root).parts:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=handle)
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _read(name: str, folder: int) -> bytes:
    """Return the bytes of a regular file of limited size."""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise OSError(errno.EFBIG, f"larger than {LARGEST_TEXT >> 10} KiB")
    return data


@contextmanager
def _temporary(name: str, data: bytes, folder: int) -> Iterator[str]:
    """Yield the name of a new file with these bytes on the disk, removed at the end unless it was renamed."""
    temporary = f".{name[:80]}.{machine()}~{os.getpid()}~{uuid.uuid4().hex[:8]}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unusable(verb: str, path: Path, error: OSError) -> UserError:
    reason = "it, or a folder above it, is a link" if error.errno in _LINK_ERRORS else error.strerror
    return UserError(f"cannot {verb} {path}: {reason}; check the path and its permissions")


def touch(path: Path) -> None:
    """Create an empty file where nothing is yet; a link is an OSError."""
    os.close(regular_handle(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW))
