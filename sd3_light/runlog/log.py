"""`log.jsonl`, the record of a run: append-only, one JSON object per line; TensorBoard and trackers mirror it."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self

from sd3_light.config.faults import UserError
from sd3_light.files import write_errors
from sd3_light.inputs import TEXT_BYTES, lines_of, open_regular, parse_json, regular_handle
from sd3_light.runlog.console import info, is_main_process
from sd3_light.runlog.tensorboard import TensorBoard

if TYPE_CHECKING:
    from PIL.Image import Image

CURVE_EVENTS = ("step", "eval", "metrics", "reward")
"""The events whose numbers are points of curves."""

_LARGEST = 2**53
_LAST_TIME = 253_402_300_800  # the year 10000 in seconds since 1970, which dates cannot show
# fields that say when an evaluation was made; they are not curves
_POSITION_FIELDS = frozenset(("step", "samples", "skipped", "position", "epoch"))


class Tracker(Protocol):
    """A service that shows curves and images."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""

    def image(self, name: str, image: "Image", step: int) -> None:
        """Add an image under a name."""

    def close(self) -> None:
        """Send pending data."""


class RunLog:
    """The log of a run folder, written by the main process; on other ranks every call does nothing.

    A line is written (to the system's cache) when `event` returns. While the disk is full, lines wait in memory, and a
    mirror that fails is disabled; each is reported once. When a log is opened again, the incomplete last line of a
    killed run is removed. `secrets` are replaced by `***` in every text. `x_axis` names the field of
    `CURVE_EVENTS` that is the x of their curves. Several threads may log at the same time.
    """

    def __init__(
        self,
        folder: Path,
        tensorboard: bool = True,
        trackers: Sequence[Tracker] = (),
        secrets: Sequence[str] = (),
        x_axis: str = "step",
    ):
        self.path = folder / "log.jsonl"
        # the longest first: otherwise a secret that starts with another one would leave its end
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._tensorboard = TensorBoard(folder / "tensorboard") if tensorboard else None
        self._mirrors: tuple[Tracker, ...] = (*trackers, *filter(None, [self._tensorboard]))
        self._x_axis = x_axis
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._pending = b""
        self._is_full = False
        if is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
            with write_errors(self.path):
                self._file = open(self.path, "ab", buffering=0, opener=regular_handle)  # noqa: SIM115
            _repair(self.path)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line `{"event": kind, "time": seconds since 1970, ...fields}`.

        Fields are JSON values, paths, or scalars of numpy and torch; nan and the infinities become strings, which
        `float` parses. Numbers of "step" events are mirrored as `train/loss`, nested ones as `train/band/0.0-0.1`,
        those of "eval" events as `eval/SET/WEIGHTS/flow`, of "metrics" as `metrics/SET/WEIGHTS/kid/value`. "start" and
        "resume" have the x from which curves continue: TensorBoard hides what an earlier process logged beyond it.
        """
        if self._file is None:
            return
        assert not {"event", "time"} & fields.keys(), fields.keys()
        clean = self._clean(fields)
        line = json.dumps({"event": kind, "time": round(time.time(), 3), **clean}, ensure_ascii=False, allow_nan=False)
        with self._lock:
            self._append(line.encode() + b"\n")
            if kind in CURVE_EVENTS:
                points = dict(curve_points(kind, fields, self._x_axis))
                x = _to_python(fields[self._x_axis])
                self._mirror(lambda mirror: mirror.log(points, step=x))
            elif kind in ("start", "resume") and self._tensorboard is not None and self._x_axis in fields:
                self._tensorboard.begin(_to_python(fields[self._x_axis]) + (kind == "resume"))

    def image(self, name: str, image: "Image", **position: Any) -> None:
        """Send an image to TensorBoard and the trackers only; `position` (step=, samples=) has its x."""
        if self._file is None:
            return
        with self._lock:
            self._mirror(lambda mirror: mirror.image(name, image, step=_to_python(position[self._x_axis])))

    def close(self) -> None:
        """Close the log and its mirrors; a second call does nothing."""
        if self._file is None:
            return
        self._append(b"")
        if self._pending:
            info(f"{self.path}: no space for the last lines, {len(self._pending.splitlines())} lost")
        self._file.close()
        self._file = None
        self._mirror(lambda mirror: mirror.close())

    def _append(self, line: bytes) -> None:
        """Write the pending lines and this one; on a full disk all of them stay pending."""
        assert self._file is not None
        self._pending += line
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if not self._is_full:
                info(f"cannot write {self.path} ({error.strerror}); lines stay in memory until there is space")
            self._is_full = True
            return
        self._is_full = False

    def _mirror(self, send: Callable[[Tracker], None]) -> None:
        for mirror in self._mirrors:
            try:
                send(mirror)
            except OSError as error:
                info(f"{type(mirror).__name__} failed and is disabled until the next start: {error.strerror or error}")
                self._mirrors = tuple(other for other in self._mirrors if other is not mirror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _clean(self, value: Any) -> Any:
        """Return the value as JSON accepts it, without secrets."""
        if isinstance(value, str | Path):
            text = str(value)
            for secret in self._secrets:
                text = text.replace(secret, "***")
            return text
        if isinstance(value, Mapping):
            return {self._clean(str(key)): self._clean(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean(inner) for inner in value]
        value = _to_python(value)
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log in order, without an incomplete last line; other invalid lines are a UserError."""
    with open_log(path) as file:
        for number, line in complete_lines(file):
            yield parse_event(path, number, line)


