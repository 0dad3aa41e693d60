"""Train in another process while this one does other work."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sd3_light
from sd3_light.config import LoadedConfig
from sd3_light.config.faults import RESUMABLE, Stopped, UserError
from sd3_light.inputs import open_regular
from sd3_light.runlog import CONSOLE, Bar, info, progress, read_log

_PROGRAM = Path(sd3_light.__file__).with_name("__main__.py")
_STOPPED = (RESUMABLE, 130, -signal.SIGINT, -signal.SIGTERM)  # exit codes after a request to stop
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_POLL_SECONDS = 0.5
_TAIL_BYTES = 1 << 16


def start_training(config: Path, arguments: Sequence[str], run: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start `sd3-light train CONFIG` in another process, which prints to a file in its run folder."""
    run.mkdir(parents=True, exist_ok=True)
    (run / CONSOLE).unlink(missing_ok=True)  # another's run may have a pipe there, or a link to another file
    return start_verb(["train", str(config), *arguments], run / CONSOLE, **options)


def start_verb(
    arguments: Sequence[str], output: Path, parent: Sequence[str] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start `sd3-light` in another process, which prints to a new file. The words of ``parent`` precede the command."""
    command = [*parent, sys.executable, "-P", str(_PROGRAM), *arguments]
    with output.open("xb") as console:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, **options)


@contextmanager
def train_beside(loaded: LoadedConfig, overrides: Sequence[str], title: str) -> Iterator[Callable[[], int]]:
    """Run `sd3-light train` on one core in another process and show its progress.

    Yields a function that waits for the end of training and returns its number of samples. If training fails or is
    stopped, the block is interrupted. If the block fails or is interrupted, training saves a checkpoint and stops.
    """
    run = loaded.train.output_dir
    arguments = [f"--set={each}" for each in overrides]
    console = run / CONSOLE
    stopping = threading.Event()

    def stop() -> None:
        is_running = process.poll() is None
        stopping.set()
        process.terminate()  # does nothing if it has ended
        if (code := process.wait()) == RESUMABLE:
            info("\n".join(f"{title}: {line}" for line in _lines(console)[-2:]))  # where, and how to continue
        elif is_running and code not in (0, *_STOPPED):
            info(str(_failure(title, code, console)))

    def finish() -> int:
        watcher.join()
        if (code := process.wait()) in _STOPPED:
            raise Stopped(f"{title} was stopped")
        if code != 0:
            raise _failure(title, code, console)
        return int(_last_step(run)["samples"])

    info(f"{title}: in another process, which prints to {console}")
    with progress(title, loaded.train.max_steps, "steps") as bar, _sigterm_interrupts():
        process = start_training(loaded.path, arguments, run, env={**_ONE_THREAD, **os.environ})
        watcher = threading.Thread(target=_watch, args=(process, run, bar, stopping), daemon=True)
        try:
            watcher.start()
            yield finish
        except (KeyboardInterrupt, Stopped):
            if process.poll() not in (None, 0, *_STOPPED):
                raise _failure(title, process.returncode, console) from None
            raise
        finally:
            stop()
            watcher.join()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at a SIGTERM, which by default ends only this process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(process: subprocess.Popen[bytes], run: Path, bar: Bar, stopping: threading.Event) -> None:
    """Show the steps of a training process until it ends; interrupt the main thread if it stops unasked or fails."""
    is_running = True
    while is_running:
        time.sleep(_POLL_SECONDS)
        is_running = process.poll() is None  # the last steps are read after its end
        if step := _last_step(run):
            bar.fields = {name: step[name] for name in ("samples_per_second", "loss", "lr")}
            bar.set_done(step["step"])
        else:
            bar.restart_rate()
    if process.returncode != 0 and not stopping.is_set():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # SIGINT may be ignored


def _last_step(run: Path) -> dict[str, Any]:
    """Return the last step that a run has logged; empty if there is none yet."""
    log = run / "log.jsonl"
    last: dict[str, Any] = {}
    for event in read_log(log) if log.is_file() else ():
        if event["event"] == "step":
            last = event
    return last


def _failure(title: str, code: int, console: Path) -> UserError:
    last = _lines(console)[-1:] or ["it printed nothing"]
    return UserError(f"{title} ended with exit code {code}: {last[0].removeprefix('error: ')} (see {console})")


def _lines(console: Path) -> list[str]:
    with open_regular(console) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace").strip().splitlines()
