"""Open a model folder: its pipeline, and how its text was encoded in training."""

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline

from sd3_light.config.faults import UserError
from sd3_light.export.diffusers_folder import is_finite, read_facts
from sd3_light.export.real_pipeline import RealTextPipeline
from sd3_light.export.single_parts import read_part
from sd3_light.model.part_configs import FACTS_FILE, LOAD_ERRORS, LOCAL_WEIGHTS, check_files
from sd3_light.model.pipeline_folder import check_configs, tokenizer_length
from sd3_light.model.start import folder_size
from sd3_light.sampling.texts import TextPolicy

_CHOICES: dict[str, tuple[str, ...]] = {"uncond_text": ("zero", "empty"), "text_tokens": ("padded", "real")}


def open_pipeline(
    folder: Path, device: torch.device, text_facts: Path | None = None
) -> tuple[StableDiffusion3Pipeline, TextPolicy]:
    """Load the folder's pipeline in float32 and its text policy (stock SD3's by default).

    ``text_facts`` is the folder that states the policy, if it is not the same: that of an adapter.
    A model of real text tokens opens with this package's own class: a folder's `pipeline.py` is not run. An incomplete
    or non-finite denoiser is a UserError: diffusers would fill gaps with random weights.
    """
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{folder} is not a diffusers folder (no model_index.json); pass an export or an SD3 folder")
    policy = read_text_policy(text_facts or folder)
    check_configs(folder)
    folder_size(folder / "transformer")  # reports an invalid config
    read_part(folder / "transformer", "transformer")  # reports missing or wrong weights
    try:
        pipe = _load(folder, policy)
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"diffusers cannot load {folder}: {reason}; download or export the folder again") from error
    for name, tensor in pipe.transformer.state_dict().items():
        if not is_finite(tensor):
            raise UserError(f"{folder}: {name} of its denoiser contains NaN or infinity; pass another model")
    return pipe.to(device), policy


def _load(folder: Path, policy: TextPolicy) -> StableDiffusion3Pipeline:
    check_files(folder, *(part for part in folder.iterdir() if part.is_dir()))
    options = {"dtype": torch.float32, **LOCAL_WEIGHTS}
    if policy.text_tokens == "padded":
        return StableDiffusion3Pipeline.from_pretrained(folder, **options)
    settings = {"t5_max_length": policy.t5_max_length, "uncond_text": policy.uncond_text}
    return RealTextPipeline.from_pretrained(folder, **settings, **options)


def read_text_policy(folder: Path) -> TextPolicy:
    """Return how a folder's text was encoded in training; if it does not say, stock SD3's policy with no more T5 tokens
    than the folder's tokenizer accepts."""
    length = min(256, tokenizer_length(folder / "tokenizer_3") or 256)
    text: dict[str, Any] = {"t5_max_length": length, "uncond_text": "empty", "text_tokens": "padded"}
    text |= read_facts(folder).get("text", {})
    invalid = [key for key, choices in _CHOICES.items() if text[key] not in choices]
    if type(text["t5_max_length"]) is not int or text["t5_max_length"] < 1:
        invalid.append("t5_max_length")
    if invalid:
        key = invalid[0]
        raise UserError(f"{folder / FACTS_FILE}: {key} has the invalid value {text[key]!r}; export the folder again")
    return TextPolicy(text["t5_max_length"], text["uncond_text"], text["text_tokens"])
