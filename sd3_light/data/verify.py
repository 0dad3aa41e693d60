"""Shards are hashed when a launch first reads them, once a machine.

Processes of a launch share a mark file in the system's temp folder, one byte a shard, and lock a shard's byte while
they hash it: others wait and then see the mark. The kernel lets go of a lock when its process dies. The file is named
by the launch, so the next one looks at everything anew. Where no such file can be had each process hashes for itself.
"""

import fcntl
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import Manifest, ShardEntry, damaged_mark
from sd3_light.data.reader import REMEDY
from sd3_light.files import file_sha256
from sd3_light.system import process_start

Wanted = tuple[ShardEntry, Path]
_MARKED = b"\x01"
_SUFFIX = ".verified"
_MOST_THREADS = 8
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")


class Verifier:
    """Compares the shards of one cache with the manifest's hashes. Forked and spawned processes share its marks."""

    def __init__(self, folder: Path, manifest: Manifest, launched: bool = False) -> None:
        """``launched``: this process is one of several that its parent started, and shares marks with them."""
        entries = (*manifest.shards, manifest.empty)
        self._numbers = {entry.file: number for number, entry in enumerate(entries)}
        self._own = bytearray(len(entries))
        # a parent that never ends (the first process of a container) tells no launch from the next
        shared = launched and os.getppid() > 1
        self._mark_path = _mark_path(folder, entries, os.getppid() if shared else os.getpid())
        self._threads: dict[tuple[int, int], threading.Lock] = {}
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_threads": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        self._file = _open_marks(self._mark_path)
        if self._file is not None:
            weakref.finalize(self, os.close, self._file).atexit = False

    def require(self, wanted: Iterable[Wanted]) -> None:
        """All of these are whole; a fault of the user that names the one that is not."""
        left = [one for one in wanted if not self.is_known(one[0])]
        if not left:
            return
        # first what nobody is at, so that processes share the work, then what others have begun
        with ThreadPoolExecutor(min(_MOST_THREADS, len(left), os.cpu_count() or 1)) as pool:
            begun = list(pool.map(lambda one: self._check(one, wait=False), left))
        for one, done in zip(left, begun, strict=True):
            if not done:
                self._check(one, wait=True)

    def prefetch(self, one: Wanted) -> None:
        """Hash a shard that will be wanted, unless another is at it; what is wrong with it shows when it is read."""
        with suppress(UserError):
            self._check(one, wait=False)

    def is_known(self, entry: ShardEntry) -> bool:
        """Whether the shard was found whole in this launch."""
        number = self._numbers[entry.file]
        if not self._own[number] and self._file is not None and os.pread(self._file, 1, number) == _MARKED:
            self._own[number] = 1
        return bool(self._own[number])

    def _check(self, wanted: Wanted, wait: bool) -> bool:
        """Whether the shard is known as whole now; False where another is hashing it."""
        entry, path = wanted
        number = self._numbers[entry.file]
        with self._claim(number, wait) as claimed:
            if not claimed:
                return False
            if not self.is_known(entry):
                verify(path, entry)
                self._own[number] = 1
                if self._file is not None:
                    with suppress(OSError):  # without room for the mark another process hashes it again
                        os.pwrite(self._file, _MARKED, number)
        return True

    @contextmanager
    def _claim(self, number: int, wait: bool) -> Iterator[bool]:
        # byte locks belong to a process: its threads need their own (a forked process must not wait for its parent's)
        thread = self._threads.setdefault((os.getpid(), number), threading.Lock())
        if not thread.acquire(blocking=wait):
            yield False
            return
        try:
            with _locked(self._file, number, wait) as locked:
                yield locked
        finally:
            thread.release()


def verify(path: Path, entry: ShardEntry) -> None:
    """Hash one shard; where it differs, mark it for the cache stage and raise a fault of the user that names it."""
    if is_whole(path, entry):
        return
    with suppress(OSError):  # a cache that may not be written to is mended by someone else
        damaged_mark(path).touch()
    raise UserError(f"shard {path} is damaged: its bytes are not those that were written; {REMEDY}")


def is_whole(path: Path, entry: ShardEntry) -> bool:
    """Whether a shard's bytes can be read and are those that were written."""
    try:
        return path.stat().st_size == entry.bytes and file_sha256(path) == entry.sha256
    except OSError:  # a bad sector, say
        return False


@contextmanager
def _locked(file: int | None, number: int, wait: bool) -> Iterator[bool]:
    if file is None:
        yield True
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, number)
    except BlockingIOError:
        yield False
        return
    except OSError:  # no locks on this file system, or the kernel fears a deadlock: work may be done twice, no more
        yield True
        return
    try:
        yield True
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, number)


# --- the mark file ------------------------------------------------------------------------------


def _mark_path(folder: Path, entries: Sequence[ShardEntry], owner: int) -> Path:
    """A name of this user, this launch (its process and when that started) and these shards in this folder."""
    digest = blake2b(os.fsencode(folder.resolve()), digest_size=16)
    # a shell or an elastic launcher may start ranks several times
    digest.update("/".join(os.environ.get(name, "") for name in _LAUNCH).encode())
    for entry in entries:
        digest.update(f"{entry.file}/{entry.sha256}\n".encode())
    name = f"sd3-light-{os.getuid()}-{owner}-{process_start(owner)}-{digest.hexdigest()}{_SUFFIX}"
    return Path(tempfile.gettempdir()) / name


def _open_marks(path: Path) -> int | None:
    """The mark file, or None where there can be none. Those of launches that have ended are removed."""
    try:
        _sweep(path)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    if os.fstat(file).st_uid != os.getuid():
        os.close(file)
        return None
    return file


def _sweep(path: Path) -> None:
    for old in path.parent.glob(f"sd3-light-{os.getuid()}-*{_SUFFIX}"):
        parts = old.name.split("-")
        if len(parts) == 6 and parts[3].isdecimal() and process_start(int(parts[3])) != parts[4]:
            old.unlink(missing_ok=True)
