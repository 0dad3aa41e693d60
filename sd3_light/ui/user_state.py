"""The files of the user's own state folder, which all servers of the user share, and the lock that they take."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.inputs import regular_handle

_LOCK = "lock"
_LOCK_SECONDS = 20.0  # a server holds the lock for milliseconds
_PAUSE_SECONDS = 0.02


def open_state(folder: Path) -> None:
    """Create the state folder. Raises UserError unless it is the user's and others cannot write to it.

    What others could write here would start runs.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(folder)
    except OSError as error:
        message = f"cannot create {folder}: {error.strerror}; set XDG_STATE_HOME to another folder"
        raise UserError(message) from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{folder} is another user's, or others can write to it: `chmod go-w` it, or set XDG_STATE_HOME to another "
            "folder"
        )


@contextmanager
def locked_state(folder: Path) -> Iterator[None]:
    """Hold the lock of the state folder inside the block; it does not nest.

    The kernel releases it when its process ends, so a killed server blocks no other. Threads exclude each other too.
    """
    open_state(folder)
    try:
        handle = regular_handle(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"cannot open {folder / _LOCK}: {error.strerror}; remove it") from error
    try:
        try:
            hold_lock(handle, folder)
        except OSError as error:
            message = f"{folder} is on a file system without locks; set XDG_STATE_HOME to a local folder"
            raise UserError(message) from error
        yield
    finally:
        os.close(handle)


def hold_lock(handle: int, folder: Path) -> None:
    """Take the lock of a handle, until it is closed. Raises UserError if another program keeps it, and OSError."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() > deadline:
            raise UserError(f"another program has locked {folder} for {_LOCK_SECONDS:.0f} s; end it, or try again")
        time.sleep(_PAUSE_SECONDS)
