"""Start and stop runs. A started run is a separate process, which continues when the server ends."""

import contextlib
import os
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from sd3_light.checkpoint.lock import is_locked
from sd3_light.checkpoint.requests import SAVE_QUIT
from sd3_light.config import load_config
from sd3_light.config.faults import RESUMABLE, UserError
from sd3_light.files import write_errors
from sd3_light.inputs import open_regular
from sd3_light.other_process import start_training
from sd3_light.runlog import CONSOLE

_TAIL_BYTES = 8000


@dataclass
class RunProcesses:
    """The runs that this server has started, by their folders."""

    _started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, config: Path, resume: bool, run: Path | None = None) -> Path:
        """Start `sd3-light train CONFIG` and return the run folder. Raises UserError for faults of the config, and if
        its folder is not ``run``."""
        if not os.path.isfile(config):  # False also for names that are too long
            raise UserError(f"{config} does not exist; give the path of a train TOML on this machine")
        folder = Path(os.path.abspath(load_config(config).train.output_dir))
        if run is not None and folder.resolve() != run.resolve():
            raise UserError(f"{config}: output_dir is {folder}, the run was copied or moved; set it to {run} first")
        with self._lock:
            self._start(config, resume, folder)
        return folder

    def _start(self, config: Path, resume: bool, folder: Path) -> None:
        if is_locked(folder) or self._is_alive(folder):
            raise UserError(f"a process trains in {folder} already; stop it first, or choose another output_dir")
        with write_errors(folder / CONSOLE):
            (folder / SAVE_QUIT).unlink(missing_ok=True)  # a request that an earlier process did not see
            arguments = ["--resume"] if resume else []
            self._started[folder] = start_training(config, arguments, folder, start_new_session=True)

    def stop(self, folder: Path) -> None:
        """Ask the run in a folder to save a checkpoint and quit; end one that is starting."""
        if self.is_starting(folder):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._started[folder].pid, signal.SIGTERM)  # also its workers
            return
        if not is_locked(folder):
            raise UserError(f"no process trains in {folder}; it has ended already")
        with write_errors(folder / SAVE_QUIT):
            (folder / SAVE_QUIT).touch()

    def console(self, folder: Path) -> str:
        """Return the end of what a run that was started here has printed; "" for other runs."""
        try:
            with open_regular(folder / CONSOLE) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def notes(self, folder: Path) -> list[str]:
        """Return a note if the run that was started here in a folder is not training yet, or has failed."""
        if self.is_starting(folder):
            console = " The console shows how far it is." if self.console(folder) else ""  # empty at first
            return [f"The run is starting: it loads libraries, and caches what is missing.{console}"]
        process = self._started.get(folder)
        code = None if process is None else process.poll()
        if code in (None, 0, RESUMABLE, -signal.SIGTERM):
            return []
        lines = self.console(folder).strip().splitlines()
        return [f"The run ended with exit code {code}: {lines[-1] if lines else 'it printed nothing'}"]

    def is_starting(self, folder: Path) -> bool:
        """Return whether a run that was started here does not train yet: it loads libraries or caches."""
        return self._is_alive(folder) and not is_locked(folder)

    def _is_alive(self, folder: Path) -> bool:
        process = self._started.get(folder)
        return process is not None and process.poll() is None
