"""One run at a time in a folder."""

import errno
import fcntl
import os
from pathlib import Path

from sd3_light.config.faults import UserError


def take_folder(folder: Path, key: str = "output_dir") -> int | None:
    """Make the folder and lock it for this process: a handle to close. None where the file system knows no locks.

    A folder that cannot be made, or in which another process trains, is a fault; ``key`` is what chose it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror}); choose another {key}") from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return None
        raise UserError(f"another process trains in {folder}; wait for it or choose another {key}") from error
    return handle
