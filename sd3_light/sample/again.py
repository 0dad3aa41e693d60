"""Draw an image again from the settings in its PNG: the same bits on the same kind of machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.export.chosen import ChosenModel
from sd3_light.export.lora_stack import Lora
from sd3_light.export.weights_fingerprint import file_fingerprint, model_fingerprint
from sd3_light.flow.scheduler import SAMPLERS
from sd3_light.inputs import parse_json
from sd3_light.runlog import info
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.png import read_png_text
from sd3_light.sample.verb import SampleOptions


@dataclass(frozen=True)
class DrawnImage:
    """What a PNG says about its image; ``loras`` are the names, strengths and fingerprints of its files."""

    row: PromptRow
    options: SampleOptions
    model: str
    fingerprint: str
    loras: tuple[tuple[str, float, str], ...]


def read_drawn_image(path: Path) -> DrawnImage:
    """Return the settings in an image of `sd3-light sample`. Raises UserError for others, and for damaged ones."""
    try:
        text = read_png_text(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"--from {path}: it cannot be read as an image: {error}") from error
    return drawn_image(text, f"--from {path}")


def drawn_image(text: str, where: str) -> DrawnImage:
    """Return the settings in the text chunk of an image. Raises UserError, which names ``where``."""
    try:
        facts = parse_json(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or "prompt" not in facts:
        raise UserError(f"{where}: it has no settings of `sd3-light sample`; use an image that it wrote")
    absent: dict[str, Any] = {
        "negative_prompt": "",
        "frames": 1,
        "threads": 1,
        "shift": None,
        "fingerprint": "",
        "loras": [],
        "references": [],
    }
    values = absent | facts
    for name, is_valid in _VALID.items():
        if not is_valid(values.get(name)):
            raise UserError(f"{where}: {name} is {values.get(name)!r:.80}; the file is damaged")
    row = PromptRow(**{name: values[name] for name in _OF_ROW})
    shift = None if isinstance(values["shift"], str) else values["shift"]
    references = tuple(map(Path, values["references"]))
    options = SampleOptions(**{name: values[name] for name in _OF_OPTIONS}, shift=shift, references=references)
    loras = tuple((lora["file"], float(lora["strength"]), str(lora.get("fingerprint", ""))) for lora in values["loras"])
    return DrawnImage(row, options, values["model"], values["fingerprint"], loras)


def options_again(drawn: DrawnImage, chosen: ChosenModel, loras: Sequence[Lora]) -> SampleOptions:
    """Return the options to draw an image again with a model and its LoRA files, whose strengths the image says.

    A LoRA that is missing is a UserError; other weights than those of the image are reported.
    """
    own = model_fingerprint(chosen.folder)
    if drawn.fingerprint and own != drawn.fingerprint:
        info(
            f"warning: the image was drawn with {drawn.model} ({drawn.fingerprint}); "
            f"{chosen.folder} has other weights ({own})"
        )
    used = []
    for name, strength, fingerprint in drawn.loras[len(chosen.loras) :]:
        file = next((lora.file for lora in loras if _is_file(lora.file, name, fingerprint)), None)
        if file is None:
            raise UserError(f"--from: the image was drawn with the LoRA {name} ({fingerprint}); pass it with --lora")
        used.append(Lora(file, strength))
    return replace(drawn.options, loras=tuple(used))


def _is_file(file: Path, name: str, fingerprint: str) -> bool:
    return file_fingerprint(file) == fingerprint if fingerprint else file.name == name


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_lora(value: Any) -> bool:
    return isinstance(value, Mapping) and _is_text(value.get("file")) and _is_number(value.get("strength"))


_LARGEST = 1e6  # of guidance, shift and strengths; whole numbers of JSON have no limit
_OF_ROW = ("prompt", "seed", "negative_prompt", "width", "height", "steps", "guidance")
_OF_OPTIONS = ("sampler", "dtype", "threads", "frames")
_VALID: dict[str, Callable[[Any], bool]] = {
    "prompt": _is_text,
    "negative_prompt": _is_text,
    "seed": _whole(0, 2**63 - 1),
    "width": _whole(1, 2**16),
    "height": _whole(1, 2**16),
    "steps": _whole(1, 1000),
    "guidance": lambda value: _is_number(value) and value >= 0,
    "sampler": lambda value: value in tuple(SAMPLERS),
    "shift": lambda value: value is None or _is_text(value) or (_is_number(value) and value > 0),
    "dtype": _is_text,
    "threads": _whole(1, 1024),
    "frames": _whole(1, 10_000),
    "references": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "model": _is_text,
    "fingerprint": _is_text,
    "loras": lambda value: isinstance(value, list) and all(map(_is_lora, value)),
}
