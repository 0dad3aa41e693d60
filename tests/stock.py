"""Whole tiny pipelines on disk, opened as families; every weight matters, also those that start at a constant."""

import json
from pathlib import Path
from typing import Any

import diffusers
import peft  # noqa: F401 - first: its import replaces the module `transformers`, to which PRX's pipeline adds a class
import torch
import transformers

from sd3_light.config import ModelConfig
from tests.families import make_pipeline


def save_stock(name: str, folder: Path, **config: Any) -> Path:
    """Write a family's pipeline; ``config`` are other entries of its denoiser's config."""
    with torch.random.fork_rng(), torch.no_grad():
        pipe = make_pipeline(name, **config)
        for module in (pipe.transformer, pipe.vae):
            for weight in module.parameters():
                if weight.numel() > 1 and weight.min() == weight.max():
                    weight.add_(0.1 * torch.randn_like(weight))
        pipe.save_pretrained(folder)
    if name == "prx":  # its loader reads the config of an encoder and a decoder, which `save_pretrained` does not write
        encoder = pipe.text_encoder.config
        transformers.T5GemmaConfig(encoder=encoder, decoder=encoder).save_pretrained(folder / "text_encoder")
    return folder


def open_stock(folder: Path) -> Any:
    """Return the pipeline of a folder, without progress bars."""
    kind = json.loads((folder / "model_index.json").read_text())["_class_name"]
    pipe = getattr(diffusers, kind).from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def model_table(name: str, folder: Path, **keys: Any) -> ModelConfig:
    """Return the [model] table of a family's folder."""
    table = {"type": name, "diffusers_path": str(folder), **keys}
    return ModelConfig.model_validate(table, context={"base": folder})
