"""The queue: runs that wait for a GPU, train, or have ended. All servers of a user on a machine share it.

Every change is made while the state folder is locked, and is on the disk before its process starts. So a run is never
started twice, and a server that was killed at any point leaves a queue that the next one continues.
"""

import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sd3_light.checkpoint.lock import is_locked
from sd3_light.checkpoint.requests import SAVE_QUIT
from sd3_light.config import load_config
from sd3_light.config.faults import RESUMABLE, ConfigFaults, UserError
from sd3_light.files import write_errors
from sd3_light.inputs import regular_handle
from sd3_light.runlog import CONSOLE
from sd3_light.system import machine, visible_gpus
from sd3_light.ui.job import DONE, FAILED, MODES, RUNNING, STARTING, STOPPED, WAITING, Job, read_jobs, write_jobs
from sd3_light.ui.job_process import ProcessIdentity, exit_code, find_process, forget_exit, start_process
from sd3_light.ui.served_files import ServedFiles
from sd3_light.ui.user_state import locked_state, open_state

CPU = "cpu"
"""The slot of a machine without a GPU."""
MOST_WAITING = 1000
_MOST_ENDED = 200  # that are kept
_TICK_SECONDS = 1.0
_TAIL_BYTES = 8000
_STOPPED_CODES = (RESUMABLE, 128 + 15, 128 + 2, 130)
_GPUS = "CUDA_VISIBLE_DEVICES"
_NOT_INHERITED = ("SD3_LIGHT_UI_TOKEN",)


def machine_slots() -> list[str]:
    """Return the GPUs of this server, one run for each: what `CUDA_VISIBLE_DEVICES` names, or all; else the CPU."""
    gpus = visible_gpus()
    if not gpus:
        return [CPU]
    named = os.environ.get(_GPUS)
    return [part.strip() for part in named.split(",")] if named else [str(number) for number in range(len(gpus))]


