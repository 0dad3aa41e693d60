"""One call of the program: who this process is, what it prints, and how a fault ends it."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sd3_light.config.faults import PeerLost, Stopped, UserError
from sd3_light.runlog import quiet_libraries, set_main_process

if TYPE_CHECKING:
    from sd3_light.config import LoadedConfig
    from sd3_light.engines import Launch

RESUMABLE = 75
"""Exit code of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h, "try again"."""

_DEBUG = bool(os.environ.get("SD3_LIGHT_DEBUG"))


def enable_tracebacks() -> None:
    """Print the traceback of every error from now on."""
    global _DEBUG
    _DEBUG = True


def prepare(local_rank: int | None = None) -> "Launch":
    """Who this process is; it speaks if it is the main one. Called before anything heavy is imported."""
    # torch's threads wait by spinning for long, which makes a CPU that others use too many times slower
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if not _DEBUG:
        quiet_libraries()
    from sd3_light.engines import Launch

    launched = Launch.detect(local_rank)
    set_main_process(launched.is_main)
    return launched


def guarded(work: Callable[[], object]) -> int:
    """Run; a known fault is one line (or one report) and exit code 2 (75 where starting again is all it needs),
    anything else exit code 1."""
    try:
        work()
    except UserError as fault:
        return _fail(str(fault), RESUMABLE if isinstance(fault, PeerLost) else 2)
    except Stopped as stop:
        _print_stopped(str(stop))
        return RESUMABLE
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except Exception as error:  # the last resort of the program: everything unknown is ours
        frame = traceback.extract_tb(error.__traceback__)[-1]
        bug = f"this is a bug in sd3-light (at {Path(frame.filename).name}:{frame.lineno})"
        return _fail(f"{type(error).__name__}: {error}; {bug}; --debug shows the traceback", 1)
    return 0


def _print_stopped(text: str) -> None:
    from sd3_light.runlog import info

    info(f"stopped: {text}")


def _fail(text: str, code: int) -> int:
    if _DEBUG:
        traceback.print_exc()
    Console(stderr=True).print(f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    if "torch.distributed" in sys.modules:
        from sd3_light.engines.processes import abort_process_group

        abort_process_group()
    return code


def load(path: Path, overrides: Sequence[str] | None, caching: bool = False) -> "LoadedConfig":
    """The config at ``path`` without a fault, or the report of all its faults."""
    from sd3_light.stages import check

    return check.load(path, overrides or (), caching)


def echo(text: str) -> None:
    """A line of the answer, on stdout."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
