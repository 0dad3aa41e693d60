"""The new stage: write the train and dataset TOMLs of a project, fitted to its data, its model and a GPU.

The files are the shipped recipes with other values. Sizes come from the estimate of `check`.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults, LoadedConfig
from sd3_light.config.base import is_url
from sd3_light.config.faults import UserError
from sd3_light.config.hub_ids import SCHEME, parse_hub_id
from sd3_light.core.family import Family
from sd3_light.core.registry import family_of_folder
from sd3_light.cost.throughput import cpu_seconds, measured_blocks, training_seconds
from sd3_light.files import write_atomically
from sd3_light.model.part_configs import read_config
from sd3_light.new.kinds import KINDS, Kind
from sd3_light.new.memory_plan import MemoryPlan, plan_memory
from sd3_light.new.project_text import TextValues, data_toml, train_toml
from sd3_light.sources.records import Rejected
from sd3_light.sources.scan import scan
from sd3_light.system import Gpu, usable_cores

__all__ = ["KINDS", "NewProject", "run"]

_PROMPTS = 4
_SCANNED = 200  # samples that are read for prompts
_FEWEST = 100  # steps on a CPU, however slow it is
_SMALLEST = 64  # a resolution that every model accepts
_LENGTH = "model.t5_max_length"


@dataclass(frozen=True)
class NewProject:
    """The files that were written, and what they were fitted to."""

    train_toml: Path
    data_toml: Path
    run: Path
    images: int
    steps: int
    resolution: int
    plan: MemoryPlan
    seconds: float | None
    """Estimated training time; None for a kind of GPU that was not measured."""
    has_clips: bool = False
    """Whether ``images`` may be clips."""
    held_out: int = 0
    """About how many of ``images`` are held out for validation."""


def run(
    kind_name: str,
    data: str,
    model: str | None = None,
    out: Path = Path(),
    resolution: int | None = None,
    gpus: tuple[Gpu, ...] = (),
    validation: bool = True,
) -> NewProject:
    """Write KIND.toml and KIND_data.toml into ``out``, for one process per GPU (none: a CPU).

    With ``validation`` a part of the images is held out.
    """
    kind = KINDS[kind_name]
    if kind_name == "icons" and model is None:
        raise UserError(
            f"--model is missing: `sd3-light parts {data} parts` trains the encoders on your images (then --model "
            f"parts), or give --model {kind.model} to download those of SD3"
        )
    train_file, data_file = out / f"{kind_name}.toml", out / f"{kind_name}_data.toml"
    for path in (train_file, data_file):
        if path.exists():
            raise UserError(f"{path} exists; choose another folder with --out")
    source, base = _located(data), _located(model or kind.model)
    if not kind.continues and Path(base).is_dir():
        _require_random_start(family_of_folder(Path(base)), base)
    processes = max(1, len(gpus))
    cpu = None if gpus else kind.cpu
    first = TextValues(kind_name, source, base, _SMALLEST, MemoryPlan(1, 1, False, processes))
    first = replace(first, layers=None if cpu is None else cpu.layers, validation=validation)
    with TemporaryDirectory() as folder:
        loaded = _load_first(kind, first, Path(folder))
        family = family_of_folder(loaded.train.model.diffusers_path)
        keys = family.recipe(loaded.train.model.diffusers_path)
        values = replace(first, keys=keys, family=family.title)
        loaded = _load(kind, values, Path(folder))  # which may read videos
        values = replace(values, prompts=tuple(_prompts(loaded)))  # sampling takes memory too
        values = _fitted(values, loaded.train.model.diffusers_path, kind, resolution)
        loaded = _load(kind, values, Path(folder))
        try:
            estimate = check.run(loaded, processes)
        except ConfigFaults as error:
            raise _about_options(error) from None
    plan = plan_memory(estimate, loaded.train, kind, gpus)
    epoch_steps = sum(math.ceil(row.samples / plan.samples_per_step) for row in estimate.data.rows)
    step_seconds = _step_seconds(estimate, plan, gpus)
    affordable = max(_FEWEST, int(60 * cpu.minutes / step_seconds)) if cpu and step_seconds else None
    values = replace(values, plan=plan, epoch_steps=epoch_steps, affordable=affordable, images=estimate.data.samples)
    values = replace(values, data=_relative(source, out), model=_relative(base, out))
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(data_file, data_toml(kind, values).encode())
    write_atomically(train_file, train_toml(kind, values).encode())
    images, steps = estimate.data.samples, kind.steps(epoch_steps, affordable)
    seconds = step_seconds and steps * step_seconds
    project = NewProject(
        train_file, data_file, out / "runs" / kind_name, images, steps, values.resolution, plan, seconds
    )
    return replace(project, has_clips=family.media == "video", held_out=estimate.data.held_out)


def _step_seconds(estimate: check.RunEstimate, plan: MemoryPlan, gpus: tuple[Gpu, ...]) -> float | None:
    """Return the estimated time of an optimizer step; None for a kind of GPU that was not measured."""
    images = sum(row.samples for row in estimate.data.rows)
    epoch_flops = sum(row.samples * row.step_flops.value / row.global_batch for row in estimate.data.rows)
    flops = plan.samples_per_step * epoch_flops / images
    if not gpus:
        return cpu_seconds(flops, usable_cores())
    setup = estimate.setup
    blocks = measured_blocks(setup.block_kind, setup.adapter is not None)
    layers = setup.cost.num_blocks
    return training_seconds(gpus[0].name, blocks, flops, plan.accumulation, layers, plan.processes, setup.graphs)


def _located(value: str) -> str:
    """Return an absolute path; URLs and ids of the hub stay as they are."""
    is_name = value.count("/") == 1 and value[0] not in "./~" and parse_hub_id(SCHEME + value) is not None
    if is_url(value) or (is_name and not Path(value).exists()):
        return value
    return os.path.abspath(Path(value).expanduser())


def _relative(value: str, out: Path) -> str:
    """Return a path below ``out`` relative to it, so that the project can be moved."""
    path, folder = Path(value), Path(os.path.abspath(out))
    return str(path.relative_to(folder)) if path.is_absolute() and path.is_relative_to(folder) else value


def _load(kind: Kind, values: TextValues, folder: Path) -> LoadedConfig:
    """Write the files into a temporary folder, and load and check them; the model is downloaded if needed."""
    (folder / f"{values.name}_data.toml").write_text(data_toml(kind, values), encoding="utf-8")
    path = folder / f"{values.name}.toml"
    path.write_text(train_toml(kind, values), encoding="utf-8")
    try:
        return check.load(path)
    except ConfigFaults as error:
        raise _about_options(error) from None


def _require_random_start(family: Family, model: str) -> None:
    """Raise UserError if a family is not trained from random weights."""
    if not family.starts_random:
        kinds = "`new lora` and `new finetune` continue" if family.loads_adapters else "`new finetune` continues"
        raise UserError(f"--model {model}: {family.title} is not trained from random weights; {kinds} its own")


def _load_first(kind: Kind, values: TextValues, folder: Path) -> LoadedConfig:
    """Load the recipe with the smallest values, without the keys of SD3 if the model turns out to be another one."""
    try:
        return _load(kind, values, folder)
    except ConfigFaults as error:
        if not kind.continues or all(fault.key != _LENGTH for fault in error.faults):
            raise
    return _load(kind, replace(values, keys={_LENGTH: None}), folder)


def _about_options(error: ConfigFaults) -> ConfigFaults:
    """Return the faults with the options that cause them in place of the temporary files."""
    options = {"model.diffusers_path": "--model", "directory[0].path": "--data", "directory": "--data"}
    faults = [replace(fault, file=options.get(fault.key, "new")) for fault in error.faults]
    # that hint is about paths in a TOML; those of options start where the command runs
    return ConfigFaults([replace(fault, hint=None) if fault.hint == check.PATH_HINT else fault for fault in faults])


def _fitted(values: TextValues, model: Path, kind: Kind, resolution: int | None) -> TextValues:
    """Return values that fit a model: the length of its T5 input, its shift, and the size it was trained at."""
    checks = family_of_folder(model).checks
    t5_length = min(kind.t5_length, checks.text_limit(model) or kind.t5_length)
    shift = float(read_config(model / "scheduler", "scheduler").get("shift", 1.0))
    if resolution is None and kind.continues:
        resolution = min(kind.resolution, checks.trained_side(model))
    return replace(values, t5_length=t5_length, shift=shift, resolution=resolution or kind.resolution)


def _prompts(loaded: LoadedConfig) -> Iterator[str]:
    """Yield the captions of some images, as prompts for sample images."""
    captions = {
        item.captions[0]: None
        for item in islice(scan(loaded.dataset.directories[0], 0), _SCANNED)
        if not isinstance(item, Rejected) and item.captions[0].strip()
    }
    distance = max(1, len(captions) // _PROMPTS)
    yield from islice(list(captions)[::distance], _PROMPTS)
