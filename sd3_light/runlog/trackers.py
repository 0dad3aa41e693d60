"""Weights & Biases and trackio beside the log. Both are optional, and neither can stop a run that has begun."""

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import MonitoringConfig
from sd3_light.files import atomic_unsynced_file
from sd3_light.runlog.console import info, is_main_process
from sd3_light.runlog.log import CURVES, Tracker, read_log
from sd3_light.runlog.tensorboard import bounded

if TYPE_CHECKING:
    from PIL.Image import Image

TRACKER_IDS = "trackers.json"
"""The file of a run folder that says which run of a tracker is its own."""

_FINISH_SECONDS = 60.0  # a run that has to stop may not wait for a slow network


def missing_trackers(monitoring: MonitoringConfig) -> dict[str, str]:
    """The keys that ask for a package which is not installed, and what to do about each."""
    asked = {"wandb": monitoring.enable_wandb, "trackio": monitoring.enable_trackio}
    return {
        f"enable_{name}": f"install it with: pip install 'sd3-light[{name}]'"
        for name, wanted in asked.items()
        if wanted and not _is_there(name)
    }


def open_trackers(
    monitoring: MonitoringConfig, folder: Path, config: Mapping[str, Any], x_axis: str = "step"
) -> list[Tracker]:
    """The trackers that ``monitoring`` asks for, on the main process; elsewhere none.

    A run folder keeps to its own run of each tracker, however often it is started. ``config`` is shown there and must
    hold no secret; ``x_axis`` is the one of the run's log. A package that is not installed, or that has no account to
    log to, is a `UserError`; a network that does not answer is said once, and the run goes on without it.
    """
    if not is_main_process():
        return []
    for key, remedy in missing_trackers(monitoring).items():
        raise UserError(f"monitoring.{key}: the package is not installed; {remedy}")
    wishes = ((monitoring.enable_wandb, _open_wandb), (monitoring.enable_trackio, _open_trackio))
    opened = (make(monitoring, folder, config, x_axis) for wanted, make in wishes if wanted)
    return [tracker for tracker in opened if tracker is not None]


class FaultTolerant:
    """A tracker whose own faults (``faults``) cost what it shows, never the run: the first is said, the rest not."""

    def __init__(self, name: str, inner: Tracker, faults: tuple[type[Exception], ...]) -> None:
        self._name, self._inner, self._faults = name, inner, faults
        self._said = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""
        self._try(lambda: self._inner.log(values, step))

    def image(self, name: str, image: "Image", step: int) -> None:
        """Show a picture under a name."""
        self._try(lambda: self._inner.image(name, image, step))

    def close(self) -> None:
        """Send what is left."""
        self._try(self._inner.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except self._faults as fault:
            if not self._said:
                info(f"{self._name} fails ({_first_line(fault)}); training goes on, log.jsonl has it all")
            self._said = True


# --- Weights & Biases -------------------------------------------------------------------------


class Wandb:
    """One wandb run. It refuses points behind its last one, so steps that a resumed run repeats are left out."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def image(self, name: str, image: "Image", step: int) -> None:
        """Show a picture under a name."""
        if step >= self._run.step:
            self._run.log({name: self._module.Image(bounded(image))}, step=step)

    def close(self) -> None:
        """Send what is left, for a minute at most; the rest stays in the run folder for `wandb sync`."""
        self._run.finish()


def _open_wandb(monitoring: MonitoringConfig, folder: Path, config: Mapping[str, Any], x_axis: str) -> Tracker | None:
    if monitoring.wandb_api_key is not None:
        # the environment of this process, as wandb.login(key=...) would write it to the user's .netrc
        os.environ["WANDB_API_KEY"] = monitoring.wandb_api_key.get_secret_value()
    import wandb

    mode = wandb.setup().settings.mode
    try:
        if mode == "online" and not wandb.login(verify=False, prompt=False):
            raise UserError(_ACCOUNT)
        # a folder's own id makes it the same run after a restart; offline there is nobody to ask whether it exists
        run = wandb.init(
            project=monitoring.wandb_tracker_name,
            name=monitoring.wandb_run_name or folder.resolve().name,
            id=_remember(folder, "wandb_id", lambda: uuid.uuid4().hex[:12]),
            dir=str(folder.resolve()),
            config=dict(config),
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            # it would wrap the streams that the live line is drawn on
            settings=wandb.Settings(console="off", finish_timeout=_FINISH_SECONDS),
        )
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as fault:
        raise UserError(f"{_ACCOUNT} ({_first_line(fault)})") from fault
    except (wandb.Error, OSError) as fault:
        info(f"wandb does not answer ({_first_line(fault)}); training goes on without it, log.jsonl has it all")
        return None
    return FaultTolerant("wandb", Wandb(wandb, run), (wandb.Error, OSError))


_ACCOUNT = (
    "monitoring.enable_wandb: wandb has no account to log to; run `wandb login`, or set WANDB_API_KEY, or "
    "WANDB_MODE=offline"
)

# --- trackio ----------------------------------------------------------------------------------


class Trackio:
    """One trackio run. Points before ``known``, the last one it has, are those that a resumed run repeats."""

    def __init__(self, module: Any, run: Any, known: int) -> None:
        self._module, self._run, self._known = module, run, known

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""
        if step >= self._known:
            self._run.log(dict(values), step=step)

    def image(self, name: str, image: "Image", step: int) -> None:
        """Show a picture under a name."""
        if step >= self._known:
            self._run.log({name: self._module.Image(bounded(image))}, step=step)

    def close(self) -> None:
        """Send what is left."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


def _open_trackio(monitoring: MonitoringConfig, folder: Path, config: Mapping[str, Any], x_axis: str) -> Tracker | None:
    import trackio

    # the base class of its HTTP client, which differs by version
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    # trackio knows its runs by their names alone, so the name of ours must be nobody else's
    wish = monitoring.wandb_run_name or folder.resolve().name
    name = _remember(folder, "trackio_name", lambda: f"{wish}-{uuid.uuid4().hex[:6]}")
    known = max(_positions(folder / "log.jsonl", x_axis), default=-1)
    try:
        with redirect_stdout(sys.stderr):  # it tells by print, and stdout is for results
            run = trackio.init(
                project=monitoring.wandb_tracker_name,
                name=name,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except ValueError as fault:
        raise UserError(f"monitoring.enable_trackio: {_first_line(fault)}") from fault
    except (OSError, HTTPError) as fault:  # no place to write, no token, no network
        info(f"trackio does not answer ({_first_line(fault)}); training goes on without it, log.jsonl has it all")
        return None
    # its log and finish warn and go on where they fail; these are what could still come through
    return FaultTolerant("trackio", Trackio(trackio, run, known), (OSError, HTTPError))


def _positions(path: Path, x_axis: str) -> Iterator[int]:
    """Where the points of an earlier start are."""
    if path.is_file():
        yield from (event[x_axis] for event in read_log(path) if event["event"] in CURVES and x_axis in event)


# --- both -------------------------------------------------------------------------------------


def _is_there(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None


def _remember(folder: Path, key: str, make: Callable[[], str]) -> str:
    """What the run folder knows under a key, made at first."""
    path = folder / TRACKER_IDS
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if key not in known:
        known[key] = make()
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_unsynced_file(path) as temporary:
            temporary.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    return known[key]


def _first_line(fault: Exception) -> str:
    return (str(fault) or type(fault).__name__).splitlines()[0]
