"""The disk space that a run and its cache need, compared with what is free; `check`, training and caching share it."""

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sd3_light.config import TrainConfig
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.gpu_memory import checkpoint_copy_bytes
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.formats import plural

DOES_NOT_FIT = "does not fit"
CACHE_REMEDY = "cache_dir"
RUN_REMEDY = "output_dir, or a lower keep_last_n_checkpoints"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a weight."""


@dataclass(frozen=True)
class RunSteps:
    """The length of a run, of its epochs, and the samples of its largest step."""

    total: int
    per_epoch: int
    samples: int


def run_disk(train: TrainConfig, setup: TrainingSetup, steps: RunSteps) -> tuple[int, str]:
    """Return the most bytes that a run's checkpoints and exports take at a time, and a text with their numbers."""
    checkpoint = _checkpoint_bytes(setup)
    export = export_bytes(train, setup)
    checkpoints = _num_checkpoints(train, steps)
    exports = _num_exports(train, steps)
    total = checkpoints * checkpoint + exports * export
    parts = f"{plural(checkpoints, 'checkpoint')} of {format_bytes(checkpoint)}"
    parts += f", {plural(exports, 'export')} of {format_bytes(export)}"
    return total, f"{format_bytes(total)}: {parts}"


def compare_with_free(needed: int, folder: Path, text: str, remedy: str, used: int | None = None) -> str:
    """Say whether what a folder will hold fits into the free space and the bytes ``used`` by files that it replaces.

    By default all files in the folder count as used. ``text`` describes what is needed.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    free = shutil.disk_usage(existing).free
    used = _bytes_in(folder) if used is None else used
    fits = needed <= free + used
    text = f"{'fits' if fits else DOES_NOT_FIT}: {text}; {format_bytes(free)} are free"
    if used:
        text += f" and {format_bytes(used)} already written"
    return text if fits else f"{text}; choose another {remedy}"


def _bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder, without links to files elsewhere."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a running run replaces its files
                file = os.lstat(os.path.join(place, name))
                total += file.st_size if stat.S_ISREG(file.st_mode) and file.st_nlink == 1 else 0
    return total


def _checkpoint_bytes(setup: TrainingSetup) -> int:
    """Return the size of one checkpoint of all processes together."""
    whole = replace(setup, world_size=1, parallel="ddp", deepspeed=False, stages=1, bounds=())
    return checkpoint_copy_bytes(whole).value


def export_bytes(train: TrainConfig, setup: TrainingSetup) -> int:
    """Return the size of an export without the parts that are links to the base model's."""
    trained = setup.cost.parameters if setup.adapter is None else sum(setup.adapter)
    return trained * DTYPE_BYTES[train.save_dtype]


def _num_checkpoints(train: TrainConfig, steps: RunSteps) -> int:
    """Return the most checkpoints that exist at a time: those that are kept and the one being written."""
    due = _times_due(steps, train.checkpoint_every_n_steps, train.checkpoint_every_n_epochs)
    kept = train.keep_last_n_checkpoints
    return due if kept == 0 else min(due, kept + 1) if train.checkpoint_every_n_minutes is None else kept + 1


def _num_exports(train: TrainConfig, steps: RunSteps) -> int:
    """Return the most exports that exist at a time."""
    examples = train.save_every_n_examples
    by_examples = None if examples is None else max(1, examples // steps.samples)
    due = _times_due(steps, train.save_every_n_steps, train.save_every_n_epochs, by_examples)
    best = int(train.has_evaluations) + int(train.metrics is not None)  # they are kept too
    return min(due, train.keep_last_n_exports + 1 + best) if train.keep_last_n_exports else due


def _times_due(steps: RunSteps, interval: int | None, epochs: int | None, more: int | None = None) -> int:
    """Return how often something is due, the last step included."""
    total = steps.total
    intervals = [interval, None if epochs is None else epochs * steps.per_epoch, more]
    count = sum(total // each for each in intervals if each)
    return max(1, count + any(total % each > 0 for each in intervals if each))
