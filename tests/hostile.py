"""Run a command as a hostile input sees it: in this process, with limits of time and memory, and what it changed."""

import io
import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from sd3_light import cli

SECONDS = 60.0
MEMORY_BYTES = 3 << 30
"""What a command may allocate beyond what the process has."""

Snapshot = dict[str, tuple[int, ...]]


class Hang(BaseException):
    """The command ran longer than its limit. Not an Exception: no handler of the package may catch it."""


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command; a hang has the code 124."""

    code: int
    out: str
    err: str


def run_cli(*arguments: object, seconds: float = SECONDS, memory: int = MEMORY_BYTES) -> Outcome:
    """Run `sd3-light ARGUMENTS` in this process."""
    argv, sys.argv = sys.argv, ["sd3-light", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with _limits(seconds, memory), redirect_stdout(out), redirect_stderr(err):
            cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Hang:
        code = 124
    finally:
        sys.argv = argv
    return Outcome(code, out.getvalue(), err.getvalue())


@contextmanager
def _limits(seconds: float, memory: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    handler = signal.signal(signal.SIGALRM, _raise_hang)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _raise_hang(*_: object) -> None:
    raise Hang


def snapshot(root: Path, without: Iterable[Path] = ()) -> Snapshot:
    """Return size, time and inode of everything below ``root``, except below the folders ``without``."""
    skipped = {str(path) for path in without}
    entries: Snapshot = {}
    folders = [str(root)]
    while folders:
        with os.scandir(folders.pop()) as found:
            for entry in found:
                if entry.path in skipped:
                    continue
                status = entry.stat(follow_symlinks=False)
                is_folder = entry.is_dir(follow_symlinks=False)
                entries[entry.path] = () if is_folder else (status.st_size, status.st_mtime_ns, status.st_ino)
                folders += [entry.path] if is_folder else []
    return entries


def changes(before: Snapshot, after: Snapshot) -> Sequence[str]:
    """Return the paths that appeared, disappeared or changed."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
