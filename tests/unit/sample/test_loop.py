"""The sampling loop against the stock pipeline of SD3, bit for bit. Other families have theirs in their own room."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.families.sd3.sampling import SD3Sampling
from sd3_light.flow.scheduler import set_timesteps
from sd3_light.sample.loop import draw_latents, starting_noise
from sd3_light.sample.precision import compute_in

CPU = torch.device("cpu")
PROMPTS = ["a small red circle", "two blue squares"]
SEEDS = [3, 4]
STEPS = 4


def denoise_sd3(transformer: Any, batch: Batch) -> Tensor:
    inputs = (batch["noisy"], batch["prompt"], batch["pooled"], 1000 * batch["t"])
    velocity: Tensor = transformer(*inputs, return_dict=False)[0]
    return velocity


def with_denoiser_in(pipe: Any, dtype: torch.dtype) -> Any:
    """Return the pipeline with a copy of its denoiser that computes in ``dtype``, without text encoders."""
    other = copy.copy(pipe)
    other.transformer = copy.deepcopy(pipe.transformer)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        setattr(other, name, None)
    compute_in(other, dtype)
    assert other.transformer.dtype == dtype
    return other


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("schedule", [{"shift": 3.0}, {"use_dynamic_shifting": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_pixels_are_the_stock_ones(pipe: Any, tmp_path: Path, schedule: Any, guidance: float, dtype: Any) -> None:
    """In bfloat16 the denoiser rounds; noise, guidance and steps are float32, as `sample` runs them."""
    negatives = TextPolicy(12, "empty", "padded").encode(pipe, ["", "red"])
    prompts = TextPolicy(12, "empty", "padded").encode(pipe, PROMPTS)
    pipe.vae.save_pretrained(tmp_path / "vae")
    pipe = with_denoiser_in(pipe, dtype)
    before = pipe.scheduler
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**schedule)
    pipe.vae.enable_slicing()  # one image at a time, as in a run: others in the batch change its rounding
    try:
        embeds = {"prompt_embeds": prompts, "negative_prompt_embeds": negatives}
        pooled = {"pooled_prompt_embeds": prompts, "negative_pooled_prompt_embeds": negatives}
        settings = {"num_inference_steps": STEPS, "guidance_scale": guidance, "width": 48, "height": 32}
        stacked = {name: torch.stack([text["prompt"] for text in texts]) for name, texts in embeds.items()}
        stacked |= {name: torch.stack([text["pooled"] for text in texts]) for name, texts in pooled.items()}
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in SEEDS]
        expected = pipe(**stacked, generator=generators, **settings, output_type="pt").images
    finally:
        pipe.scheduler = before
        pipe.vae.disable_slicing()
    family = SD3Sampling()
    scheduler = FlowMatchEulerDiscreteScheduler(**schedule)
    set_timesteps(scheduler, STEPS, 24, CPU)
    model: Any = SimpleNamespace(text_tokens="padded", diffusers_path=tmp_path)
    texts = family.batch([*negatives, *prompts] if guidance > 1 else prompts, model, guidance)
    noise = starting_noise(SEEDS, family.latent_shape(model, (48, 32)), CPU)
    guide = partial(family.guide, guidance=guidance) if guidance > 1 else None
    latents = draw_latents(partial(denoise_sd3, pipe.transformer), scheduler, noise, texts, guide)
    with VaeDecoder(tmp_path, CPU) as decoder:
        assert torch.equal(decoder.decode(latents), expected)
