"""A folder that keeps fetched shards and never grows above a limit, shared by the processes of a machine.

    DIGEST.safetensors        a whole shard, named by its sha256: whatever it was fetched from, its name vouches for it
    DIGEST.safetensors.part   a fetch in progress, locked by its process; it has its final size from the start
    .lock                     held while sizes are added up and names change

Locks are `flock`s: the kernel lets go of them when a process dies, so a `.part` that nobody holds is a leftover.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import damaged_mark

PART = ".part"
_POLL_SEC = 0.1
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PART_NAME = re.compile(_NAME.pattern + re.escape(PART))


class DiskCache:
    """Files of at most ``limit`` bytes in all, the least recently used ones removed for new ones.

    Only files that it named itself are ever removed. A removed file that a process has open can be read to its end; its
    room on the disk is free when it is closed.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        with self._local_faults(), self._accounts():
            self._make_room(0)

    def path(self, digest: str, size: int, fetch: Callable[[BinaryIO], None]) -> Path:
        """The file of ``size`` bytes with this sha256, brought by ``fetch`` where it is not here yet.

        ``fetch`` writes into the file that it is given and raises unless that is now whole. Of several processes that
        want one file at a time, one fetches it. The file may be evicted before the caller opens it: see
        `store.open_shard`.
        """
        assert size <= self.limit
        whole = self.folder / f"{digest}.safetensors"
        assert _NAME.fullmatch(whole.name)
        with self._local_faults():
            while not _touch(whole, size):
                with _claimed(whole.with_name(whole.name + PART)) as part:
                    # while this process waited for the claim another may have brought the file
                    if part is not None and not _touch(whole, size):
                        self._reserve(part, size)
                        fetch(part)
                        self._put(part, whole)
        return whole

    def _reserve(self, part: BinaryIO, size: int) -> None:
        """Give ``part`` its size as soon as that keeps the folder below the limit."""
        os.ftruncate(part.fileno(), 0)  # what a killed process left
        while True:
            with self._accounts():
                if self._make_room(size):
                    os.ftruncate(part.fileno(), size)
                    return
            time.sleep(_POLL_SEC)  # other fetches fill the folder; each ends, and can be evicted then

    def _put(self, part: BinaryIO, whole: Path) -> None:
        part.flush()
        os.fsync(part.fileno())
        with self._accounts():
            os.replace(part.name, whole)

    def _make_room(self, size: int) -> bool:
        """Remove leftovers, and the least recently used files until ``size`` more bytes fit; False: they cannot yet."""
        whole, free = [], self.limit
        for name in os.listdir(self.folder):
            path = self.folder / name
            if _PART_NAME.fullmatch(name):
                free -= _bytes_in_flight(path)
            elif _NAME.fullmatch(name) and (about := _stat(path)):
                whole.append((about.st_mtime_ns, about.st_size, path))
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
    def _accounts(self) -> Iterator[None]:
        """One process at a time adds up sizes, removes whole files or makes them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "ab") as lock, _locked(lock):
            yield

    @contextmanager
    def _local_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot keep shards in {self.folder}: {error.strerror}; make room there, lower stream_cache_gb, or "
                "choose another stream_cache_dir"
            ) from error


def _stat(path: Path) -> os.stat_result | None:
    """None where the file is gone: cleaners of temp folders come at any time."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _touch(whole: Path, size: int) -> bool:
    """Mark a file as used now; False where it is not here, or was cut short by a failing disk."""
    about = _stat(whole)
    if about is None or about.st_size != size:
        return False
    if damaged_mark(whole).exists():  # a reader found it so: it is fetched again
        for path in (whole, damaged_mark(whole)):
            path.unlink(missing_ok=True)
        return False
    try:
        os.utime(whole, ns=(time.time_ns(),) * 2)
    except FileNotFoundError:  # evicted this moment
        return False
    return True


@contextmanager
def _claimed(part: Path) -> Iterator[BinaryIO | None]:
    """The file at ``part``, locked for this process; None where it got another name while this process waited.

    It is gone afterwards unless it was renamed.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "r+b", opener=_creating) as file, _locked(file):
        if not _is_at(file, part):
            yield None
            return
        try:
            yield file
        finally:
            if _is_at(file, part):  # under this very lock: nobody else renames or removes it
                part.unlink()


def _creating(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


@contextmanager
def _locked(file: IO[bytes]) -> Iterator[None]:
    """Hold the lock of an open file, and let go of it even where a process forked meanwhile has the file open too."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _bytes_in_flight(part: Path) -> int:
    """Bytes that a fetch has taken; the file is removed, and none are, where the process that made it is gone."""
    try:
        with open(part, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.fstat(file.fileno()).st_size
            if _is_at(file, part):
                part.unlink()
    except FileNotFoundError:  # its process gave up this moment
        pass
    return 0


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has the name ``path``."""
    about = _stat(path)
    return about is not None and os.path.samestat(os.fstat(file.fileno()), about)
