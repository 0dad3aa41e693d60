"""A training run in a separate process, observed through the files that it writes."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.project import Project
from tests.waiting import HANG_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
T = TypeVar("T")


class Log:
    """The events added to a log since this object was created; an incomplete last line is read when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path, self._events = path, list[dict[str, Any]]()
        # the next run cuts off an incomplete line of a killed run, so it is not counted
        self._position = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind so far."""
        return [event for event in self.all() if event["event"] == kind]

    def all(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._position)
                text, newline, _ = file.read().rpartition(b"\n")
            self._position += len(text + newline)
            self._events += [json.loads(line) for line in text.splitlines()]
        return self._events


def arguments(project: Project, *flags: str, **overrides: object) -> list[str]:
    """Return the command-line arguments of `train.py`."""
    args = ["--config", str(project.train_toml), *flags]
    for key, value in overrides.items():
        args += ["--set", f"{key}={value}"]
    return args


class TrainProcess:
    """`python [LAUNCHER] train.py --config ... [FLAGS] [--set KEY=VALUE ...]` in a new process group.

    The process group is killed at the end of the `with` block.
    """

    def __init__(self, project: Project, *flags: str, launcher: Sequence[str] = (), **overrides: object) -> None:
        self.run = Path(project.folder / str(overrides.get("output_dir", '"run"')).strip('"'))
        self.log, self._output_file = Log(self.run / "log.jsonl"), Path(project.folder / "output.txt")
        self._pid_file = Path(project.folder / "pid.txt")
        self._pid_file.unlink(missing_ok=True)
        command = [sys.executable, *launcher, str(ROOT / "train.py"), *arguments(project, *flags, **overrides)]
        # only the CPU computes the same bits each time
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SD3_LIGHT_TEST_PID_FILE": str(self._pid_file)}
        with self._output_file.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError, FileNotFoundError):  # all processes have ended
            os.killpg(int(self._pid_file.read_text(encoding="ascii")), signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    @property
    def pid(self) -> int:
        """The process itself; ``process`` may be its stand-in (see tests/warm)."""
        return int(self.wait_for(lambda: self._pid_file.exists() and self._pid_file.read_text(encoding="ascii")))

    @property
    def output(self) -> str:
        """Its stdout and stderr so far."""
        return self._output_file.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, check: Callable[[], T | None], pause: float = 0.01) -> T:
        """Return the first true result of ``check``; fail if the process ends before that."""

        def check_alive() -> T | None:
            ended = self.process.poll() is not None
            if not (result := check()):
                assert not ended, f"the process ended with {self.process.returncode}:\n{self.output}"
            return result

        return wait_until(check_alive, lambda: self.output, pause)

    def wait_for_start(self) -> int:
        """Wait until the run starts or resumes; return its first step."""
        return int(self.wait_for(lambda: self.log.read("start") or self.log.read("resume"))[0]["step"])

    def wait_for_step(self, step: int) -> int:
        """Wait until this process has logged this step or a later one; return the last logged step."""
        return self.wait_for(lambda: self._last_step(step))

    def _last_step(self, least: int) -> int | None:
        steps = [event["step"] for event in self.log.read("step")]
        return steps[-1] if steps and steps[-1] >= least else None

    def wait_for_event(self, kind: str, number: int = 0) -> dict[str, Any]:
        """Wait for event ``number`` of this kind and return it."""
        return self.wait_for(lambda: dict(enumerate(self.log.read(kind))).get(number))

    def send(self, number: signal.Signals, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group as a terminal does with Ctrl-C."""
        (os.killpg if group else os.kill)(self.pid, number)

    def end(self) -> int:
        """Wait until the process ends; return its exit code."""
        return self.process.wait(HANG_SECONDS)

    def stop(self, number: signal.Signals, group: bool = False) -> int:
        """Send a signal and wait for the end; return the exit code."""
        self.send(number, group)
        return self.end()

    def limit_file_size(self, size: int | None) -> None:
        """Limit the size of files the process can write, to simulate a full disk; None removes the limit."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def descendants(process: int) -> list[int]:
    """Return the child processes of a process, recursively, parents first."""
    processes: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, children.read_text(encoding="ascii").split()):
                processes += [child, *descendants(child)]
    return processes


def ranks(launched: TrainProcess) -> dict[int, int]:
    """Return rank -> process of the processes that torchrun started; loader workers inherit their parent's rank."""
    processes: dict[int, int] = {}
    for process in descendants(launched.pid):
        environment = Path(f"/proc/{process}/environ").read_bytes()
        if match := re.search(rb"(?:^|\0)RANK=(\d+)", environment):
            processes.setdefault(int(match[1]), process)
    return processes


def leftovers(run: Path) -> list[str]:
    """Return temporary files and folders in a run folder; a finished run must leave none."""
    suffixes = (".tmp", ".old", ".gone", ".part")
    return [str(path.relative_to(run)) for path in run.rglob("*") if path.suffix in suffixes]
