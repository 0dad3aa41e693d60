"""Compare shards with the manifest's hashes before they are first read, once per launch and machine.

The processes of a launch share a folder of markers in the system's temp folder, one file per shard. A process locks the
marker while it hashes the shard and fills it afterwards; the others wait and then skip the work. The kernel releases
the lock of a killed process. The folder is named after the launch, so the next launch verifies everything again. If the
folder cannot be created, each process verifies for itself.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import ShardEntry, damaged_mark
from sd3_light.data.reader import REMEDY
from sd3_light.files import file_sha256
from sd3_light.system import process_start

ShardFile = tuple[ShardEntry, Path]
Identity = tuple[int, ...]
"""What distinguishes a file from another one under its name, and from itself before a write: see `Verifier`."""
_SUFFIX = ".verified"
_MAX_THREADS = 8
_LAUNCH_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")


class Verifier:
    """Verifies the shards of one cache folder. Forked and spawned processes share its markers.

    A hash holds for one file: device, inode, size and, unless the store changes it (``with_times`` off), the time of
    the last write. A shard that is another file than the one that was hashed is hashed again.
    """

    def __init__(self, folder: Path, launched: bool = False, with_times: bool = True) -> None:
        """``launched``: this process is one of several that its parent started, and shares markers with them."""
        self._with_times = with_times
        # a parent that never ends (the first process of a container) does not identify a launch
        shared = launched and os.getppid() > 1
        self._markers = _marker_folder(folder, os.getppid() if shared else os.getpid())
        self._verified: dict[str, Identity] = {}

    def identity(self, status: os.stat_result) -> Identity:
        """Return the identity of a file."""
        identity = status.st_dev, status.st_ino, status.st_size
        return (*identity, status.st_mtime_ns) if self._with_times else identity

    def is_same(self, entry: ShardEntry, status: os.stat_result) -> bool:
        """Return whether this file is the one that was verified, by this process or since then by another."""
        identity = self.identity(status)
        return self._verified.get(entry.file) == identity or self._marked(entry) == identity

    def _is_current(self, shard: ShardFile) -> bool:
        try:
            return self.is_same(shard[0], os.stat(shard[1]))
        except OSError:
            return False

    def require(self, shards: Iterable[ShardFile]) -> None:
        """Verify these shards; a UserError names the first damaged one."""
        pending = [shard for shard in shards if not self._is_current(shard)]
        if not pending:
            return
        # first the shards that no other process is hashing, so that processes share the work, then wait for the others
        with ThreadPoolExecutor(min(_MAX_THREADS, len(pending), os.cpu_count() or 1)) as pool:
            finished = list(pool.map(lambda shard: self._check(shard, wait=False), pending))
        for shard, is_finished in zip(pending, finished, strict=True):
            if not is_finished:
                self._check(shard, wait=True)

    def prefetch(self, shard: ShardFile) -> None:
        """Hash a shard that will be needed, unless another process is hashing it; damage is reported on reading."""
        with suppress(UserError):
            self._check(shard, wait=False)

    def _marked(self, entry: ShardEntry) -> Identity | None:
        """Return the identity in a shard's marker, and keep it; None without one."""
        if self._markers is not None:
            with suppress(OSError):  # no marker yet
                if text := (self._markers / _name(entry)).read_text():
                    identity = self._verified[entry.file] = tuple(map(int, text.split()))
                    return identity
        return None

    def _check(self, shard: ShardFile, wait: bool) -> bool:
        """Verify a shard; False if another process or thread is hashing it and ``wait`` is off."""
        entry, path = shard
        marker = None if self._markers is None else self._markers / _name(entry)
        with _locked(marker, wait) as is_locked:
            if is_locked and not self._is_current(shard):
                before = _status(path)  # a file that is changed while it is hashed differs from this
                verify(path, entry)
                self.accept(entry, before)
        return is_locked

    def accept(self, entry: ShardEntry, status: os.stat_result) -> None:
        """Record that a file has the bytes of its entry, for all processes of the launch."""
        identity = self._verified[entry.file] = self.identity(status)
        if self._markers is not None:
            with suppress(OSError):  # without space for the marker another process hashes the shard again
                (self._markers / _name(entry)).write_text(" ".join(map(str, identity)))


def _status(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise UserError(f"cannot read shard {path}: {error.strerror}; {REMEDY}") from error


def verify(path: Path, entry: ShardEntry) -> None:
    """Hash one shard; if it differs, mark it for the cache stage and raise a UserError."""
    if is_intact(path, entry):
        return
    with suppress(OSError):  # the cache may be read-only
        damaged_mark(path).touch()
    raise UserError(f"shard {path} is damaged: its bytes differ from those that were written; {REMEDY}")


def is_intact(path: Path, entry: ShardEntry) -> bool:
    """Return whether a shard can be read and has the size and hash of its entry."""
    try:
        return path.stat().st_size == entry.bytes and file_sha256(path) == entry.sha256
    except OSError:  # for example a bad sector
        return False


# --- markers ----------------------------------------------------------------------------------


def _marker_folder(cache: Path, owner: int) -> Path | None:
    """Create the marker folder of this user, launch (process ``owner``) and cache; None if that is not possible."""
    # the same parent process may start ranks several times: a shell, an elastic launcher
    launch = "/".join(os.environ.get(name, "") for name in _LAUNCH_VARIABLES)
    digest = blake2b(os.fsencode(cache.resolve()) + b"/" + launch.encode(), digest_size=16).hexdigest()
    name = f"sd3-light-{os.getuid()}-{owner}-{process_start(owner)}-{digest}{_SUFFIX}"
    folder = Path(tempfile.gettempdir()) / name
    try:
        _sweep(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() else None


def _sweep(temp: Path) -> None:
    """Remove the marker folders of launches that have ended."""
    for folder in temp.glob(f"sd3-light-{os.getuid()}-*{_SUFFIX}"):
        parts = folder.name.split("-")
        if len(parts) == 6 and parts[3].isdecimal() and process_start(int(parts[3])) != parts[4]:
            shutil.rmtree(folder, ignore_errors=True)


def _name(entry: ShardEntry) -> str:
    return blake2b(f"{entry.file}/{entry.sha256}".encode(), digest_size=16).hexdigest()


@contextmanager
def _locked(marker: Path | None, wait: bool) -> Iterator[bool]:
    """Hold the lock of a marker file; yields False if it is held elsewhere and ``wait`` is off."""
    try:
        file = None if marker is None else os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # the folder was removed, or the disk is full: work may be done twice
        file = None
    if file is None:
        yield True
        return
    try:
        yield _lock(file, wait)
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # explicit: a process forked meanwhile holds the file open too
        os.close(file)


def _lock(file: int, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system: work may be done twice
        pass
    return True
