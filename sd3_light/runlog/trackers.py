"""Weights & Biases and trackio. Both are optional, and neither can stop a run that has started."""

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import MonitoringConfig
from sd3_light.files import atomic_unsynced_file
from sd3_light.inputs import read_json_file
from sd3_light.runlog.console import info, is_main_process
from sd3_light.runlog.log import CURVE_EVENTS, Tracker, read_log
from sd3_light.runlog.tensorboard import shrink

if TYPE_CHECKING:
    from PIL.Image import Image

TRACKER_IDS = "trackers.json"
"""The file of a run folder with the ids of its runs in the trackers."""

_FINISH_SECONDS = 60.0  # a run that must stop does not wait longer for a slow network


def missing_trackers(monitoring: MonitoringConfig) -> dict[str, str]:
    """Return the config keys that need a package that is not installed, and how to install it."""
    enabled = {"wandb": monitoring.enable_wandb, "trackio": monitoring.enable_trackio}
    return {
        f"enable_{name}": f"install it with: pip install 'sd3-light[{name}]'"
        for name, is_enabled in enabled.items()
        if is_enabled and name not in sys.modules and find_spec(name) is None
    }


def open_trackers(
    monitoring: MonitoringConfig, folder: Path, config: Mapping[str, Any], x_axis: str = "step"
) -> list[Tracker]:
    """Open the trackers that ``monitoring`` enables; return none on other ranks.

    A run folder always uses the same run of a tracker, however often it is started. ``config`` is shown there and must
    not contain secrets; ``x_axis`` is the one of the run's log. Raises UserError where a package is not installed or
    has no account; an unreachable service is reported once, and the run continues without it.
    """
    if not is_main_process():
        return []
    for key, remedy in missing_trackers(monitoring).items():
        raise UserError(f"monitoring.{key}: the package is not installed; {remedy}")
    openers = ((monitoring.enable_wandb, _open_wandb), (monitoring.enable_trackio, _open_trackio))
    opened = (opener(monitoring, folder, config, x_axis) for is_enabled, opener in openers if is_enabled)
    return [tracker for tracker in opened if tracker is not None]


@dataclass
class RemoteRun:
    """A run in a tracker. Its errors never stop training; the first one is reported.

    Points before ``last_step``, the last one that the tracker has, are repeats of a resumed run and are not sent.
    """

    _module: Any
    _run: Any
    _last_step: Callable[[], int]
    _errors: tuple[type[Exception], ...]
    _is_reported: bool = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""
        self._try(lambda: self._send(dict(values), step))

    def image(self, name: str, image: "Image", step: int) -> None:
        """Add an image under a name."""
        self._try(lambda: self._send({name: self._module.Image(shrink(image))}, step))

    def close(self) -> None:
        """Send pending data; wandb gives up after a minute and leaves the rest in the run folder for `wandb sync`."""
        with redirect_stdout(sys.stderr):
            self._try(self._run.finish)

    def _send(self, values: dict[str, Any], step: int) -> None:
        if step >= self._last_step():
            self._run.log(values, step=step)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except self._errors as error:
            if not self._is_reported:
                name = self._module.__name__
                info(f"{name} failed ({_first_line(error)}); training continues, log.jsonl is complete")
            self._is_reported = True


# --- Weights & Biases -------------------------------------------------------------------------


def _open_wandb(monitoring: MonitoringConfig, folder: Path, config: Mapping[str, Any], x_axis: str) -> Tracker | None:
    if monitoring.wandb_api_key is not None:
        # set in the environment, because wandb.login(key=...) would write it to the user's .netrc
        os.environ["WANDB_API_KEY"] = monitoring.wandb_api_key.get_secret_value()
    import wandb

    mode = wandb.setup().settings.mode
    try:
        if mode == "online" and not wandb.login(verify=False, prompt=False):
            raise UserError(_NO_ACCOUNT)
        # the stored id makes it the same run after a restart; offline, wandb cannot look up whether it exists
        run = wandb.init(
            project=monitoring.wandb_tracker_name,
            name=monitoring.wandb_run_name or folder.resolve().name,
            id=_stored_id(folder, "wandb_id", lambda: uuid.uuid4().hex[:12]),
            dir=str(folder.resolve()),
            config=dict(config),
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            # console capture would wrap the streams of the progress bar
            settings=wandb.Settings(console="off", finish_timeout=_FINISH_SECONDS),
        )
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise UserError(f"{_NO_ACCOUNT} ({_first_line(error)})") from error
    except (wandb.Error, OSError) as error:
        _report_unreachable("wandb", error)
        return None
    return RemoteRun(wandb, run, lambda: run.step, (wandb.Error, OSError))


_NO_ACCOUNT = (
    "monitoring.enable_wandb: wandb has no account to log to; run `wandb login`, or set WANDB_API_KEY, or "
    "WANDB_MODE=offline"
)

# --- trackio ----------------------------------------------------------------------------------


def _open_trackio(monitoring: MonitoringConfig, folder: Path, config: Mapping[str, Any], x_axis: str) -> Tracker | None:
    import trackio

    # the base class of its HTTP client's errors, which depends on the version
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    # trackio identifies runs by name only, so the name must be unique
    base = monitoring.wandb_run_name or folder.resolve().name
    name = _stored_id(folder, "trackio_name", lambda: f"{base}-{uuid.uuid4().hex[:6]}")
    last_step = max(_logged_positions(folder / "log.jsonl", x_axis), default=-1)
    try:
        with redirect_stdout(sys.stderr):  # it prints messages, and stdout is for results
            run = trackio.init(
                project=monitoring.wandb_tracker_name,
                name=name,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except ValueError as error:
        raise UserError(f"monitoring.enable_trackio: {_first_line(error)}") from error
    except (OSError, HTTPError) as error:  # no writable folder, no token, no network
        _report_unreachable("trackio", error)
        return None
    # its log and finish catch most errors themselves; these can still be raised
    return RemoteRun(trackio, run, lambda: last_step, (OSError, HTTPError))


def _logged_positions(path: Path, x_axis: str) -> Iterator[int]:
    """Yield the x of all points that earlier processes logged."""
    if path.is_file():
        yield from (event[x_axis] for event in read_log(path) if event["event"] in CURVE_EVENTS and x_axis in event)


# --- both -------------------------------------------------------------------------------------


def _stored_id(folder: Path, key: str, make: Callable[[], str]) -> str:
    """Return the id that the run folder stores under a key; create it on first use."""
    path = folder / TRACKER_IDS
    ids: dict[str, str] = read_json_file(path) if path.is_file() else {}
    if key not in ids:
        ids[key] = make()
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_unsynced_file(path) as temporary:
            temporary.write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    return ids[key]


def _report_unreachable(name: str, error: Exception) -> None:
    info(f"{name} is not reachable ({_first_line(error)}); training continues without it, log.jsonl is complete")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
