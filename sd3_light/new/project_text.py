"""The text of a new project's TOMLs: a recipe with other values, in which the comments stay."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sd3_light.config.toml_text import format_toml
from sd3_light.cost.amount import format_bytes
from sd3_light.data.split import expected_split
from sd3_light.formats import plural
from sd3_light.new.kinds import Kind
from sd3_light.new.memory_choice import MemoryChoice
from sd3_light.optim.power_function import ramped_decay
from sd3_light.recipes import FOLDER

_HEAD = """# Trains {description}.
#
#   sd3-light check {name}.toml     memory, time, disk
#   sd3-light train {name}.toml     encode the images once, then train
#
# Every key is documented in docs/reference/config.md.
"""
_SD3 = "SD3 or SD3.5"
_COMMENTS = {
    "model.shift": "as in the model's scheduler",
    "model.flux_shift": "as in the model's scheduler, by its resolution",
    "model.text_max_length": "tokens",
    "model.text_tokens": 'as other programs pad prompts; "real" trains faster, and they then draw other images',
    "model.dtype": "of the encoders",
    "model.references": "images that the model sees beside the text",
    "model.guidance": "of the distilled denoiser, as is usual; not measured",
    "objective.distill.guidance": "the denoiser takes model.guidance as a number, without a second pass",
}
_REASONED = ("model.text_tokens",)  # the recipe's comments explain its value
_RELEASE: dict[str, tuple[Any, str]] = {
    "gradient_clipping": (0.0, "gradient_release frees gradients one by one"),
    "gradient_release": (True, "update weights in the backward pass"),
    "optimizer.type": ("adamw8bit", "moments in 8 bits"),
}  # see `MemoryChoice.release`
_FEW_IMAGES = 50
_PASSES = 9  # over the held-out images, for the raw weights and for each average; as many with eval_at_fixed_t
_EVALUATION_SHARE = 0.15  # of the FLOPs of training, at most
_EVALUATED = "of the validation loss; `--best` of the other commands uses it"
_CLIP_KEYS = {
    "frames": "of the longest clip; a shorter video gives a shorter one, an image one frame",
    "fps": "frames per second, as the model was trained with",
}  # of the dataset TOML


_PROMPTS_PER_DRAW = 8
_EXPORT_STEPS = 100  # a shorter run exports its last step alone


@dataclass(frozen=True)
class TextValues:
    """The values of a project: its name, data and model as written, and what they were fitted to.

    ``affordable`` steps and ``layers`` (and heads) of the denoiser replace those of the kind on a CPU, ``size`` that of
    its denoiser. ``keys`` are those of `Family.recipe`. With
    ``validation`` a part of the ``images`` is held out. ``drawn`` are the prompts of a kind that draws.
    """

    name: str
    data: str
    model: str
    resolution: int
    memory: MemoryChoice
    t5_length: int = 1
    shift: float = 3.0
    epoch_steps: int = 1
    affordable: int | None = None
    layers: int | None = None
    size: str | None = None
    prompts: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    family: str = _SD3
    images: int = 0
    validation: bool = True
    drawn: tuple[str, ...] = ()


def prompts_file(values: TextValues) -> str:
    """Return the name of the file of `TextValues.drawn`."""
    return f"{values.name}_prompts.txt"


def data_toml(kind: Kind, values: TextValues) -> str:
    """Return the text of the dataset TOML."""
    text = (FOLDER / f"{kind.recipe}_data.toml").read_text(encoding="utf-8")
    head = (
        f"# The images of {values.name}.toml, at {values.resolution} px.",
        "# Sources, filters and captions: docs/start/guide.md.",
        "# `sd3-light inspect` shows the dataset once it is cached.",
    )
    first, _, _ = _without_head(text).partition("[[directory]]")
    text = _set("\n".join((*head, _without_edits(first))), "resolutions", [values.resolution])
    if step := values.keys.get("side_step"):
        text = _set(text, "side_step", step, "pixels, as the model needs")
    for key, comment in _CLIP_KEYS.items():
        if key in values.keys:
            text = _set(text, key, values.keys[key], comment)
    if values.validation:
        text = _set(text, "validation", True, "hold out 2% of the images, in groups of similar ones")
    references = ""
    if kind.references:
        references = f"references = [{format_toml(values.data + '-before')}]  # before the edit, of the same names\n"
    return f"{text.rstrip()}\n\n[[directory]]\npath = {format_toml(values.data)}\n{references}"


def train_toml(kind: Kind, values: TextValues) -> str:
    """Return the text of the train TOML."""
    memory = values.memory
    steps = kind.steps(values.epoch_steps, values.affordable)
    text = _without_edits(_without_head((FOLDER / f"{kind.recipe}.toml").read_text(encoding="utf-8")))
    text = re.sub(r"(\n#)?\n# For sample images during training.*", "\n", text, flags=re.DOTALL)
    text = re.sub(r"^eval_.*\n", "", text, flags=re.MULTILINE)  # the validation images are a part of the dataset
    text = _HEAD.format(description=kind.description.replace(_SD3, values.family), name=values.name) + text
    for key, (value, comment) in {**_changes(kind, values, text), **_lengths(kind, values, text, steps)}.items():
        text = _set(text, key, value, comment)
    for key, (value, comment) in _evaluation(values, text, steps).items():
        text = _set(text, key, value, comment)
    keys = _distilled(values.keys) if kind.distills else values.keys
    text = _with_keys(text, keys)
    if memory.accumulation > 1:
        line = f"gradient_accumulation_steps = {memory.accumulation}"
        text = re.sub(r"^(micro_batch_size_per_gpu =.*)$", rf"\1\n{line}", text, flags=re.MULTILINE)
    sampling = _sampling(values.prompts, steps, keys) if values.prompts else ""
    return text.rstrip() + "\n" + sampling


def _levels(memory: MemoryChoice) -> str:
    """Return the other levels of checkpointing for the same kind of blocks."""
    return (
        "false, a share of the blocks, true" if isinstance(memory.checkpointing, float) else 'false, "selective", true'
    )


def _changes(kind: Kind, values: TextValues, text: str) -> dict[str, tuple[Any, str]]:
    """Return the keys that name the project or depend on memory, each with its value and a comment."""
    memory = values.memory
    changes = {
        "output_dir": (f"runs/{values.name}", ""),
        "dataset": (f"{values.name}_data.toml", ""),
        "micro_batch_size_per_gpu": (memory.micro_batch, _batch_comment(memory, kind.shrunk > 1)),
        "activation_checkpointing": (memory.checkpointing, f"fast to small: {_levels(memory)}"),
        "model.diffusers_path": (values.model, ""),
        "model.t5_max_length": (values.t5_length, "tokens"),
    }
    if kind.draws:
        changes["reward.prompts"] = (prompts_file(values), "one per line: the captions of the images")
        changes["reward.prompts_per_draw"] = (min(_PROMPTS_PER_DRAW, max(1, len(values.drawn))), "")
    if memory.base_bits < 16:
        changes["adapter.base_bits"] = (memory.base_bits, "of a frozen weight, so that the denoiser fits; 16 is exact")
    if memory.swap_blocks:
        held = ", for weights and moments that do not fit on the GPU" if memory.release else ""
        changes["swap_blocks"] = (memory.swap_blocks, f"{format_bytes(memory.host)} of host memory{held}")
    if values.size is not None:
        changes["model.size"] = (values.size, "so that it fits the memory of the GPU")
    if values.layers is not None:
        changes |= {f"model.shape.num_{part}": (values.layers, "few, for a CPU") for part in ("layers", "heads")}
    if kind.continues and "shift" in tomllib.loads(text)["model"]:
        changes["model.shift"] = (values.shift, "as in the model's scheduler")
    changes |= _RELEASE if memory.release else {}
    if memory.narrow:
        changes["optimizer.weight_dtype"] = ("bfloat16", "float32 does not fit; rounded stochastically")
    if not memory.averages:
        changes["ema.enable"] = (False, "the average does not fit")
    if "parallel" in _keys(text) and memory.processes == 1:
        changes["parallel"] = ("ddp", 'several GPUs: "fsdp2" shards the weights')
    return changes


def _lengths(kind: Kind, values: TextValues, text: str, steps: int) -> dict[str, tuple[Any, str]]:
    """Return the number of steps, and the intervals of the recipe by it: smaller batches have more steps."""
    keys = _keys(text)
    changes: dict[str, tuple[Any, str]] = {}
    # intervals are those of as many samples
    shrunk = max(1, kind.batch * kind.shrunk // values.memory.samples_per_step)
    if "max_steps" in keys:
        changes["max_steps"] = (steps, "" if kind.draws else f"{steps / values.epoch_steps:,.0f} epochs")
    if keys.get("cooldown_steps", 0) > 1:
        changes["cooldown_steps"] = (0.17, "decay to 0 over the last sixth")  # a share: max_steps may be edited
    limits = {"save_every_n_steps": max(_EXPORT_STEPS, steps // 4), "checkpoint_every_n_steps": max(1, steps // 4)}
    for key, limit in {**limits, "warmup_steps": max(1, steps // 10)}.items():
        if key in keys:
            changes[key] = (min(shrunk * int(keys[key]), limit), "")
    ema = tomllib.loads(text)["ema"]
    wanted = ema["decay"] ** (1 / shrunk)
    decay = min(wanted, ramped_decay(steps, ema["update_every"], wanted))
    decay = round(decay, 4 if decay < 0.999 else 6)
    if decay != ema["decay"] and values.memory.averages:
        covered = min(steps, round(ema["update_every"] / (1 - decay)))
        changes["ema.decay"] = (decay, f"the average covers about the last {plural(covered, 'step')}")
    return changes


def _evaluation(values: TextValues, text: str, steps: int) -> dict[str, tuple[Any, str]]:
    """Return when the held-out images are evaluated: at every export, so that `--best` can choose, and in between.

    Where evaluations would take more than `_EVALUATION_SHARE`, there are fewer, and fewer exports.
    """
    if not values.validation:
        return {}
    is_few = values.images < _FEW_IMAGES
    tables = tomllib.loads(text)
    passes = _PASSES * (1 + is_few) * (1 + tables["ema"]["enable"])
    # a training step is as many FLOPs as three forward passes
    fewest = round(passes * expected_split(values.images) / (3 * _EVALUATION_SHARE * values.memory.samples_per_step))
    saves = int(tables.get("save_every_n_steps", 1000))
    if fewest > saves:
        saves = min(steps, 100 * math.ceil(fewest / 100))
    is_often = saves % 2 == 0 and saves // 2 >= fewest
    changes: dict[str, tuple[Any, str]] = {"save_every_n_steps": (saves, "")}
    changes["eval_every_n_steps"] = (saves // 2 if is_often else saves, _EVALUATED)
    if is_few:
        changes["eval_at_fixed_t"] = (True, "few images: the loss at fixed t has less noise")
    return changes


def _batch_comment(memory: MemoryChoice, is_shrunk: bool) -> str:
    """Return the samples per step, the GPUs that share them, and why they are few."""
    gpus = "" if memory.needed is None else f" on {plural(memory.processes, 'GPU')}"
    reason = "; more would repeat images of small buckets" if is_shrunk else ""
    return f"{plural(memory.samples_per_step, 'sample')} per step{gpus}{reason}"


def _with_keys(text: str, keys: Mapping[str, Any]) -> str:
    """Return ``text`` with the keys of a family, and without comments about the lines that it replaces."""
    for key, value in keys.items():
        table, _, name = key.rpartition(".")
        if value is None:
            text = re.sub(rf"((^#.*\n)*^|^# ){name} =.*\n", "", text, flags=re.MULTILINE)
        elif key not in ("side_step", *_CLIP_KEYS) and (not table or f"\n[{table}]\n" in text):
            own = "" if key in _REASONED else "# "
            text = re.sub(rf"(^#.*\n)*^{own}{name} =.*\n", "", text, flags=re.MULTILINE)
            text = _set(text, key, value, _COMMENTS.get(key, ""))
    return text


def _distilled(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a family for a distillation: samples are drawn as the model learns.

    A denoiser that takes guidance as a number has a teacher with the usual one, and without a second pass.
    """
    kept = {key: value for key, value in keys.items() if key not in ("sampling.steps", "sampling.guidance")}
    if "model.guidance" in keys:
        kept["model.guidance"] = keys["sampling.guidance"]
        kept["objective.distill.guidance"] = 1.0
    return kept