@dataclass
class RunQueue:
    """The queue in a state folder. Runs are started only in run folders below ``roots``.

    ``problem`` says why the last look at the queue changed nothing. Several threads may use it.
    """

    state: Path
    roots: Sequence[Path]
    slots: Callable[[], list[str]] = machine_slots
    problem: str = ""
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _known_slots: list[str] | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def file(self) -> Path:
        """The queue of this machine: a home folder may be shared by several."""
        name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in socket.gethostname())
        return self.state / f"queue-{name}.json"

    def jobs(self) -> list[Job]:
        """Return all jobs, the first one to start first. Raises UserError."""
        if not self.state.is_dir():
            return []
        open_state(self.state)
        return read_jobs(self.file)

    def job(self, job_id: str) -> Job:
        """Return a job. Raises UserError for an unknown id."""
        return _job(self.jobs(), job_id)

    def job_of(self, run: Path) -> Job | None:
        """Return the last job of a run folder."""
        try:
            jobs = self.jobs()
        except UserError:
            return None
        return next((job for job in reversed(jobs) if job.run == str(run)), None)

    # --- requests --------------------------------------------------------------------------------

    def add(self, config: Path, mode: str = "start", run: Path | None = None) -> Job:
        """Add a run, which starts as soon as a GPU is free. Raises UserError for faults of the config, if its folder is
        not ``run``, and if that is in the queue already."""
        if mode not in MODES:
            raise UserError(f"unknown mode {mode!r:.40}; use one of {', '.join(MODES)}")
        if not os.path.isfile(config):  # False also for names that are too long
            raise UserError(f"{config} does not exist; give the path of a train TOML on this machine")
        folder = self._run_folder(config)
        config = Path(os.path.abspath(config))
        if run is not None and folder.resolve() != run.resolve():
            raise UserError(f"{config}: output_dir is {folder}, the run was copied or moved; set it to {run} first")
        with self._changing() as jobs:
            job = Job(secrets.token_hex(8), str(config), str(folder), mode, added=time.time())
            self._require_free(jobs, folder)
            jobs.append(job)
        self.advance()
        return job

    def requeue(self, job_id: str, mode: str) -> Job:
        """Add a run that has ended again, at the end of the queue."""
        old = self.job(job_id)
        if not old.is_over:
            raise UserError(f"{old.run} has not ended; stop it first")
        return self.add(Path(old.config), mode, old.folder)

    def stop(self, run: Path) -> None:
        """Take a run that waits out of the queue, end one that starts, and ask one that trains to save and quit."""
        with self._changing() as jobs:
            job = next((job for job in jobs if job.run == str(run) and not job.is_over), None)
            if job is not None and job.state == WAITING:
                _put(jobs, replace(job, state=STOPPED, ended=time.time(), message="it was stopped before it started"))
                return
            if job is not None:
                _put(jobs, replace(job, is_stopping=True))
        if is_locked(run):
            ServedFiles(self.roots).touch(run / SAVE_QUIT)
        elif job is None:
            raise UserError(f"no process trains in {run}; it has ended already")
        else:
            job.process.end()

    def remove(self, job_id: str) -> None:
        """Remove a run that has ended from the list; its files stay."""
        with self._changing() as jobs:
            job = _job(jobs, job_id)
            if not job.is_over:
                raise UserError(f"{job.run} has not ended; stop it first")
            jobs.remove(job)

    # --- what pages show -------------------------------------------------------------------------

    def console(self, run: Path) -> str:
        """Return the end of what a run that was started here has printed; "" for other runs."""
        try:
            handle = regular_handle(run / CONSOLE, os.O_RDONLY | os.O_NOFOLLOW)  # a link may lead to a private file
            with open(handle, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def notes(self, run: Path) -> list[str]:
        """Return a note if a queued run waits, is starting, or has failed."""
        job = self.job_of(run)
        if job is None or is_locked(run):
            return []
        if job.state == WAITING:
            return [f"The run is in the queue. {job.message}".rstrip()]
        if job.is_active:
            console = " The console shows how far it is." if self.console(run) else ""  # empty at first
            return [f"The run is starting: it loads libraries, and caches what is missing.{console}"]
        return [job.message] if job.state == FAILED else []

    def is_pending(self, run: Path) -> bool:
        """Return whether a queued run does not train yet: it waits, loads libraries, or caches."""
        job = self.job_of(run)
        return job is not None and not job.is_over and not is_locked(run)

    def serves(self, run: Path) -> bool:
        """Return whether this server starts runs in a folder; those of other folders wait for another server."""
        return any(run.is_relative_to(root) for root in self.roots)

    # --- work ------------------------------------------------------------------------------------

    def work(self) -> None:
        """Advance the queue in a thread until `end`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="queue", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop advancing the queue; its runs continue."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self.advance()

    def advance(self) -> None:
        """Notice which runs have ended, and start those that wait, one per GPU."""
        if not self.file.is_file():
            return
        self._children = [child for child in self._children if child.poll() is None]  # leaves no zombies
        try:
            with self._changing() as jobs:
                for job in [job for job in jobs if job.is_active]:
                    _put(jobs, self._observed(job))
                self._start_waiting(jobs)
            self.problem = ""
        except UserError as error:
            self.problem = str(error)

    def _start_waiting(self, jobs: list[Job]) -> None:
        if self._known_slots is None:
            self._known_slots = self.slots()
        for job in [job for job in jobs if job.state == WAITING and self.serves(job.folder)]:
            taken = {other.slot for other in jobs if other.is_active}
            slot = next((slot for slot in self._known_slots if slot not in taken), None)
            if slot is None:
                return
            starting = replace(job, state=STARTING, slot=slot, token=secrets.token_hex(16), begun=time.time())
            _put(jobs, starting)
            write_jobs(self.file, jobs)  # before the process: a server that dies here leaves a token to look for
            _put(jobs, self._started(starting))

    def _started(self, job: Job) -> Job:
        """Start the process of a job."""
        try:
            config = Path(job.config)
            folder = self._run_folder(config)
            if str(folder) != job.run:
                raise UserError(f"output_dir of {config} is now {folder}; add it to the queue again")
            if is_locked(folder):
                raise UserError(f"a process trains in {folder} already; stop it first, or choose another output_dir")
            with write_errors(folder / CONSOLE):
                (folder / SAVE_QUIT).unlink(missing_ok=True)  # a request that an earlier process did not see
                variables = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
                variables |= {} if job.slot == CPU else {_GPUS: job.slot}
                child = start_process(config, MODES[job.mode], folder, self._exit_file(job), variables)
        except UserError as error:
            return _over(job, FAILED, f"The run did not start: {_in_one_line(error)}")
        self._children.append(child)
        return _with_process(job, ProcessIdentity.of(child.pid, job.token))

    def _observed(self, job: Job) -> Job:
        """Return a job with what has become of its process."""
        if not job.pid:
            process = find_process(job.token)
            if process is not None:
                return _with_process(job, process)
        is_alive = job.process.is_alive
        code = exit_code(self._exit_file(job))  # after the process was seen: it writes this before it ends
        if code is None and (is_alive or is_locked(job.folder)):  # the shell may have been killed without its child
            return job
        if code is not None:
            forget_exit(self._exit_file(job))
            return self._concluded(job, code)
        if job.is_stopping:
            return _over(job, STOPPED)
        if not job.pid:  # a server has died before it started the process
            return replace(job, state=WAITING, slot="", token="")
        if job.machine != machine():  # of an earlier boot
            message = "It continues after a restart of the machine."
            return replace(job, state=WAITING, mode="resume", slot="", token="", pid=0, started="", message=message)
        last = self._last_line(job)
        printed = f" Its last line: {last}" if last else ""
        return _over(job, FAILED, f"The run was killed, perhaps because memory was short.{printed}")

    def _concluded(self, job: Job, code: int) -> Job:
        if code == 0:
            return _over(job, STOPPED if job.is_stopping else DONE)
        if code in _STOPPED_CODES and (job.is_stopping or code == RESUMABLE):
            return _over(job, STOPPED)
        return _over(
            job, FAILED, f"The run ended with exit code {code}: {self._last_line(job) or 'it printed nothing'}"
        )

    def _last_line(self, job: Job) -> str:
        return "".join(self.console(job.folder).strip().splitlines()[-1:])

    def _exit_file(self, job: Job) -> Path:
        return self.state / f"exit-{job.token}"

    def _run_folder(self, config: Path) -> Path:
        """Return the run folder of a config. Raises UserError for its faults, and for one that may not be written."""
        return ServedFiles(self.roots).require(load_config(config).train.output_dir)

    def _require_free(self, jobs: Sequence[Job], folder: Path) -> None:
        if is_locked(folder) or any(job.run == str(folder) and job.is_active for job in jobs):
            raise UserError(f"a process trains in {folder} already; stop it first, or choose another output_dir")
        if any(job.run == str(folder) and job.state == WAITING for job in jobs):
            raise UserError(f"{folder} is in the queue already")
        if sum(job.state == WAITING for job in jobs) >= MOST_WAITING:
            raise UserError(f"{MOST_WAITING} runs wait already; add this one when some of them have ended")

    @contextmanager
    def _changing(self) -> Iterator[list[Job]]:
        """Yield the jobs for changes, which are written at the end of the block, and lock the queue meanwhile."""
        with locked_state(self.state):
            jobs = read_jobs(self.file)
            before = list(jobs)
            yield jobs
            if jobs != before:
                over = [job for job in jobs if job.is_over]
                for old in over[:-_MOST_ENDED]:
                    jobs.remove(old)
                write_jobs(self.file, jobs)


def can_resume(run: Path) -> bool:
    """Return whether a run folder has a checkpoint."""
    return any((run / "checkpoints").glob("step-*"))


def _job(jobs: Iterable[Job], job_id: str) -> Job:
    job = next((job for job in jobs if job.id == job_id), None)
    if job is None:
        raise UserError(f"there is no run {job_id} in the queue; see the queue")
    return job


def _put(jobs: list[Job], job: Job) -> None:
    """Replace a job by its new state."""
    jobs[[each.id for each in jobs].index(job.id)] = job


def _with_process(job: Job, process: ProcessIdentity) -> Job:
    return replace(job, state=RUNNING, machine=process.machine, pid=process.pid, started=process.started or "?")


def _over(job: Job, state: str, message: str = "") -> Job:
    return replace(job, state=state, ended=time.time(), slot="", message=message)


def _in_one_line(error: UserError) -> str:
    """Return the text of an error; of many faults the first one."""
    if isinstance(error, ConfigFaults):
        more = f" (and {len(error.faults) - 1} more)" if len(error.faults) > 1 else ""
        return f"{error.faults[0]}{more}"
    return str(error)
