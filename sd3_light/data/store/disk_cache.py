"""A folder of fetched shards with a size limit, shared by the processes of a machine.

    DIGEST.safetensors        a complete shard, named by its sha256, whatever its URL was
    DIGEST.arrow              the table of a manifest's shards
    DIGEST.safetensors.part   a fetch in progress, locked by its process; it has its final size from the start
    .lock                     held while sizes are added up and files are renamed or removed

Locks are `flock`s: the kernel releases them when a process dies, so a `.part` without a lock is a leftover.
"""

import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, BinaryIO

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import damaged_mark
from sd3_light.inputs import open_regular, regular_handle

PART = ".part"
_POLL_SEC = 0.1
_NAME = re.compile(r"[0-9a-f]{64}\.(safetensors|arrow)")
_PART_NAME = re.compile(_NAME.pattern + re.escape(PART))


class DiskCache:
    """Files of at most ``limit`` bytes in total; the least recently used ones are evicted.

    Only files that it created are removed. A process that has a removed file open can still read it; its disk space is
    freed when it is closed.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        with self._disk_errors(), self._folder_lock():
            self._free_space(0)

    def path(self, digest: str, size: int, fetch: Callable[[BinaryIO], None], suffix: str = ".safetensors") -> Path:
        """Return the file of ``size`` bytes with this sha256; ``fetch`` downloads it if it is missing.

        ``fetch`` writes to the given file and raises unless it is complete. If several processes need the same file,
        one fetches it. The file may be evicted before the caller opens it: see `store.open_shard`.
        """
        assert size <= self.limit
        whole = self.folder / f"{digest}{suffix}"
        assert _NAME.fullmatch(whole.name)
        with self._disk_errors():
            while not _touch(whole, size):
                self._fetch(whole, size, fetch, wait=True)
        return whole

    def prefetch(self, digest: str, size: int, fetch: Callable[[BinaryIO], None]) -> Path | None:
        """Return the file like `path`; None if another process or thread is fetching it."""
        whole = self.folder / f"{digest}.safetensors"
        with self._disk_errors():
            if not _touch(whole, size):
                self._fetch(whole, size, fetch, wait=False)
            return whole if whole.exists() else None

    def _fetch(self, whole: Path, size: int, fetch: Callable[[BinaryIO], None], wait: bool) -> None:
        """Fetch a file unless another process or thread does so, or has done so while this one waited for the lock."""
        with _claimed(whole.with_name(whole.name + PART), None if wait else self._folder_lock) as part:
            if part is not None and not _touch(whole, size):
                self._reserve(part, size)
                fetch(part)
                self._put(part, whole)

    def _reserve(self, part: BinaryIO, size: int) -> None:
        """Wait until the folder has space for ``part`` and set its size."""
        os.ftruncate(part.fileno(), 0)  # remove what a killed process wrote
        while True:
            with self._folder_lock():
                if self._free_space(size):
                    os.ftruncate(part.fileno(), size)
                    return
            time.sleep(_POLL_SEC)  # other fetches fill the folder; they can be evicted when they end

    def _put(self, part: BinaryIO, whole: Path) -> None:
        part.flush()
        os.fsync(part.fileno())
        with self._folder_lock():
            os.replace(part.name, whole)

    def _free_space(self, size: int) -> bool:
        """Remove leftovers and the least recently used files until ``size`` bytes fit; False if fetches use it."""
        whole = []
        free = self.limit
        for name in os.listdir(self.folder):
            path = self.folder / name
            if _PART_NAME.fullmatch(name):
                free -= _bytes_in_flight(path)
            elif _NAME.fullmatch(name) and (status := _stat(path)):
                whole.append((status.st_mtime_ns, status.st_size, path))
        if free < size:
            return False
        free -= sum(count for _, count, _ in whole)
        for _, count, path in sorted(whole):
            if free >= size:
                break
            path.unlink(missing_ok=True)
            free += count
        return True

    @contextmanager
    def _folder_lock(self) -> Iterator[None]:
        """Hold the lock under which sizes are added up and complete files are created or removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "ab", opener=regular_handle) as lock, _locked(lock):
            yield

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot keep shards in {self.folder}: {error.strerror}; free disk space, lower stream_cache_gb, or "
                "choose another stream_cache_dir"
            ) from error


def _stat(path: Path) -> os.stat_result | None:
    """Return the status of a file, None if it is gone: temp folders may be cleaned at any time."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _touch(whole: Path, size: int) -> bool:
    """Mark a file as used now; False if it is missing, damaged or truncated."""
    status = _stat(whole)
    if status is None or status.st_size != size:
        return False
    if damaged_mark(whole).exists():  # a reader found it damaged: fetch it again
        for path in (whole, damaged_mark(whole)):
            path.unlink(missing_ok=True)
        return False
    try:
        os.utime(whole, ns=(time.time_ns(),) * 2)
    except FileNotFoundError:  # just evicted
        return False
    return True


@contextmanager
def _claimed(part: Path, folder_lock: Callable[[], AbstractContextManager[None]] | None) -> Iterator[BinaryIO | None]:
    """Yield the file at ``part``, locked, then remove it unless it was renamed; None if it was renamed meanwhile.

    With a ``folder_lock`` it does not wait, and yields None if the file is locked elsewhere.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # looking for leftovers locks files too, for a moment and under the folder's lock
        with folder_lock() if folder_lock else nullcontext():
            file = stack.enter_context(open(part, "r+b", opener=_creating))
            is_locked = stack.enter_context(_locked(file, wait=folder_lock is None))
        if not is_locked or not _is_at(file, part):
            yield None
            return
        try:
            yield file
        finally:
            if _is_at(file, part):  # under this lock no other process renames or removes it
                part.unlink()


def _creating(path: str, flags: int) -> int:
    return regular_handle(path, flags | os.O_CREAT, 0o600)


@contextmanager
def _locked(file: IO[bytes], wait: bool = True) -> Iterator[bool]:
    """Hold the lock of an open file; yields False if it is held elsewhere and ``wait`` is off.

    Unlocks explicitly, as a process forked meanwhile has the file open too.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _bytes_in_flight(part: Path) -> int:
    """Return the bytes that a running fetch has reserved; remove the file and return 0 if its process is gone."""
    try:
        with open_regular(part) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.fstat(file.fileno()).st_size
            if _is_at(file, part):
                part.unlink()
    except FileNotFoundError:  # its process has just removed it
        pass
    return 0


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether an open file still has the name ``path``."""
    status = _stat(path)
    return status is not None and os.path.samestat(os.fstat(file.fileno()), status)


def private_temp_folder(url: str) -> Path:
    """Return a folder for a URL in the system's temp folder that belongs to this user; create it if missing."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"sd3-light-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user; set stream_cache_dir")
    return folder
