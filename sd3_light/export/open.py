"""Opening a model folder for use: the pipeline, and how its text was encoded in training."""

from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline

from sd3_light.config.faults import UserError
from sd3_light.export.folder import read_facts
from sd3_light.export.real_pipeline import RealTextPipeline
from sd3_light.sampling.generate import TextPolicy


def open_pipeline(folder: Path, device: torch.device) -> tuple[StableDiffusion3Pipeline, TextPolicy]:
    """The folder's pipeline in float32, and its text policy (stock SD3's where the folder does not say).

    A model of real text tokens opens with this package's own class: a folder's `pipeline.py` is not run.
    """
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{folder} is no diffusers folder (no model_index.json); give an export or another SD3 folder")
    policy = text_policy(folder)
    given = {"dtype": torch.float32, "local_files_only": True}
    if policy.text_tokens == "padded":
        return StableDiffusion3Pipeline.from_pretrained(folder, **given).to(device), policy
    settings = {"t5_max_length": policy.t5_max_length, "uncond_text": policy.uncond_text}
    return RealTextPipeline.from_pretrained(folder, **settings, **given).to(device), policy


def text_policy(folder: Path) -> TextPolicy:
    """How a folder's text was encoded in training; stock SD3's way where it does not say."""
    text = read_facts(folder).get("text", {})
    return TextPolicy(
        text.get("t5_max_length", 256), text.get("uncond_text", "empty"), text.get("text_tokens", "padded")
    )
