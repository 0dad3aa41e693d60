"""Two hosts on one machine: each has a network, processes and a name of its own; a virtual cable joins them.

They share the disk, as machines with a shared file system do, and nothing else.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

DEVICE = "eth0"
NAMES = ("alpha", "beta")
ADDRESSES = ("10.203.0.1", "10.203.0.2")
NOBODY = "10.203.0.77"
"""An address of the same network that no host has."""

PATIENCE = 120.0
_PREFIX = "sd3-light-test"
_NO_CARD = "02:00:00:00:00:77"
_TOOLS = ("ip", "unshare")
_NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
Found = TypeVar("Found")


class Job:
    """A command on a host. Its words go to a file, and killing it ends all that it started, at once."""

    def __init__(self, command: Sequence[str], said: Path, environment: Mapping[str, str]) -> None:
        self.said = said
        with said.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        self.started = time.monotonic()

    @property
    def words(self) -> str:
        """All that it said so far."""
        return self.said.read_text(encoding="utf-8", errors="replace")

    def until(self, look: Callable[[], Found | None]) -> Found:
        """What ``look`` finds, as soon as it finds something; the job must live on until then."""
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.words}"
            assert time.monotonic() < deadline, f"nothing happens:\n{self.words}"
            time.sleep(0.02)
        return found

    def end(self, within: float = PATIENCE) -> int:
        """Wait until it ends by itself; its exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {within:.0f} s:\n{self.words}") from None

    def kill(self) -> None:
        """As a power cut: the first process of the host's process space goes, and the kernel takes the rest along."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Hosts:
    """Two hosts, from the beginning of its block to the end; then all that runs on them is killed and they go."""

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
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.kill()
        self._remove()

    def start(self, host: int, command: Sequence[str], **environment: str) -> Job:
        """Run a command on host 0 or 1, with a temp folder of its own."""
        number = len(self._jobs)
        temporary = self.folder / f"tmp-{NAMES[host]}"
        temporary.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary), **environment}
        # gloo asks the host's name for its address; hosts without a name server tell it by the device
        variables.setdefault("GLOO_SOCKET_IFNAME", DEVICE)
        inside = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "--pid", "--fork", "--kill-child"]
        inside += ["--mount-proc", "sh", "-c", _NAMED, NAMES[host], *command]
        job = Job(inside, self.folder / f"said-{number}-{NAMES[host]}.txt", variables)
        self._jobs.append(job)
        return job

    def cut(self) -> None:
        """Pull the cable: nobody is told, packets just do not arrive any more."""
        for space, other in zip(self._spaces, reversed(ADDRESSES), strict=True):
            # a link that is set down tells its own host; packets to a card that nobody has tell nobody
            _ip("-n", space, "neighbour", "replace", other, "lladdr", _NO_CARD, "dev", DEVICE, "nud", "permanent")

    def _remove(self) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


@cache
def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if not sys.platform.startswith("linux"):
        return "this is no Linux"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not installed"
    try:
        with Hosts(Path()):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` says {error.stderr.decode().strip()!r}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _sweep() -> None:
    """Remove the hosts of test processes that were killed, and what still runs on them."""
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
