"""A run in the queue, and the file that keeps the queue."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from sd3_light.config.faults import UserError
from sd3_light.files import write_atomically
from sd3_light.inputs import read_json_file
from sd3_light.ui.job_process import ProcessIdentity

MODES = {"start": (), "resume": ("--resume",), "restart": ("--restart",)}
"""How training begins: options of `sd3-light train`."""
WAITING = "waiting"
STARTING = "starting"
RUNNING = "running"
DONE = "done"
STOPPED = "stopped"
FAILED = "failed"
STATES = (WAITING, STARTING, RUNNING, DONE, STOPPED, FAILED)
ACTIVE = (STARTING, RUNNING)
"""States with a process, or soon with one."""
_FORMAT = 1
_FILE_BYTES = 1 << 24


@dataclass(frozen=True)
class Job:
    """A run in the queue. ``slot`` is its GPU, ``message`` says why it failed; the times are seconds since 1970.

    A process has the ``token`` of its start; what identifies it is empty until the process is known.
    """

    id: str
    config: str
    run: str
    mode: str = "start"
    state: str = WAITING
    added: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    slot: str = ""
    token: str = ""
    machine: str = ""
    pid: int = 0
    started: str = ""
    is_stopping: bool = False
    message: str = ""

    @property
    def is_active(self) -> bool:
        """Whether it has a process, or soon has one."""
        return self.state in ACTIVE

    @property
    def is_over(self) -> bool:
        """Whether it neither waits nor runs."""
        return self.state in (DONE, STOPPED, FAILED)

    @property
    def process(self) -> ProcessIdentity:
        """Its process."""
        return ProcessIdentity(self.machine, self.pid, self.started, self.token)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run)


_TYPES = get_type_hints(Job)


def read_jobs(path: Path) -> list[Job]:
    """Return the jobs in a file; none if it does not exist. Raises UserError if it is damaged."""
    try:
        value = read_json_file(path, _FILE_BYTES)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise _damaged(path, str(getattr(error, "strerror", None) or error)) from error
    if not isinstance(value, dict) or value.get("format") != _FORMAT or not isinstance(value.get("jobs"), list):
        raise _damaged(path, f"it is not a queue of format {_FORMAT}")
    return [_job(each, path) for each in value["jobs"]]


def write_jobs(path: Path, jobs: Sequence[Job]) -> None:
    """Write the queue; it is complete on the disk when this returns."""
    text = json.dumps({"format": _FORMAT, "jobs": [asdict(job) for job in jobs]}, indent=1)
    write_atomically(path, text.encode())


def _job(value: Any, path: Path) -> Job:
    names = {field.name for field in fields(Job)}
    if not isinstance(value, dict) or set(value) != names:
        raise _damaged(path, "a run in it has other fields")
    for name, kind in _TYPES.items():
        if type(value[name]) is not kind and not (kind is float and type(value[name]) is int):
            raise _damaged(path, f"{name} of a run is {value[name]!r:.40}")
    if value["state"] not in STATES or value["mode"] not in MODES:
        raise _damaged(path, f"a run has the state {value['state']!r:.40}, mode {value['mode']!r:.40}")
    return Job(**value)


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"the queue {path} cannot be read ({reason}); nothing starts. Move it away to begin an empty queue"
    )
