"""Two virtual hosts on one machine, each with its own network, process space and host name, joined by a virtual cable.

Like machines with a shared file system they share the disk and nothing else.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tests.waiting import HANG_SECONDS, wait_until

DEVICE = "eth0"
NAMES = ("alpha", "beta")
ADDRESSES = ("10.203.0.1", "10.203.0.2")
UNUSED_ADDRESS = "10.203.0.77"
"""An address of the same network that no host has."""

_PREFIX = "sd3-light-test"
_UNUSED_MAC = "02:00:00:00:00:77"
_TOOLS = ("ip", "unshare")
_SET_HOSTNAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
T = TypeVar("T")


class Job:
    """A command on a host. Its output goes to a file; killing it also kills everything that it started."""

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)

    @property
    def text(self) -> str:
        """The output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def until(self, probe: Callable[[], T | None]) -> T:
        """Return the first true result of ``probe``; the job must be alive until then."""

        def probe_alive() -> T | None:
            ended = self.process.poll() is not None
            if not (result := probe()):
                assert not ended, f"it ended with {self.process.returncode}:\n{self.text}"
            return result

        return wait_until(probe_alive, lambda: self.text)

    def end(self) -> int:
        """Wait until it exits by itself; return its exit code."""
        try:
            return self.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {HANG_SECONDS:.0f} s:\n{self.text}") from None

    def kill(self) -> None:
        """Kill it like a power cut: the kernel ends the host's whole process space with its first process."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Hosts:
    """A context of two hosts; at its end everything on them is killed and they are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spaces = [f"{_PREFIX}-{os.getpid()}-{name}" for name in NAMES]
        self._jobs: list[Job] = []

    def __enter__(self) -> Self:
        _sweep()
        ends = [f"v{os.getpid()}{name[0]}" for name in NAMES]
        try:
            for space in self._spaces:
                _ip("netns", "add", space)
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for end, space, address in zip(ends, self._spaces, ADDRESSES, strict=True):
                _ip("link", "set", end, "netns", space, "name", DEVICE)
                _ip("-n", space, "address", "add", f"{address}/24", "dev", DEVICE)
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("-n", space, "link", "set", DEVICE, "up")
        except subprocess.CalledProcessError:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.kill()
        self._remove()

    def start(self, host: int, command: Sequence[str], **environment: str) -> Job:
        """Run a command on host 0 or 1, with its own temporary folder."""
        number = len(self._jobs)
        temporary = self.folder / f"tmp-{NAMES[host]}"
        temporary.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary), **environment}
        # gloo resolves the host's name for its address; without a name server it needs the device
        variables.setdefault("GLOO_SOCKET_IFNAME", DEVICE)
        inside = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "--pid", "--fork", "--kill-child"]
        inside += ["--mount-proc", "sh", "-c", _SET_HOSTNAME, NAMES[host], *command]
        job = Job(inside, self.folder / f"output-{number}-{NAMES[host]}.txt", variables)
        self._jobs.append(job)
        return job

    def cut_cable(self) -> None:
        """Cut the cable: packets are lost and neither host is notified."""
        for space, other in zip(self._spaces, reversed(ADDRESSES), strict=True):
            # setting a link down would notify its host; packets to an unused MAC address are lost silently
            _ip("-n", space, "neighbour", "replace", other, "lladdr", _UNUSED_MAC, "dev", DEVICE, "nud", "permanent")

    def _remove(self) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


@cache
def why_unavailable() -> str | None:
    """Return why hosts cannot be created here, or None."""
    if not sys.platform.startswith("linux"):
        return "not Linux"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not installed"
    try:
        with Hosts(Path()):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.decode().strip()!r}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _sweep() -> None:
    """Remove the hosts of killed test processes and everything that still runs on them."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        space = line.split()[0]
        owner = space.removeprefix(f"{_PREFIX}-").split("-")[0]
        if space.startswith(_PREFIX) and not Path(f"/proc/{owner}").exists():
            left = subprocess.run(["ip", "netns", "pids", space], check=False, capture_output=True, text=True).stdout
            for process in map(int, left.split()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)
