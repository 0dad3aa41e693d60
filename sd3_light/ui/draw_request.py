"""What the playground draws: the values of its form, and the two axes of the grid that they span."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config.faults import UserError
from sd3_light.sources.captions import is_utf8
from sd3_light.ui.form_values import number_of

if TYPE_CHECKING:
    from sd3_light.sample.image_requests import PromptRow
    from sd3_light.sample.verb import SampleOptions

MOST_IMAGES = 256
"""Images of one drawing."""
SAMPLERS = ("euler", "heun", "dpm++")
DTYPES = ("float32", "bfloat16")
AXES = {
    "model": "models",
    "seed": "seeds",
    "steps": "steps",
    "guidance": "guidance",
    "shift": "shift",
    "sampler": "sampler",
    "lora": "strength of the first LoRA",
    "prompt": "part of the prompt",
}
"""What varies along an axis, and its name in the form."""

_LIMITS = {"steps": (1, 1000), "guidance": (0, 1000), "shift": (0.01, 1000), "lora": (-100, 100)}
_LONGEST_SEED = 19  # digits of 2**63
_RANGE = re.compile(r"(-?\d+(?:\.\d*)?)(?:-(-?\d+(?:\.\d*)?)(?::(\d+(?:\.\d*)?))?)?")
_TITLES = {"seed": "seed {}", "steps": "{} steps", "guidance": "guidance {}", "shift": "shift {}", "lora": "LoRA {}"}

Models = Mapping[str, tuple[str, Path]]
"""Label and folder of each model by id."""


@dataclass(frozen=True)
class Axis:
    """What varies along an axis of the grid, and its values."""

    name: str
    values: tuple[Any, ...]

    @property
    def labels(self) -> list[str]:
        """The texts of the rows or columns."""
        return [_TITLES.get(self.name, "{}").format(_plain(value)) for value in self.values]


@dataclass(frozen=True)
class DrawRequest:
    """What to draw in each cell; the axes replace a value each. What is None is the model's own."""

    model: str
    folders: Mapping[str, Path]
    prompt: str
    seed: int
    columns: Axis
    rows: Axis
    negative_prompt: str = ""
    loras: tuple[tuple[str, float | None], ...] = ()
    steps: int | None = None
    guidance: float | None = None
    shift: float | None = None
    width: int = 0
    height: int = 0
    sampler: str = "euler"
    dtype: str = "float32"
    preview: bool = True

    def cells(self) -> Iterator[tuple[tuple[int, int], "DrawRequest"]]:
        """Yield column, row and request of every image."""
        for row, below in enumerate(self.rows.values):
            for column, across in enumerate(self.columns.values):
                yield (column, row), self._at(self.rows.name, below)._at(self.columns.name, across)

    def _at(self, axis: str, value: Any) -> "DrawRequest":
        if axis == "lora":
            return replace(self, loras=((self.loras[0][0], value), *self.loras[1:]))
        if axis == "prompt":
            searched, found = value
            return replace(self, prompt=self.prompt.replace(searched, found))
        return replace(self, **{axis: value})

    def options(self) -> "SampleOptions":
        """Return the options of the sample stage that all images of a loaded model share, where they are equal."""
        from sd3_light.export.lora_stack import Lora
        from sd3_light.sample.verb import SampleOptions

        names = ("negative_prompt", "width", "height", "sampler", "dtype", "shift")
        loras = []
        for file, strength in self.loras:
            lora = Lora.parse(file)
            loras.append(lora if strength is None else replace(lora, strength=strength))
        return SampleOptions(**{name: getattr(self, name) for name in names}, loras=tuple(loras), batch=4)

    def row(self) -> "PromptRow":
        """Return the prompt with what may differ within a batch of requests."""
        from sd3_light.sample.image_requests import PromptRow

        return PromptRow(self.prompt, steps=self.steps, guidance=self.guidance)


def parse_request(values: Mapping[str, Any], models: Models, loras: Mapping[str, tuple[str, Path]]) -> DrawRequest:
    """Return the request of a form's values; ``loras`` are the listed files. Raises UserError for invalid values."""
    for name, value in values.items():
        if isinstance(value, str) and not is_utf8(value):
            raise UserError(f"{name} contains half of a surrogate pair, which is not a character; remove it")
    marked = values.get("models")
    keys = [key for key in marked if isinstance(key, str)] if isinstance(marked, list) else []
    chosen = dict(models[key] for key in keys if key in models)
    if not chosen:
        raise UserError("no model is chosen; mark at least one")
    prompt = str(values.get("prompt", "")).strip()
    if not prompt:
        raise UserError("the prompt is empty; write what to draw")
    seeds = _seeds(str(values.get("seeds", "0")))
    sampler = str(values.get("sampler", "euler"))
    dtype = str(values.get("dtype", "float32"))
    if sampler not in SAMPLERS or dtype not in DTYPES:
        raise UserError(f"unknown sampler or dtype {sampler!r}, {dtype!r}; choose one of the list")
    written = ((line.strip(), None) for line in str(values.get("loras", "")).splitlines() if line.strip())
    request = DrawRequest(
        next(iter(chosen)),
        chosen,
        prompt,
        seeds[0],
        Axis("model", tuple(chosen)),
        Axis("seed", seeds),
        negative_prompt=str(values.get("negative_prompt", "")).strip(),
        loras=(*_listed_loras(values, loras), *written),  # strengths of written ones are read with the files
        steps=None if (steps := number_of(values, "steps", *_LIMITS["steps"])) is None else int(steps),
        guidance=number_of(values, "guidance", *_LIMITS["guidance"]),
        shift=number_of(values, "shift", *_LIMITS["shift"]),
        width=int(number_of(values, "width", 0, 2**16) or 0),
        height=int(number_of(values, "height", 0, 2**16) or 0),
        sampler=sampler,
        dtype=dtype,
        preview=bool(values.get("preview", True)),
    )
    return _with_axes(request, values)


