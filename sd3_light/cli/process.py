"""Setup, output and exit codes of one process of the command line."""

import errno
import gc
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from sd3_light.config.faults import RESUMABLE, PeerLost, Stopped, UserError
from sd3_light.files import disk_error
from sd3_light.inputs import NOT_REGULAR
from sd3_light.runlog import info, quiet_libraries, set_main_process
from sd3_light.system import join_gpu_memory, keep_compiled_code, limit_spinning

if TYPE_CHECKING:
    from sd3_light.config import LoadedConfig
    from sd3_light.engines import Launch

_PATH_ERRORS = (
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM),
    *(errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EFBIG),  # also by `sd3_light/inputs.py`
)
_DEBUG = bool(os.environ.get("SD3_LIGHT_DEBUG"))


def enable_tracebacks() -> None:
    """Print the traceback of every error from now on."""
    global _DEBUG
    _DEBUG = True


def quiet_imports() -> None:
    """Silence what transformers and diffusers log, such as missing packages that are not used. Called before they
    are imported."""
    if not _DEBUG:
        for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
            os.environ.setdefault(name, "error")


def init_process(local_rank: int | None = None) -> "Launch":
    """Import the libraries, set up logging and return the launch info of this process."""
    limit_spinning()
    keep_compiled_code()
    join_gpu_memory()
    with _without_collections():
        import diffusers.models.transformers.transformer_sd3  # noqa: F401
    if not _DEBUG:
        quiet_libraries()
    from sd3_light.engines import Launch
    from sd3_light.engines.cpu_threads import limit_threads

    launch = Launch.detect(local_rank)
    limit_threads(launch.local_world_size)
    set_main_process(launch.is_main)
    return launch


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in this block, which imports large libraries, and exclude its objects from later collections.

    Python would look at all of these objects again and again, also in the training loop and in forked workers. Does
    nothing if torch has been imported before.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_guarded(work: Callable[[], object]) -> int:
    """Run ``work`` and return the exit code: 0, 1 for a bug, 2 for a user error, 75 if starting again is enough."""
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that libraries start do not import from the working directory
    try:
        work()
    except UserError as error:
        return _fail(str(error), RESUMABLE if isinstance(error, PeerLost) else 2)
    except Stopped as stop:
        for number in (signal.SIGTERM, signal.SIGINT):  # the interpreter would restore the defaults while it exits
            signal.signal(number, signal.SIG_IGN)
        info("\n".join([f"stopped: {stop}", *getattr(stop, "__notes__", ())]))
        return RESUMABLE
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except OSError as error:
        return _fail_by_bug(error) if (line := disk_error(error) or _path_error(error)) is None else _fail(line, 2)
    except Exception as error:  # the top level: every other exception is a bug
        return _fail_by_bug(error)
    return 0


@contextmanager
def continued_by(command: str) -> Iterator[None]:
    """After a request to stop, such as Ctrl-C, print the command that continues."""
    note = f"continue with: {command}"
    try:
        yield
    except Stopped as stop:
        stop.add_note(note)  # printed after the reason
        raise
    except KeyboardInterrupt:
        info(note)
        raise


def command_line(*parts: str | Path) -> str:
    """Return a command of sd3-light to copy into a shell; paths are relative to the working directory if below it."""
    return shlex.join(["sd3-light", *(_short(part) if isinstance(part, Path) else part for part in parts)])


def torchrun_line(processes: int, config: Path, *options: str) -> str:
    """Return the command that trains in several processes of one machine."""
    command = ["torchrun", "--nproc_per_node", str(processes), "-m", "sd3_light", "train", _short(config)]
    return shlex.join([*command, *options])


def _short(path: Path) -> str:
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def suggest(*commands: Sequence[str | Path]) -> None:
    """Print the commands that usually follow."""
    info("next:")
    for command in commands:
        info(f"  {command_line(*command)}")


def suggest_for_model(folder: Path) -> None:
    """Print the commands that usually follow a model folder that was written."""
    from sd3_light.core.registry import family_of_folder

    commands: list[tuple[str | Path, ...]] = [("sample", folder, "a prompt")]
    if family_of_folder(folder).has_single_file:
        commands.append(("convert", folder, folder.with_suffix(".safetensors")))
    suggest(*commands)


def given_options(context: typer.Context, *without: str) -> list[str | Path]:
    """Return the command's options that differ from their defaults, as they are typed, but none of ``without``."""
    parts: list[str | Path] = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.param_type_name != "option" or option.name in without or value in (None, option.get_default(context)):
            continue
        if isinstance(value, bool):
            parts.append((option.opts if value else option.secondary_opts)[0])
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            parts += [option.opts[0], each if isinstance(each, Path) else str(each)]
    return parts


def _path_error(error: OSError) -> str | None:
    """Return one line about a path that is too long, protected, or not a file of its kind; None for other errors."""
    if error.errno not in _PATH_ERRORS and error.strerror != NOT_REGULAR:
        return None
    place = "" if error.filename is None else f"{str(error.filename)[:200]}: "
    return f"{place}{error.strerror}; check the path and its permissions"


def _fail_by_bug(error: Exception) -> int:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    bug = f"this is a bug in sd3-light (at {Path(frame.filename).name}:{frame.lineno})"
    return _fail(f"{type(error).__name__}: {error}; {bug}; --debug shows the traceback", 1)


def _fail(text: str, code: int) -> int:
    if _DEBUG:
        traceback.print_exc()
    Console(stderr=True).print(f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    if "torch.distributed" in sys.modules:
        from sd3_light.engines.processes import abort_process_group

        abort_process_group()
    return code


def load_checked(path: Path, overrides: Sequence[str] | None, caching: bool = False) -> "LoadedConfig":
    """Load and check the config at ``path``. Raises a report of all its faults."""
    from sd3_light.check import verb as check

    return check.load(path, overrides or (), caching)


def echo(text: str) -> None:
    """Print a line of the result to stdout."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
