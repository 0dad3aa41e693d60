"""A lock that allows one run per folder."""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.inputs import regular_handle


@contextmanager
def locked_folder(folder: Path, key: str = "output_dir") -> Iterator[None]:
    """Create the folder and lock it for this process inside the block, if its file system has locks.

    Raises a `UserError` if the folder cannot be created or another process trains in it; ``key`` is the setting to
    change.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = regular_handle(folder / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"{folder} is not writable ({error.strerror}); choose another {key}") from error
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                message = f"another process is training in {folder}; wait for it or choose another {key}"
                raise UserError(message) from error
        yield
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Return whether another process trains in the folder; False where its file system has no locks."""
    layout = "@hhqqi"  # struct flock: type, whence, start, length, process
    try:
        handle = regular_handle(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(handle, fcntl.F_GETLK, struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return False
    finally:
        os.close(handle)
    return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)