def _with_axes(request: DrawRequest, values: Mapping[str, Any]) -> DrawRequest:
    """Return the request with the axes of the form. What no axis varies must have one value."""
    many = {"model": request.columns, "seed": request.rows}
    axes = []
    for place, default in (("columns", "model"), ("rows", "seed")):
        name = str(values.get(place) or default)
        if name not in AXES:
            raise UserError(f"{place}: {name[:60]!r} is not an axis; choose one of the list")
        axes.append(many.get(name) or Axis(name, _axis_values(request, name, str(values.get(f"{place}_values", "")))))
    names = [axis.name for axis in axes]
    if names[0] == names[1]:
        raise UserError(f"columns and rows are both {AXES[names[0]]}; choose another axis for one of them")
    for name, axis in many.items():
        if name not in names and len(axis.values) > 1:
            raise UserError(
                f"{len(axis.values)} {AXES[name]}, but no axis is {AXES[name]}; choose one, or such an axis"
            )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_IMAGES:
        raise UserError(f"{count} images are too many at once; draw at most {MOST_IMAGES}")
    return replace(request, columns=axes[0], rows=axes[1])


def _axis_values(request: DrawRequest, name: str, text: str) -> tuple[Any, ...]:
    if name == "prompt":
        parts = [part.strip() for part in text.split(",")]
        if not parts[0] or parts[0] not in request.prompt:
            raise UserError(
                "part of the prompt: write a part of the prompt, then what replaces it, such as: cat, dog, bird"
            )
        return tuple(dict.fromkeys((parts[0], part) for part in parts))
    if name == "sampler":
        samplers = tuple(dict.fromkeys(text.replace(",", " ").split()))
        if not samplers or not set(samplers) <= set(SAMPLERS):
            raise UserError(f"sampler: write some of {', '.join(SAMPLERS)}, not {text[:60]!r}")
        return samplers
    if name == "lora" and not request.loras:
        raise UserError("an axis is the strength of the first LoRA, and there is none; choose a LoRA")
    numbers = parse_numbers(text, AXES[name], *_LIMITS[name])
    if name != "steps":
        return numbers
    if any(number != int(number) for number in numbers):
        raise UserError(f"steps: {text[:60]!r} has numbers that are not whole")
    return tuple(map(int, numbers))


def parse_numbers(text: str, name: str, least: float, most: float) -> tuple[float, ...]:
    """Parse lists and ranges, `1, 2, 4` and `1-5:0.5`. Raises UserError."""
    numbers: list[float] = []
    for part in text.replace(",", " ").split():
        match = _RANGE.fullmatch(part) if len(part) <= 60 else None
        if match is None:
            raise UserError(f"{name}: {part[:60]!r} is not a number or range; write 1, 2, 4 or 1-5:0.5")
        first = float(match[1])
        last = float(match[2] or first)
        step = float(match[3] or 1)
        count = math.floor((last - first) / step + 1e-9) + 1 if step > 0 and last - first <= MOST_IMAGES * step else 0
        if not 1 <= count <= MOST_IMAGES or not (least <= first and last <= most):
            raise UserError(f"{name}: {part!r} must be up to {MOST_IMAGES} numbers from {least:g} to {most:g}")
        numbers += [round(first + step * number, 10) for number in range(count)]
    if not numbers:
        raise UserError(f"{name}: write the values of the axis, such as 1, 2, 4 or 1-5:0.5")
    return tuple(dict.fromkeys(numbers))


def _listed_loras(values: Mapping[str, Any], loras: Mapping[str, tuple[str, Path]]) -> Iterator[tuple[str, float]]:
    chosen = values.get("chosen_loras", {})
    for key, strength in chosen.items() if isinstance(chosen, dict) else ():
        if key not in loras:
            raise UserError(f"there is no LoRA {key[:60]!r} any more; open the page again")
        label, path = loras[key]
        number = number_of({label: strength}, label, *_LIMITS["lora"])
        yield str(path), 1.0 if number is None else number


def _seeds(text: str) -> tuple[int, ...]:
    """Parse `0, 1, 5-8`."""
    seeds: list[int] = []
    for part in text.replace(",", " ").split():
        first, _, last = part.partition("-")
        ends = [int(end) for end in (first, last or first) if end.isdecimal() and len(end) <= _LONGEST_SEED]
        if len(ends) < 2 or not 0 <= ends[1] - ends[0] < MOST_IMAGES:
            raise UserError(f"seeds: {part[:60]!r} is not a seed; write integers from 0, such as 0, 1, 5-8")
        seeds += range(ends[0], ends[1] + 1)
    if not seeds or max(seeds) >= 2**63:
        raise UserError("seeds: write at least one integer from 0 to 2**63 - 1")
    return tuple(dict.fromkeys(seeds))


def _plain(value: Any) -> str:
    """Return a value of an axis as the form shows it."""
    if isinstance(value, tuple):  # a part of the prompt and what replaces it
        return value[1] or "(without)"
    return f"{value:g}" if isinstance(value, float) else str(value)
