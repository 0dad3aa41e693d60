"""Opening a model folder for use: the pipeline, and how its text was encoded in training."""

from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import SafetensorError

from sd3_light.config.faults import UserError
from sd3_light.export.diffusers_folder import FACTS_FILE, is_finite, read_facts
from sd3_light.export.real_pipeline import RealTextPipeline
from sd3_light.export.single_parts import read_part
from sd3_light.model.start import folder_size
from sd3_light.sampling.generate import TextPolicy

# what diffusers, transformers and their tokenizers raise on files that are not what they expect
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError)
_CHOICES: dict[str, tuple[str, ...]] = {"uncond_text": ("zero", "empty"), "text_tokens": ("padded", "real")}


def open_pipeline(folder: Path, device: torch.device) -> tuple[StableDiffusion3Pipeline, TextPolicy]:
    """The folder's pipeline in float32, and its text policy (stock SD3's where the folder does not say).

    A model of real text tokens opens with this package's own class: a folder's `pipeline.py` is not run. A denoiser
    that is not all that its config promises, or not finite, is a fault: diffusers would fill gaps with random weights.
    """
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{folder} is no diffusers folder (no model_index.json); give an export or another SD3 folder")
    policy = read_text_policy(folder)
    folder_size(folder / "transformer")  # a fault of its config in words
    read_part(folder, "transformer")
    try:
        pipe = _load(folder, policy)
    except _DAMAGED as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"diffusers does not load {folder}: {said}; fetch or write the folder anew") from error
    for name, tensor in pipe.transformer.state_dict().items():
        if not is_finite(tensor):
            raise UserError(f"{folder}: {name} of its denoiser holds NaN or infinity; give another model")
    return pipe.to(device), policy


def _load(folder: Path, policy: TextPolicy) -> StableDiffusion3Pipeline:
    given = {"dtype": torch.float32, "local_files_only": True}
    if policy.text_tokens == "padded":
        return StableDiffusion3Pipeline.from_pretrained(folder, **given)
    settings = {"t5_max_length": policy.t5_max_length, "uncond_text": policy.uncond_text}
    return RealTextPipeline.from_pretrained(folder, **settings, **given)


def read_text_policy(folder: Path) -> TextPolicy:
    """How a folder's text was encoded in training; stock SD3's way where it does not say."""
    text = {"t5_max_length": 256, "uncond_text": "empty", "text_tokens": "padded", **read_facts(folder).get("text", {})}
    wrong = [key for key, known in _CHOICES.items() if text[key] not in known]
    if type(text["t5_max_length"]) is not int or text["t5_max_length"] < 1:
        wrong.append("t5_max_length")
    if wrong:
        raise UserError(f"{folder / FACTS_FILE}: {wrong[0]} is {text[wrong[0]]!r}; write the folder anew")
    return TextPolicy(text["t5_max_length"], text["uncond_text"], text["text_tokens"])
