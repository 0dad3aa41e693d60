"""Atomic writes: a file or folder is absent, unchanged or complete, even after a kill.

While it is written it has a hidden name in the same folder. The name contains the machine and the process, so two
writers never collide and the leftovers of a killed process can be recognized.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from sd3_light.config.faults import UserError
from sd3_light.inputs import open_regular
from sd3_light.system import machine, process_exists, umask

_DAY_SECONDS = 86400
OWN_FILES = (".*~*~*.tmp",)
"""Patterns of the temporary names that this module gives."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)


def file_sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file with `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block succeeds, flush it to disk and rename it to ``path``."""
    try:
        with atomic_unsynced_file(path) as temporary:
            yield temporary
            apply_umask(temporary)
            _sync(temporary)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; free disk space or fix the disk, then start again. "
            "Finished files are kept"
        ) from error


@contextmanager
def atomic_unsynced_file(path: Path) -> Iterator[Path]:
    """Like `atomic_file`, for files that are cheap to lose: not flushed to disk, and an OSError is not converted."""
    with scratch_file(path) as temporary:
        yield temporary
        os.replace(temporary, path)


@contextmanager
def scratch_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, removed at the end unless it was renamed."""
    temporary = _hidden(path, ".tmp")
    try:
        yield temporary
    finally:
        with suppress(OSError):  # on a read-only disk it would hide the error of the block
            temporary.unlink(missing_ok=True)


def apply_umask(path: Path) -> None:
    """Give a file the permissions of any new file: the safetensors library creates its files for their owner alone."""
    mode = 0o666 & ~umask()
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def refuse_existing(path: Path) -> None:
    """Raise a UserError if ``path`` exists (dangling links included) or cannot exist."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another name") from error
    raise UserError(f"{path} already exists; choose another name. Nothing was changed")


def disk_error(error: OSError) -> str | None:
    """Return one line about a full, read-only, failing or unmounted disk; None for other errors."""
    if error.errno not in _DISK_ERRORS:
        return None
    file = "" if error.filename is None else f" ({error.filename})"
    return f"{error.strerror}{file}; free disk space or fix the disk, then start again. Finished files are kept"


def disk_remedy(error: BaseException) -> str:
    """Return what to do about a full, read-only, failing or unmounted disk; "" if the error has another cause.

    An error that was raised because of one of the disk counts, too.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if isinstance(cause, SafetensorError) and (match := re.search(r"\(os error (\d+)\)", str(cause))):
            number = int(match[1])
        if number in _DISK_ERRORS:
            return "free disk space or fix the disk"
        cause = cause.__cause__
    return ""


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Convert disk errors in this block to a UserError that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot write {path}: {reason}; free disk space or choose another location") from error
    except SafetensorError as error:
        match = re.search(r"I/O error: (.*?) \(os error", str(error))  # the library has no class for I/O errors
        if match is None:
            raise
        raise UserError(f"cannot write {path}: {match[1]}; free disk space or choose another location") from error


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block succeeds, flush it to disk and rename it. Never replaces a file."""
    sweep_leftovers(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_file(path) as temporary:
        yield temporary
        apply_umask(temporary)
        _sync(temporary)
        try:
            name_new_file(temporary, path)
        except FileExistsError:
            refuse_existing(path)


def name_new_file(temporary: Path, path: Path) -> None:
    """Give a temporary file its name. Raises FileExistsError if another process has taken it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:  # no hard links on this disk: another process can still take the name between these calls
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(temporary, path)


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a new folder and rename it to ``path`` on success; an existing one is an error unless ``replace``."""
    with scratch_folder(path) as temporary:
        yield temporary
        if replace:
            aside = _hidden(path, ".old")
            swap_folder(temporary, path, aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            refuse_existing(path)
            os.rename(temporary, path)  # fails if another process has created the folder meanwhile


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``, removed at the end unless it was renamed."""
    sweep_leftovers(path)
    temporary = _hidden(path, ".tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def swap_folder(new: Path, path: Path, aside: Path) -> None:
    """Rename ``new`` to ``path``. An existing folder is first renamed to ``aside``, and back if that fails."""
    exists = path.exists()
    if exists:
        os.replace(path, aside)
    try:
        os.replace(new, path)
    except OSError:
        if exists:
            os.replace(aside, path)
        raise


def sweep_files(folder: Path, patterns: Sequence[str] = (".*~*.tmp", ".tmp*")) -> None:
    """Remove the temporary files in ``folder`` whose writer has ended; ``.tmp*`` are the safetensors library's.

    For a folder that may hold files of other programs, pass `OWN_FILES` or a narrower pattern.
    """
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if _is_left_over(path):
            path.unlink(missing_ok=True)


def sweep_leftovers(path: Path) -> None:
    """Remove what killed writers of ``path`` left behind. A folder that was renamed aside is restored."""
    if not path.parent.is_dir():
        return
    for leftover in sorted(path.parent.iterdir()):  # .old before .tmp
        name = leftover.name
        if not name.startswith(f".{path.name}.") or leftover.suffix not in (".old", ".tmp") or name.count("~") < 2:
            continue
        if not _is_left_over(leftover):
            continue
        if leftover.suffix == ".old" and not os.path.lexists(path):
            os.replace(leftover, path)
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{machine()}~{os.getpid()}~{uuid.uuid4().hex[:8]}{suffix}")


def _is_left_over(path: Path) -> bool:
    """Return whether the writer was a process of this machine that has ended, or the file is a day old."""
    owner, pid, _ = path.name.rsplit("~", 2) if path.name.count("~") >= 2 else ("", "", "")
    if owner.endswith(machine()) and not process_exists(pid):
        return True
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _DAY_SECONDS
    return False


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
