"""A training run in a process of its own, watched through the files that it writes and never by the clock."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.project import Project

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds for anything to happen; a starved machine may take most of it
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
Found = TypeVar("Found")


class Log:
    """The events that were added to a log since this object was made; a torn last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path, self._events = path, list[dict[str, Any]]()
        # what a killed run left of a line is cut off by the next one, so that counts as not there
        self._position = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

    def read(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        return [event for event in self.all() if event["event"] == kind]

    def all(self) -> list[dict[str, Any]]:
        """All events so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._position)
                text, newline, _ = file.read().rpartition(b"\n")
            self._position += len(text + newline)
            self._events += [json.loads(line) for line in text.splitlines()]
        return self._events


def arguments(project: Project, *flags: str, **overrides: object) -> list[str]:
    """What follows `train.py`."""
    found = ["--config", str(project.train_toml), *flags]
    for key, value in overrides.items():
        found += ["--set", f"{key}={value}"]
    return found


class Live:
    """`python [LAUNCHER] train.py --config ... [FLAGS] [--set KEY=VALUE ...]` in a process group of its own.

    Inside its block the process runs; at the end of the block whatever is left of the group is killed.
    """

    def __init__(self, project: Project, *flags: str, launcher: Sequence[str] = (), **overrides: object) -> None:
        self.run = Path(project.folder / str(overrides.get("output_dir", '"run"')).strip('"'))
        self.log, self.said = Log(self.run / "log.jsonl"), Path(project.folder / "said.txt")
        command = [sys.executable, *launcher, str(ROOT / "train.py"), *arguments(project, *flags, **overrides)]
        # the CPU alone computes the same bits each time
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def words(self) -> str:
        """All that it said so far."""
        return self.said.read_text(encoding="utf-8", errors="replace")

    def until(self, look: Callable[[], Found | None], pause: float = 0.01) -> Found:
        """What ``look`` finds, as soon as it finds something; the process must live on until then."""
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.words}"
            assert time.monotonic() < deadline, f"nothing happens:\n{self.words}"
            time.sleep(pause)
        return found

    def begin(self) -> int:
        """Wait until the run has begun or goes on; the step at which it does."""
        return int(self.until(lambda: self.log.read("start") or self.log.read("resume"))[0]["step"])

    def reach(self, step: int) -> int:
        """Wait until this process has logged a step that is this one or later; the last it logged."""
        return self.until(lambda: self._last_step(step))

    def _last_step(self, least: int) -> int | None:
        steps = [event["step"] for event in self.log.read("step")]
        return steps[-1] if steps and steps[-1] >= least else None

    def event(self, kind: str, number: int = 0) -> dict[str, Any]:
        """Wait for an event of this kind (the first, or that ``number``)."""
        return self.until(lambda: dict(enumerate(self.log.read(kind))).get(number))

    def send(self, number: signal.Signals, group: bool = False) -> None:
        """To the process that was started, or to every process of its group, as a terminal does with Ctrl-C."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self.process.wait(PATIENCE)

    def stop(self, number: signal.Signals, group: bool = False) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.send(number, group)
        return self.end()

    def longest_file(self, size: int | None) -> None:
        """From now on the process can make no file longer than this, which its writes meet as a disk without room;
        None lifts that."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def descendants(process: int) -> list[int]:
    """The processes that one has started, and those that these have; a worker comes before what it started."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it ended just now
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, children.read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def ranks(launched: Live) -> dict[int, int]:
    """rank -> process, of those that torchrun has started; a loader's workers have the rank of their parent."""
    found: dict[int, int] = {}
    for process in descendants(launched.process.pid):
        environment = Path(f"/proc/{process}/environ").read_bytes()
        if match := re.search(rb"(?:^|\0)RANK=(\d+)", environment):
            found.setdefault(int(match[1]), process)
    return found


def leftovers(run: Path) -> list[str]:
    """What no run that has ended may leave: parts of files and folders that never got their name."""
    suffixes = (".tmp", ".old", ".gone", ".part")
    return [str(path.relative_to(run)) for path in run.rglob("*") if path.suffix in suffixes]
