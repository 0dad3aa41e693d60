"""Processes side by side on one GPU, under NVIDIA's MPS where it is installed, until a deadline."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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