def open_log(path: Path) -> BufferedReader:
    """Open a log for reading. Raises UserError where there is none."""
    if not path.is_file():
        raise UserError(f"{path}: no such log; pass a run folder that training has written to")
    return open_regular(path)


def complete_lines(file: BinaryIO, first: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open log from its position on, with numbers from ``first``, without an incomplete one.

    Raises UserError for a line that is too long for a log.
    """
    try:
        for number, line in enumerate(lines_of(file), start=first):
            if not line.endswith(b"\n"):
                return  # the run writes it now; the next read would get its end alone
            yield number, line
    except ValueError as error:
        raise UserError(f"the log is damaged: {error}; remove that line") from error


def parse_event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the event of a line; raise UserError where it is not JSON."""
    try:
        event = parse_json(line)
    except ValueError:
        raise UserError(f"{path}: line {number} is not JSON; remove that line") from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise UserError(f"{path}: line {number} is not an event; remove that line")
    rules = _METRICS_RULES if event["event"] == "metrics" else _FIELD_RULES
    for name, value in event.items():
        is_valid, kind = rules.get(name, _ANY)
        if not is_valid(value):
            raise UserError(f"{path}: line {number}: {name} is not {kind}; remove that line")
    return event


def measured(event: Mapping[str, Any], name: str) -> float:
    """Return a measurement of an event; nan where it is missing."""
    value = event.get(name)
    return math.nan if value is None else float(value)


def _is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_whole_number(value: Any) -> bool:
    return _is_finite_number(value) and value == int(value)


def _is_time(value: Any) -> bool:
    return _is_finite_number(value) and 0 <= value < _LAST_TIME


def _is_logged_float(value: Any) -> bool:  # nan and the infinities of measurements are logged as strings
    return type(value) is float or _is_finite_number(value) or value in ("nan", "inf", "-inf", None)


def _are_logged_floats(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_logged_float, value.values()))


def _is_metric(value: Any) -> bool:  # null: not measured
    return value is None or _are_logged_floats(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_ANY = (lambda value: True, "")
LOSS_TERMS = {
    "flow": "flow",
    "dpo": "preference",
    "distill": "distillation",
    "text_recon": "text reconstruction",
    "layer_sync": "layer sync",
    "alignment": "alignment",
    "reward": "reward loss",
    "kl": "distance from the start",
}
"""The terms of the loss in a step's event, and the titles of their curves."""
MEASUREMENTS = (
    *("loss", *LOSS_TERMS, "fixed", "lr", "grad_norm", "param_norm", "samples_per_second"),
    *(
        "data_wait",
        "mfu",
        "tflops_per_gpu",
        "gpu_memory_gib",
        "gpu_reserved_gib",
        "host_memory_gib",
        "seconds",
        "host_bound",
    ),
    *("stall_seconds", "epoch", "flow_se", "fixed_se"),
    *(f"{name}@0.{tenth}" for name in ("flow", "fixed") for tenth in range(1, 10)),
)
"""The fields that are measured numbers: nan, the infinities and null are valid."""
REWARD_FIELDS = ("reward", "reward_deviation", "diversity", "distance", "draw_seconds", "draw_share")
"""The measurements of a draw for [reward]."""
METRIC_GROUPS = ("frechet", "kid", "precision", "recall", "retrieval", "distance")
"""The measurements of [metrics], each with value, low and high."""
_FIELD_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "time": (_is_time, "a time in seconds since 1970"),
    **dict.fromkeys(("step", "samples", "total", "skipped", "world", "bytes"), (_is_whole_number, "a whole number")),
    **dict.fromkeys((*MEASUREMENTS, *REWARD_FIELDS), (_is_logged_float, "a number")),
    **dict.fromkeys(("band", "ema_decay", "host_seconds"), (_are_logged_floats, "a table of numbers")),
    **dict.fromkeys(("weights", "set", "file", "reason", "engine", "device"), (_is_text, "a text")),
}
_METRICS_RULES = {**_FIELD_RULES, **dict.fromkeys(METRIC_GROUPS, (_is_metric, "a table of numbers"))}


def _repair(path: Path) -> None:
    """Truncate a log after its last newline."""
    with open(path, "r+b", opener=regular_handle) as file:
        start = max(0, file.seek(0, os.SEEK_END) - TEXT_BYTES)
        file.seek(start)
        end = file.read().rfind(b"\n") + 1
        if start and not end:
            raise UserError(
                f"{path} is not a log: its last line has more than {TEXT_BYTES >> 20} MiB; remove that line"
            )
        file.truncate(start + end)


def _to_python(value: Any) -> Any:
    """Return scalars of numpy and torch as Python numbers; other values unchanged."""
    return value.item() if hasattr(value, "item") else value


def curve_points(kind: str, fields: Mapping[str, Any], x_axis: str = "step") -> Iterator[tuple[str, float]]:
    """Yield the full name and value of each curve of an event in `CURVE_EVENTS`."""
    if kind != "step":
        prefix = "/".join([kind, *(str(fields[name]) for name in ("set", "weights") if name in fields)])
        yield from _numbers(prefix, {name: value for name, value in fields.items() if name not in _POSITION_FIELDS})
    else:
        yield from _numbers("train", {name: value for name, value in fields.items() if name != x_axis})


def _numbers(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers among the fields, nested ones too, with their full names."""
    for key, value in fields.items():
        name = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from _numbers(name, value)
        elif isinstance(number := _to_python(value), int | float) and not isinstance(number, bool):
            yield name, number
