"""The new stage: write the train and dataset TOMLs of a project, fitted to its data, its model and a GPU.

The files are the shipped recipes with other values. Sizes come from the estimate of `check`.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults, LoadedConfig
from sd3_light.config.base import is_url
from sd3_light.config.faults import UserError
from sd3_light.config.hub_ids import SCHEME, parse_hub_id
from sd3_light.core.caption_lengths import short_captions
from sd3_light.core.family import Family
from sd3_light.core.registry import family_of_folder
from sd3_light.cost.throughput import CPU_CORE_FLOPS, measured_blocks
from sd3_light.files import write_atomically
from sd3_light.formats import plural
from sd3_light.model.folder import JUDGE
from sd3_light.model.part_configs import read_config
from sd3_light.new.kinds import KINDS, Kind
from sd3_light.new.memory_choice import MemoryChoice, choose_memory
from sd3_light.new.project_text import TextValues, data_toml, prompts_file, train_toml
from sd3_light.new.prompts import sample_prompts
from sd3_light.system import Gpu, usable_cores

__all__ = ["KINDS", "NewProject", "conclude", "files", "prepare", "run"]

_DROPOUT = "model.enable_uncond_text_dropout"
_SEEN = {"model.references": 1}  # of edits, for a family whose config says how many images it sees
_STAND_IN = ("a prompt",)
_FEWEST = 100  # steps on a CPU, however slow it is
_MOST_EPOCHS = 200  # of pretraining
_SMALLEST = 64  # a resolution, and a step of sides, that every model accepts
_LENGTH = "model.t5_max_length"


@dataclass(frozen=True)
class NewProject:
    """The files of a project, by their paths, and what they were fitted to.

    ``images`` may be clips if it ``has_clips``; about ``held_out`` of them are for validation. ``time`` is that of
    all steps, ``notes`` are sentences about what the family offers and what the data lacks. ``texts`` of the train and
    dataset TOMLs name data and model from the project's folder; ``located`` ones have whole paths.
    """

    train_toml: Path
    data_toml: Path
    run: Path
    images: int
    steps: int
    resolution: int
    memory: MemoryChoice
    time: str
    has_clips: bool = False
    held_out: int = 0
    notes: tuple[str, ...] = ()
    texts: tuple[str, str] = ("", "")
    located: tuple[str, str] = ("", "")
    gpus: tuple[Gpu, ...] = ()
    cpu_speed: float | None = None
    prompts: tuple[Path, str] | None = None
    """The file of prompts, for a kind that draws images."""


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
    project = prepare(kind_name, data, model, out, resolution, gpus, validation)
    out.mkdir(parents=True, exist_ok=True)
    for path, text in reversed(files(project)):
        write_atomically(path, text.encode())
    return project


def files(project: NewProject) -> list[tuple[Path, str]]:
    """Return the files of a project: the train TOML, and those that it names."""
    tomls = list(zip((project.train_toml, project.data_toml), project.texts, strict=True))
    return tomls if project.prompts is None else [*tomls, project.prompts]


def prepare(
    kind_name: str,
    data: str,
    model: str | None = None,
    out: Path = Path(),
    resolution: int | None = None,
    gpus: tuple[Gpu, ...] = (),
    validation: bool = True,
) -> NewProject:
    """Return the project that `run` writes; nothing is written."""
    if kind_name not in KINDS:
        raise UserError(f"unknown kind {kind_name!r}; the kinds are {', '.join(KINDS)}")
    kind = KINDS[kind_name]
    if kind_name == "icons" and model is None:
        raise UserError(
            f"--model is missing: `sd3-light parts {data} parts` trains the encoders on your images (then --model "
            f"parts), or give --model {kind.model} to download those of SD3"
        )
    train_file = out / f"{kind_name}.toml"
    data_file = out / f"{kind_name}_data.toml"
    for path in (train_file, data_file, *([out / f"{kind_name}_prompts.txt"] if kind.draws else [])):
        if path.exists():
            raise UserError(f"{path} exists; choose another folder with --out")
    source = _located(data)
    base = _located(model or kind.model)
    if not kind.continues and Path(base).is_dir():
        _require_random_start(family_of_folder(Path(base)), base)
    first = TextValues(kind_name, source, base, _SMALLEST, MemoryChoice(1, 1, False, max(1, len(gpus))))
    first = replace(first, layers=None if gpus or kind.cpu is None else kind.cpu.layers, validation=validation)
    first = replace(first, keys={"side_step": _SMALLEST})
    with TemporaryDirectory() as folder:
        project = _fit(kind, first, Path(folder), resolution, gpus)
    kind = project.kind
    values = project.values
    family = project.family
    written = replace(values, data=_relative(source, out), model=_relative(base, out))
    return NewProject(
        train_file,
        data_file,
        out / "runs" / kind_name,
        project.estimate.data.samples,
        project.steps,
        values.resolution,
        values.memory,
        project.work.time_on(gpus[0]) if gpus else project.work.time_on_cpu(project.cpu_speed),
        has_clips=family.media == "video",
        held_out=project.estimate.data.held_out,
        notes=tuple(_notes(project)),
        texts=(train_toml(kind, written), data_toml(kind, written)),
        located=(train_toml(kind, values), data_toml(kind, values)),
        gpus=gpus,
        cpu_speed=project.cpu_speed,
        prompts=(out / prompts_file(values), _lines(values.drawn).decode()) if kind.draws else None,
    )


def conclude(project: NewProject, elsewhere: bool = False) -> list[tuple[str, str]]:
    """Return what `check` concludes about a project that is not written yet; ``elsewhere``: on another machine."""
    out = Path(os.path.abspath(project.run))
    overrides = [f"output_dir={json.dumps(str(out))}"]
    overrides.append(f"cache_dir={json.dumps(os.path.abspath(project.data_toml.with_suffix('.cache')))}")
    with TemporaryDirectory() as folder:
        located = dict(zip((project.train_toml, project.data_toml), project.located, strict=True))
        for path, text in files(project):
            (Path(folder) / path.name).write_text(located.get(path, text), encoding="utf-8")
        loaded = check.load(Path(folder) / project.train_toml.name, overrides)
        estimate = check.run(loaded, project.memory.processes)
        gpu = project.gpus[0] if project.gpus else None
        target = check.Target(gpu, gpu is None, elsewhere, project.cpu_speed)
        return check.conclude(loaded.train, estimate, target)


@dataclass(frozen=True)
class _Fitted:
    """A project before it is written: a kind with a batch for the data, the values of the files, and the estimate."""

    kind: Kind
    values: TextValues
    family: Family
    estimate: check.RunEstimate
    cpu_speed: float | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.kind.steps(self.values.epoch_steps, self.values.affordable)

    @property
    def work(self) -> check.Work:
        """All steps of the run."""
        return self.work_of(self.steps)

    def work_of(self, steps: int) -> check.Work:
        """Return what a number of steps computes."""
        rows = self.estimate.data.rows
        memory = self.values.memory
        setup = self.estimate.setup
        epoch_flops = sum(row.samples * row.step_flops.value / row.global_batch for row in rows)
        flops = steps * memory.samples_per_step * epoch_flops / sum(row.samples for row in rows)
        blocks = setup.cost.num_blocks
        at_most = setup.cost.text.at_most
        kind = measured_blocks(setup.block_kind, setup.adapter is not None)
        micro_batches = steps * memory.accumulation
        return check.Work(flops, micro_batches, kind, blocks, memory.processes, setup.graphs, at_most)


def _fit(kind: Kind, first: TextValues, folder: Path, resolution: int | None, gpus: tuple[Gpu, ...]) -> _Fitted:
    """Return the project with values that fit its data, its model and the GPUs; ``folder`` is temporary."""
    seen = _SEEN if kind.references else {}
    loaded = _load_first(kind, replace(first, keys={**first.keys, **seen}), folder)
    model = loaded.train.model.diffusers_path
    family = family_of_folder(model)
    keys = dict(family.recipe(model))
    if kind.pads_for_others and not (model / JUDGE).is_dir():
        keys |= {"model.text_tokens": "padded", "model.dtype": "bfloat16"}
    if family.sets_references:
        keys |= seen
    prompts = _drawn(family, _STAND_IN)  # sampling takes memory too
    values = replace(first, keys=keys, family=family.title, prompts=prompts)
    values = _fitted(values, model, kind, resolution)
    loaded, estimate = _estimated(kind, values, folder)
    if kind.continues and not kind.draws:
        kind = kind.with_fair_batch([row.samples for row in estimate.data.rows])
    memory = choose_memory(estimate, loaded.train, kind, gpus)
    if kind.smaller_size is not None and not memory.is_roomy:
        values = replace(values, size=kind.smaller_size)
        loaded, estimate = _estimated(kind, values, folder)
        memory = choose_memory(estimate, loaded.train, kind, gpus)
    speed = None if gpus else check.cpu_speed(loaded, (), estimate, memory.micro_batch)
    data = estimate.data
    kept = 1 - data.held_out / max(1, data.samples)
    trained = [max(1, round(kept * row.samples)) for row in data.rows]
    epoch_steps = sum(math.ceil(samples / memory.samples_per_step) for samples in trained)
    prompts = _drawn(family, sample_prompts(data.captions, kind.continues))
    values = replace(values, memory=memory, epoch_steps=epoch_steps, prompts=prompts, images=data.samples)
    values = replace(values, drawn=tuple(dict.fromkeys(" ".join(text.split()) for text in data.captions)))
    project = _Fitted(kind, values, family, estimate, speed)
    if gpus or kind.cpu is None:
        return project
    step = project.work_of(1).flops / (speed or CPU_CORE_FLOPS * usable_cores())
    return replace(project, values=replace(values, affordable=max(_FEWEST, int(60 * kind.cpu.minutes / step))))


def _drawn(family: Family, prompts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the prompts of sample images; none where each needs an image of the user's."""
    return () if family.texts_see_references else prompts


