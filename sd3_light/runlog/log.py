"""`log.jsonl`, the truth about a run: one JSON object a line, only ever appended to; and what mirrors it."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from sd3_light.config.faults import UserError
from sd3_light.runlog.console import info, is_main_process
from sd3_light.runlog.tensorboard import TensorBoard

if TYPE_CHECKING:
    from PIL.Image import Image

NEWLINE = b"\n"
CURVES = ("step", "eval")
"""The events whose numbers are points of curves."""

# where in the run an evaluation stands: its x, and no curve of its own
_POSITION = frozenset(("step", "samples", "skipped", "position", "epoch"))


class Tracker(Protocol):
    """A service that draws curves too."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""

    def image(self, name: str, image: "Image", step: int) -> None:
        """Show a picture under a name."""

    def close(self) -> None:
        """Send what is left."""


class RunLog:
    """The log of a run folder. It is kept by the main process; on other ranks every call does nothing.

    Every line is on disk (in the system's cache) when `event` returns. Lines that find no room on the disk wait in
    memory until there is some, and a mirror that fails is given up: both are said once. What a killed run left of its
    last line is cut off when the log is opened again. `secrets` never get in: they become `***` wherever they occur in
    a text. `x_axis` names the field of "step" and "eval" events that is the x of their curves. Threads may log at once.
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
        # the longest first, or a secret that begins with another would leave its end behind
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._tensorboard = TensorBoard(folder / "tensorboard") if tensorboard else None
        self._mirrors: tuple[Tracker, ...] = (*trackers, *filter(None, [self._tensorboard]))
        self._x_axis = x_axis
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._waiting, self._told = b"", False
        if is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            _repair(self.path)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line `{"event": kind, "time": seconds since 1970, ...fields}`.

        Fields are what JSON knows, and paths, numpy and torch scalars; nan and the infinities become strings, which
        `float` reads back. Numbers of "step" events are mirrored as `train/loss`, nested ones as `train/band/0.0-0.1`,
        those of "eval" events as `eval/SET/WEIGHTS/flow`. "start" and "resume" say by the field of the x axis where
        curves go on: what an earlier process drew beyond it is hidden.
        """
        if self._file is None:
            return
        assert not {"event", "time"} & fields.keys(), fields.keys()
        clean = self._clean(fields)
        line = json.dumps({"event": kind, "time": round(time.time(), 3), **clean}, ensure_ascii=False, allow_nan=False)
        with self._lock:
            self._append(line.encode() + b"\n")
            if kind in CURVES:
                numbers, at = dict(curves(kind, fields, self._x_axis)), _plain(fields[self._x_axis])
                self._mirror(lambda mirror: mirror.log(numbers, step=at))
            elif kind in ("start", "resume") and self._tensorboard is not None and self._x_axis in fields:
                self._tensorboard.begin(_plain(fields[self._x_axis]) + (kind == "resume"))

    def image(self, name: str, image: "Image", **position: Any) -> None:
        """Show a picture to TensorBoard and the trackers, at the x that `position` (step=, samples=) has.

        It adds no line to the log, which holds no pictures: an event tells of its file.
        """
        if self._file is None:
            return
        with self._lock:
            self._mirror(lambda mirror: mirror.image(name, image, step=_plain(position[self._x_axis])))

    def close(self) -> None:
        """Close the log and its mirrors; a second call does nothing."""
        if self._file is None:
            return
        self._append(b"")
        if self._waiting:
            info(f"{self.path} lacks its last {self._waiting.count(NEWLINE)} lines: there was no room for them")
        self._file.close()
        self._file = None
        self._mirror(lambda mirror: mirror.close())

    def _append(self, line: bytes) -> None:
        """Write the line, and before it those that still wait; a full disk keeps them all waiting."""
        assert self._file is not None
        self._waiting += line
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._told:
                info(f"{self.path} cannot be written ({error.strerror}): its lines wait in memory for room on the disk")
            self._told = True
            return
        self._told = False

    def _mirror(self, show: Callable[[Tracker], None]) -> None:
        for mirror in self._mirrors:
            try:
                show(mirror)
            except OSError as error:
                info(f"{type(mirror).__name__} is given up until the run is started again: {error.strerror or error}")
                self._mirrors = tuple(one for one in self._mirrors if one is not mirror)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _clean(self, value: Any) -> Any:
        """The value as JSON takes it, without secrets."""
        if isinstance(value, str | Path):
            text = str(value)
            for secret in self._secrets:
                text = text.replace(secret, "***")
            return text
        if isinstance(value, Mapping):
            return {self._clean(str(key)): self._clean(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean(inner) for inner in value]
        value = _plain(value)
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log, in order; a last line that a killed run left unfinished is passed over.

    Opening a broken log for append repairs it, so a broken line elsewhere is a `UserError`.
    """
    for number, line in log_lines(path):
        yield parse_event(path, number, line)


def log_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a log and their numbers, for a reader that need not know what is in each of them."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such log; give a run folder that training has written to")
    with path.open("rb") as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.endswith(b"\n"))


def parse_event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """What a line of `log_lines` says."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        raise UserError(f"{path}: line {number} is not JSON; remove that line") from None
    return event


def _repair(path: Path) -> None:
    """Cut a log to its last newline."""
    with path.open("r+b") as file:
        data_end = file.seek(0, 2)
        end = data_end
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < data_end:
            file.truncate(end)


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python's."""
    return value.item() if hasattr(value, "item") else value


def curves(kind: str, fields: Mapping[str, Any], x_axis: str = "step") -> Iterator[tuple[str, float]]:
    """The points of an event that is one of `CURVES`: the full name of each curve and its value."""
    if kind == "eval":
        prefix = "/".join(["eval", *(str(fields[name]) for name in ("set", "weights") if name in fields)])
        yield from _numbers(prefix, {name: value for name, value in fields.items() if name not in _POSITION})
    else:
        yield from _numbers("train", {name: value for name, value in fields.items() if name != x_axis})


def _numbers(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers among the fields, nested ones too, by their full names."""
    for key, value in fields.items():
        name = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from _numbers(name, value)
        elif isinstance(plain := _plain(value), int | float) and not isinstance(plain, bool):
            yield name, plain
