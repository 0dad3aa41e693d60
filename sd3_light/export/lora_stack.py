"""Apply LoRA files to a loaded pipeline."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.inputs import path_problem, require_regular

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_LONGEST_SHOWN = 100  # characters of a path that is not valid
_LORA_PARTS = ("transformer", "text_encoder", "text_encoder_2")
_ENCODER_PREFIXES = ("text_encoder", "lora_te")
_LEAF = re.compile(r"\.(lora_[AB]|lora_(up|down)|lora\.(up|down)|lora_magnitude_vector|dora_scale|alpha)\b.*$")


Reader = Callable[[Path], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Lora:
    """A LoRA file and its strength: 1 as trained, 0 no effect."""

    file: Path
    strength: float = 1.0

    @staticmethod
    def parse(text: str) -> "Lora":
        """Parse `FILE`, `FOLDER`, or either with `:STRENGTH`. A folder is an adapter's export, or a run with some."""
        problem = path_problem(text)
        if problem:
            raise UserError(f"LoRA {text[:_LONGEST_SHOWN]}: {problem}")
        file = Path(text)
        strength = 1.0
        name, colon, number = text.rpartition(":")
        if colon and not file.exists():
            with suppress(ValueError):  # a file name with a colon
                strength = float(number)
                file = Path(name)
        if file.is_dir():
            folder = max((file / "exports").glob("step-*"), default=file)
            found = adapter_file(folder)
            if found is None:
                raise UserError(f"LoRA {text}: {folder} has no adapter file; pass the .safetensors file itself")
            file = found
        if not file.is_file():
            raise UserError(f"LoRA {text}: {file} does not exist")
        if file.suffix != ".safetensors":
            raise UserError(f"LoRA {text}: it is not a .safetensors file")
        if not abs(strength) < float("inf"):
            raise UserError(f"LoRA {text}: the strength must be a finite number")
        return Lora(file, strength)


def adapter_file(folder: Path) -> Path | None:
    """Return the only safetensors file directly in a folder, as in an adapter's export; None if there is not one."""
    files = sorted(folder.glob("*.safetensors"))
    return files[0] if len(files) == 1 else None


def add_loras(pipe: "DiffusionPipeline", loras: Sequence[Lora], read: Reader) -> None:
    """Apply the files together, each with its strength. A file that does not fit the model is a UserError.

    ``read`` returns a file's tensors by diffusers' names; diffusers itself reads files that change text encoders. A
    pipeline without its denoiser, or without its text encoders, takes what the files have for its other parts.
    """
    strengths: dict[str, float] = {}
    absent = tuple(f"{part}." for part in _LORA_PARTS if getattr(pipe, part, pipe) is None)
    for number, lora in enumerate(loras):
        name = f"lora{number}"
        try:
            tensors = _tensors(pipe, lora.file, read)
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(absent)}
            if not tensors:
                continue
            _check(pipe, tensors)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are intended
                _load(pipe, tensors, name)
            strengths[name] = lora.strength
        except (ValueError, LookupError, RuntimeError, OSError, SafetensorError) as error:
            lines = str(error).strip().splitlines()
            # torch reports wrong shapes in many lines: the first names the model, the second the reason
            raise UserError(f"LoRA {lora.file} does not fit this model: {' '.join(lines[:2])}") from error
    if strengths:
        pipe.set_adapters(list(strengths), list(strengths.values()))


def set_strengths(pipe: Any, loras: Sequence[Lora]) -> None:
    """Change the strengths of the files that `add_loras` has applied to a complete pipeline, in the same order."""
    pipe.set_adapters([f"lora{number}" for number in range(len(loras))], [lora.strength for lora in loras])


def _load(pipe: Any, tensors: Mapping[str, Tensor], name: str) -> None:
    if pipe.transformer is not None:
        pipe.load_lora_weights(dict(tensors), adapter_name=name)
        return
    for part in _LORA_PARTS[1:]:
        own = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{part}.")}
        if own:
            encoder = getattr(pipe, part)
            pipe.load_lora_into_text_encoder(own, None, encoder, prefix=part, adapter_name=name, _pipeline=pipe)


def _tensors(pipe: "DiffusionPipeline", file: Path, read: Reader) -> Mapping[str, Tensor]:
    require_regular(file)
    with safe_open(file, framework="pt") as opened:
        has_encoders = any(key.startswith(_ENCODER_PREFIXES) for key in opened.keys())  # noqa: SIM118 - not a dict
    if not has_encoders:
        return read(file)
    tensors: Mapping[str, Tensor] = pipe.lora_state_dict(file.resolve().parent, weight_name=file.name)
    return tensors


def _check(pipe: "DiffusionPipeline", tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError for layers that the model lacks: diffusers would only warn and ignore them."""
    layers = list(dict.fromkeys(_LEAF.sub("", key) for key in tensors))
    parts = {part: getattr(pipe, part, None) for part in _LORA_PARTS}
    known = {f"{part}.{name}" for part, module in parts.items() if module for name, _ in module.named_modules()}
    unknown = [layer for layer in layers if layer not in known]
    if len(unknown) == len(layers):
        raise ValueError(f"the model has none of its {len(layers)} layers, such as {layers[0]}")
    if unknown:
        raise ValueError(f"the model lacks {len(unknown)} of its {len(layers)} layers, such as {unknown[0]}")
