"""LoRA files on top of a loaded pipeline."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sd3_light.config.faults import UserError

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

_PARTS = ("transformer", "text_encoder", "text_encoder_2")
_ENCODERS = ("text_encoder", "lora_te")
_LEAF = re.compile(r"\.(lora_[AB]|lora_(up|down)|lora\.(up|down)|lora_magnitude_vector|dora_scale|alpha)\b.*$")


Reader = Callable[[Path], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Lora:
    """A LoRA file and how strongly it acts: 1 as trained, 0 not at all."""

    file: Path
    strength: float = 1.0

    @staticmethod
    def parse(text: str) -> "Lora":
        """From `FILE` or `FILE:STRENGTH`; the file must be there."""
        file, strength = Path(text), 1.0
        name, colon, number = text.rpartition(":")
        if colon and not file.is_file():
            with suppress(ValueError):  # a file name with a colon
                file, strength = Path(name), float(number)
        if not file.is_file():
            raise UserError(f"LoRA {text}: {file} does not exist")
        if file.suffix != ".safetensors":
            raise UserError(f"LoRA {text}: a LoRA is a .safetensors file")
        if not abs(strength) < float("inf"):
            raise UserError(f"LoRA {text}: the strength must be a finite number")
        return Lora(file, strength)


def add_loras(pipe: "StableDiffusion3Pipeline", loras: Sequence[Lora], read: Reader) -> None:
    """Let the files act together, each with its strength. A file that does not fit is a UserError.

    ``read`` gives a file's tensors by diffusers' names; files that change text encoders are left to diffusers.
    """
    if not loras:
        return
    names = [f"lora{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        try:
            tensors = _tensors(pipe, lora.file, read)
            _check(pipe, tensors)
            pipe.load_lora_weights(dict(tensors), adapter_name=name)
        except (ValueError, LookupError, RuntimeError, OSError, SafetensorError) as fault:
            reason = str(fault).strip().splitlines()
            # of the many lines that torch has for tensors of wrong shapes, the first says which model, the second why
            raise UserError(f"LoRA {lora.file} does not fit this model: {' '.join(reason[:2])}") from fault
    pipe.set_adapters(names, [lora.strength for lora in loras])


def _tensors(pipe: "StableDiffusion3Pipeline", file: Path, read: Reader) -> Mapping[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        of_encoders = any(key.startswith(_ENCODERS) for key in opened.keys())  # noqa: SIM118 - it is no dict
    if not of_encoders:
        return read(file)
    found: Mapping[str, Tensor] = pipe.lora_state_dict(file.resolve().parent, weight_name=file.name)
    return found


def _check(pipe: "StableDiffusion3Pipeline", tensors: Mapping[str, Tensor]) -> None:
    """A ValueError where layers of the file are not in the model: diffusers would only warn, and draw without them."""
    layers = list(dict.fromkeys(_LEAF.sub("", key) for key in tensors))
    parts = {part: getattr(pipe, part) for part in _PARTS}
    known = {f"{part}.{name}" for part, module in parts.items() if module for name, _ in module.named_modules()}
    strange = [layer for layer in layers if layer not in known]
    if len(strange) == len(layers):
        raise ValueError(f"none of its {len(layers)} layers is in it, such as {layers[0]}")
    if strange:
        raise ValueError(f"{len(strange)} of its {len(layers)} layers are not in it, such as {strange[0]}")
