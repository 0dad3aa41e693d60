"""Commands of benchmarks: side by side in lanes on one GPU, under NVIDIA's MPS where it is installed, until a deadline;
and one command of the package, measured: seconds, exit code, and the most host and GPU memory that it held."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from common.basics import child_environment

CONTROL = "nvidia-cuda-mps-control"
_CONTROL_SECONDS = 30
_SAVE_SECONDS = 20


@contextmanager
def mps(wanted: bool = True) -> Iterator[dict[str, str]]:
    """Run the MPS daemon inside the context; yield the environment of processes that share the GPU through it.

    Without its program, or if it does not start, they share the GPU in turns.
    """
    environment = dict(os.environ)
    control = shutil.which(CONTROL) if wanted else None
    if control is None:
        yield environment
        return
    folder = tempfile.mkdtemp(prefix="mps-")  # a short path: it holds sockets
    environment |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    started = _tell([control, "-d"], environment)
    print("MPS runs" if started else "MPS did not start: the processes share the GPU in turns", flush=True)
    try:
        yield environment if started else dict(os.environ)
    finally:
        if started and not _tell([control], environment, "quit\n"):
            print("MPS did not end", flush=True)
        shutil.rmtree(folder, ignore_errors=True)


def _tell(command: Sequence[str], environment: Mapping[str, str], text: str = "") -> bool:
    try:
        done = subprocess.run(
            command, env=environment, input=text.encode(), timeout=_CONTROL_SECONDS, stdout=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def run_lanes(command: Sequence[str], count: int, deadline: float | None, environment: Mapping[str, str]) -> list[str]:
    """Run ``count`` processes of a command until the deadline (of `time.monotonic`); return what failed."""
    lanes = [subprocess.Popen(command, env=environment, start_new_session=True) for _ in range(count)]
    failures = []
    try:
        for number, lane in enumerate(lanes, start=1):
            try:
                code = lane.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                failures.append(f"lane {number} was ended at the time limit; the same command continues its row")
                continue
            if code:
                failures.append(f"lane {number} failed with exit code {code}")
    finally:
        for lane in lanes:
            if lane.poll() is None:
                lane.terminate()  # all of them save at the same time
        for lane in lanes:
            end(lane, _SAVE_SECONDS)
    return failures


def end(process: "subprocess.Popen[bytes]", seconds: float = 5) -> None:
    """End a process that leads its own group, and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


# --- one command, measured -------------------------------------------------------------------------


@dataclass
class Peaks:
    """The most host and GPU memory that a process and its children held, and the most that was ``written``, in bytes.

    Host memory is without mapped files, and pages that processes share count once. ``resident`` is that of the largest
    process, with its mapped files.
    """

    written: Path | None = None
    host: int = 0
    resident: int = 0
    gpu: int = 0
    disk: int = 0
    looks: int = 0

    def look(self, process: int) -> None:
        """Look once; at what takes longer, shared pages and the GPU, every fifth and tenth time."""
        tree = list(process_tree(process))
        # an upper bound, which is read faster
        if self.looks % 5 == 0 and sum(map(resident_bytes, tree)) > self.host:
            self.host = max(self.host, sum(map(own_bytes, tree)))
        if self.looks % 5 == 0:
            self.resident = max(self.resident, *map(most_resident_bytes, tree))
        if self.looks % 10 == 0 and shutil.which("nvidia-smi"):
            self.gpu = max(self.gpu, sum(used for owner, used in _gpu_users() if owner in tree))
        if self.looks % 10 == 0:
            self.look_at_disk()
        self.looks += 1

    def look_at_disk(self) -> None:
        """Look at the size of what is written."""
        if self.written is not None:
            self.disk = max(self.disk, bytes_of(self.written))


def bytes_of(path: Path) -> int:
    """Return the bytes of a file, or of the files of a folder without links to others; some may vanish meanwhile."""
    total = 0
    for file in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            status = file.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else 0
    return total


def process_tree(root: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield root
    for tasks in Path(f"/proc/{root}/task").glob("*/children"):
        for child in _read(tasks).split():
            yield from process_tree(int(child))


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process without mapped files."""
    return _sum_of(Path(f"/proc/{process}/status"), ("RssAnon", "RssShmem"))


def most_resident_bytes(process: int) -> int:
    """Return the most resident memory that a process has had, with mapped files."""
    return _sum_of(Path(f"/proc/{process}/status"), ("VmHWM",))


def own_bytes(process: int) -> int:
    """Return the resident memory of a process without mapped files, and with its part of the pages that it shares."""
    return _sum_of(Path(f"/proc/{process}/smaps_rollup"), ("Pss_Anon", "Pss_Shmem"))


def _sum_of(path: Path, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) * 1024 for line in _read(path).splitlines() if line.startswith(names))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the process has just ended
        return ""


def _gpu_users() -> Iterator[tuple[int, int]]:
    """Yield (process, bytes) of all processes on the GPU; in a container their numbers may be the host's."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
        process, _, mebibytes = line.partition(",")
        if process.strip().isdecimal() and mebibytes.strip().isdecimal():
            yield int(process), int(mebibytes) << 20


@dataclass(frozen=True)
class Ran:
    """A command that has ended; memory in bytes, 0 if it is not known."""

    seconds: float
    exit_code: int
    host: int
    resident: int
    gpu: int
    disk: int


def run_command(
    words: Sequence[str],
    output: Path,
    timeout: float,
    stop_when: Callable[[], bool] = lambda: False,
    written: Path | None = None,
) -> Ran:
    """Run ``sd3-light WORDS``, with its output in a file; send SIGTERM once ``stop_when`` returns True.

    ``written`` is the file or folder whose size is measured.
    """
    command = [sys.executable, "-P", "-m", "sd3_light", *words]
    started = time.monotonic()
    peaks = Peaks(written)
    is_stopped = False
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=child_environment())
        while process.poll() is None:
            peaks.look(process.pid)
            if not is_stopped and stop_when():
                process.send_signal(signal.SIGTERM)
                is_stopped = True
            if time.monotonic() - started > timeout:
                for owned in process_tree(process.pid):
                    os.kill(owned, signal.SIGKILL)
            time.sleep(0.1)
    seconds = round(time.monotonic() - started, 1)
    peaks.look_at_disk()
    return Ran(seconds, process.returncode, peaks.host, peaks.resident, peaks.gpu, peaks.disk)