def _sampling(prompts: tuple[str, ...], steps: int, keys: Mapping[str, Any]) -> str:
    """Return the table of samples: after the first step, after 2% of the run, and then ten times."""
    interval = max(1, steps // 10)
    early = sorted(step for step in {1, max(1, steps // 50)} if step % interval)
    lines = "".join(f"    {format_toml(prompt)},\n" for prompt in prompts)
    own = {name: keys.get(f"sampling.{name}") for name in ("steps", "guidance")}
    more = "".join(f"{name} = {value:g}\n" for name, value in own.items() if value is not None)
    schedule = f"at_steps = {early}\n" if early else ""
    schedule += f"every_n_steps = {interval}\n"
    head = "\n# sample images during training; no prompt is a training caption\n[sampling]\n"
    return f"{head}prompts = [\n{lines}]\n{schedule}{more}"


def _without_head(text: str) -> str:
    """Return a recipe without the comment at its top."""
    return re.sub(r"\A(#.*\n)+", "", text)


def _without_edits(text: str) -> str:
    """Return a recipe without the comments about values to edit."""
    return re.sub(r"^# EDIT.*\n", "", text, flags=re.MULTILINE)


def _keys(text: str) -> dict[str, Any]:
    """Return the keys and values before the first table."""
    return tomllib.loads(text.partition("\n[")[0])


def _set(text: str, key: str, value: Any, comment: str = "") -> str:
    """Return ``text`` with another value of a key, or with the key added to its table; `table.key` names a table.

    Without a ``comment`` that of the line stays.
    """
    table, _, name = key.rpartition(".")
    head, header, rest = text.partition(f"\n[{table}]\n") if table else ("", "", text)
    body, tail = re.match(r"(.*?)((?:^\[.*)?)\Z", rest, re.DOTALL | re.MULTILINE).groups()  # type: ignore[union-attr]
    line = f"{name} = {format_toml(value)}"
    old = re.search(rf"^{name} = [^#\n]*# (.*)$", body, re.MULTILINE)
    comment = comment or (old[1] if old else "")
    line = f"{line:<31} # {comment}" if comment else line
    changed, count = re.subn(rf"^{name} =.*$", lambda _: line, body, count=1, flags=re.MULTILINE)
    if not count:
        changed = f"{body.rstrip()}\n{line}\n\n"
    return head + header + changed + tail
