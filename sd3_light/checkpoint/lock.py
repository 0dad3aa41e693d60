"""A lock that allows one run per folder."""

import errno
import fcntl
import os
from pathlib import Path

from sd3_light.config.faults import UserError


def lock_folder(folder: Path, key: str = "output_dir") -> int | None:
    """Create the folder and lock it for this process; return a handle to close, None without file system locks.

    Raises a `UserError` if the folder cannot be created or another process trains in it; ``key`` is the setting to
    change.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"{folder} is not writable ({error.strerror}); choose another {key}") from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return None
        raise UserError(f"another process is training in {folder}; wait for it or choose another {key}") from error
    return handle
