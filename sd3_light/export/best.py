"""The best export of a run: by [metrics], with the link `exports/best` to it, or by the validation loss."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.runlog import info, measured, read_log

BEST = "best"
METRICS_EVENT = "metrics"
_LOWER_IS_BETTER = ("frechet", "kid", "distance")


@dataclass
class BestMeasurement:
    """The best value of a metric so far, its step, and the number of measurements since."""

    metric: str
    value: float | None = None
    step: int = 0
    since: int = 0

    def add(self, step: int, value: float) -> bool:
        """Add a measurement; return whether it is the best."""
        sign = 1 if self.metric in _LOWER_IS_BETTER else -1
        if self.value is not None and sign * value >= sign * self.value:
            self.since += 1
            return False
        self.value = value
        self.step = step
        self.since = 0
        return True

    @staticmethod
    def of_log(log: Path, metric: str, last_step: int) -> "BestMeasurement":
        """Return the best of a run's measurements up to a step. One that was repeated counts as last logged."""
        best = BestMeasurement(metric)
        values = {}
        for event in read_log(log) if log.is_file() else ():
            if event["event"] == METRICS_EVENT and event["step"] <= last_step and event.get(metric):
                values[event["step"]] = float(event[metric]["value"])
        for step in sorted(values):
            best.add(step, values[step])
        return best


def mark_best(export: Path) -> None:
    """Let the link `best` beside the exports point to this one; where links are not possible, print that."""
    link = export.parent / BEST
    temporary = export.parent / f".{BEST}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(export.name, target_is_directory=True)
        os.replace(temporary, link)
    except OSError as error:
        info(f"{link} cannot be written ({error.strerror}); the best export is {export.name}")


def best_name(exports: Path) -> str | None:
    """Return the name of the export that is marked as the best, if there is one."""
    link = exports / BEST
    return os.readlink(link) if link.is_symlink() else None


def restore_best(exports: Path, best: BestMeasurement) -> None:
    """Let the link point to the best export of a resumed run: later ones are abandoned."""
    export = exports / checkpoint_name(best.step)
    if best_name(exports) in (None, export.name):
        return
    if best.value is not None and export.is_dir():
        mark_best(export)
    else:
        (exports / BEST).unlink()


def validation_losses(events: list[dict[str, Any]], weights: Mapping[int, str]) -> dict[int, float]:
    """Return the finite validation losses of a log by step, averaged over the sets, of each step's ``weights``."""
    losses: dict[int, dict[str, float]] = {}
    for event in events:
        if event["event"] == "eval" and weights.get(event["step"]) == event["weights"]:
            losses.setdefault(event["step"], {})[event["set"]] = measured(event, "flow")
    means = {step: mean(sets.values()) for step, sets in losses.items()}
    return {step: loss for step, loss in means.items() if math.isfinite(loss)}
