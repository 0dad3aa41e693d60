"""Sample grids while training: the config's prompts and seeds, drawn with the weights of the moment."""

from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from sd3_light.config import TrainConfig
from sd3_light.sampling.generate import Request, TextPolicy, generate
from sd3_light.sampling.grid import make_grid
from sd3_light.sampling.scheduler import flow_scheduler


def text_policy(config: TrainConfig) -> TextPolicy:
    """How this run's text is encoded."""
    model = config.model
    return TextPolicy(model.t5_max_length, model.uncond_text, model.text_tokens)


def draw_samples(config: TrainConfig, transformer: SD3Transformer2DModel, path: Path, size: tuple[int, int]) -> Path:
    """One picture for each prompt and seed in one PNG."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        config.model.diffusers_path,
        transformer=transformer,
        scheduler=flow_scheduler(config.model.shift, config.model.flux_shift),  # as the export will have it
        dtype=torch.float32,
        local_files_only=True,
    ).to(transformer.device)
    wishes = config.sampling
    requests = [Request(prompt, seed, *size) for prompt in wishes.prompts for seed in wishes.seeds]
    images = generate(pipe, requests, text_policy(config), steps=wishes.steps, guidance=wishes.guidance)
    captions = [request.prompt for request in requests]
    path.parent.mkdir(parents=True, exist_ok=True)
    make_grid(images, captions, columns=min(8, len(images))).save(path)
    return path