def _located(value: str) -> str:
    """Return an absolute path; URLs and ids of the hub stay as they are."""
    is_name = value.count("/") == 1 and value[0] not in "./~" and parse_hub_id(SCHEME + value) is not None
    if is_url(value) or (is_name and not Path(value).exists()):
        return value
    return os.path.abspath(Path(value).expanduser())


def _lines(texts: Sequence[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def _relative(value: str, out: Path) -> str:
    """Return a path below ``out`` relative to it, so that the project can be moved."""
    path = Path(value)
    folder = Path(os.path.abspath(out))
    return str(path.relative_to(folder)) if path.is_absolute() and path.is_relative_to(folder) else value


def _load(kind: Kind, values: TextValues, folder: Path) -> LoadedConfig:
    """Write the files into a temporary folder, and load and check them; the model is downloaded if needed."""
    (folder / f"{values.name}_data.toml").write_text(data_toml(kind, values), encoding="utf-8")
    if kind.draws:
        (folder / prompts_file(values)).write_bytes(_lines(values.drawn or _STAND_IN))
    path = folder / f"{values.name}.toml"
    path.write_text(train_toml(kind, values), encoding="utf-8")
    try:
        return check.load(path)
    except ConfigFaults as error:
        raise _about_options(error) from None


def _estimated(kind: Kind, values: TextValues, folder: Path) -> tuple[LoadedConfig, check.RunEstimate]:
    """Load a project and estimate it."""
    loaded = _load(kind, values, folder)
    try:
        return loaded, check.run(loaded, values.memory.processes)
    except ConfigFaults as error:
        raise _about_options(error) from None


def _notes(project: _Fitted) -> Iterator[str]:
    """Yield what the family offers against forgetting and for its text encoders, and what the data lacks."""
    kind = project.kind
    data = project.estimate.data
    memory = project.values.memory
    if kind.draws:
        drawn = f"{len(project.values.drawn):,} captions"
        yield f"prompts: {drawn}; edit reward.score, and the prompts (docs/reference/rewards.md)"
    elif kind.continues:
        title = project.family.title
        yield f"prior preservation: available for {title}; add a [[directory]] of class images (docs/start/finetune.md)"
        yield f"text encoders: not trained for {title}, because the cache holds their outputs"
    if memory.samples_per_step > kind.batch:
        yield (
            f"{plural(memory.processes, 'GPU')} train {memory.samples_per_step} samples per step, and images of small "
            "buckets are repeated to fill them: train on fewer GPUs, or give more images of these shapes"
        )
    epochs = project.steps / project.values.epoch_steps
    if kind.smaller_size is not None and epochs > _MOST_EPOCHS:
        yield (
            f"warning: {data.samples:,} images are too few for random weights of this size, which see each of them "
            f"{epochs:,.0f} times; give more images, or continue a model with `new finetune`"
        )
    enlarged = sum(row.enlarged for row in data.rows)
    if 2 * enlarged > sum(row.samples for row in data.rows):
        yield (
            f"warning: {enlarged:,} of {data.samples:,} images are smaller than {project.values.resolution} px and are "
            "enlarged; a smaller --resolution trains at their size"
        )
    if not kind.continues and (sentence := short_captions(data.captions, project.values.resolution)):
        yield f"warning: {sentence}"


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
        unknown = {fault.key for fault in error.faults} & {_LENGTH, _DROPOUT, *_SEEN}
    return _load(kind, replace(values, keys={**values.keys, **dict.fromkeys(unknown)}), folder)


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
