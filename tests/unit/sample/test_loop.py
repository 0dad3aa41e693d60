"""The sampling loop against the stock pipelines of SD3 and Flux, bit for bit; families differ in what they give it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.core.sampling import EncodedText, ImageRequest, PipelineInputs, Sampling
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.engines import Launch
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.families.sd3.sampling import SD3Sampling
from sd3_light.flow.scheduler import set_timesteps
from sd3_light.sample import in_training as samples
from sd3_light.sample.generate import generate
from sd3_light.sample.in_training import Sampler
from sd3_light.sample.loop import draw_latents, starting_noise
from sd3_light.sample.precision import compute_in
from tests.families import save_pipeline

CPU = torch.device("cpu")
PROMPTS = ["a small red circle", "two blue squares"]
SEEDS = [3, 4]
STEPS = 4


# --- SD3 -----------------------------------------------------------------------------------------


def denoise_sd3(transformer: Any, batch: Batch) -> Tensor:
    velocity: Tensor = transformer(
        hidden_states=batch["noisy"],
        timestep=1000 * batch["t"],
        encoder_hidden_states=batch["prompt"],
        pooled_projections=batch["pooled"],
        return_dict=False,
    )[0]
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
def test_latents_and_pixels_are_those_of_the_stock_sd3_pipeline(
    pipe: Any, tmp_path: Path, schedule: dict[str, Any], guidance: float, dtype: torch.dtype
) -> None:
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
        expected = pipe(
            **{name: torch.stack([text["prompt"] for text in texts]) for name, texts in embeds.items()},
            **{name: torch.stack([text["pooled"] for text in texts]) for name, texts in pooled.items()},
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in SEEDS],
            num_inference_steps=STEPS,
            guidance_scale=guidance,
            width=48,
            height=32,
            output_type="pt",
        ).images
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


# --- a family with packed latents, guidance as a number and no negative prompt -------------------


class FluxSampling(Sampling):
    """Flux in training, around a folder of its pipeline."""

    def text(self, features: Mapping[str, Tensor]) -> EncodedText:
        return features

    def negative_text(self, empty: EncodedText, model: Any) -> None:
        return None

    def batch(self, texts: Sequence[EncodedText], model: Any, guidance: float) -> Batch:
        values = {name: torch.stack([text[name] for text in texts]) for name in ("text", "pooled")}
        return Batch(len(texts), {**values, "guidance": torch.full([len(texts)], guidance)})

    def latent_shape(self, model: Any, size: tuple[int, int]) -> tuple[int, ...]:
        width, height = size
        return 4, height // 8, width // 8

    def scheduler(self, model: Any, size: tuple[int, int], steps: int, device: torch.device) -> Any:
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        tokens = size[0] * size[1] // 256
        set_timesteps(scheduler, steps, tokens, device, np.linspace(1.0, 1 / steps, steps).tolist())
        return scheduler

    def decoder(self, model: Any, device: torch.device) -> VaeDecoder:
        return VaeDecoder(model.diffusers_path, device)


def denoise_flux(pipe: Any, batch: Batch) -> Tensor:
    noisy = batch["noisy"]
    count, channels, height, width = noisy.shape
    ids = pipe._prepare_latent_image_ids(count, height // 2, width // 2, CPU, torch.float32)
    tokens = pipe.transformer(
        hidden_states=pipe._pack_latents(noisy, count, channels, height, width),
        timestep=1000 * batch["t"] / 1000,  # the bits of the stock pipeline
        guidance=batch["guidance"],
        pooled_projections=batch["pooled"],
        encoder_hidden_states=batch["text"],
        txt_ids=torch.zeros(batch["text"].shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    velocity: Tensor = pipe._unpack_latents(tokens, 8 * height, 8 * width, 8)
    return velocity


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    with torch.random.fork_rng():
        folder = save_pipeline("flux", tmp_path_factory.mktemp("flux"))
    pipe = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe, folder


def flux_texts(prompts: Sequence[str]) -> dict[str, EncodedText]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"text": (6, 32), "pooled": (32,)}
    return {
        prompt: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for prompt in prompts
    }


def test_a_run_draws_the_images_of_the_stock_flux_pipeline(
    flux: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, folder = flux
    texts = flux_texts(PROMPTS)
    family = SimpleNamespace(sampling=FluxSampling(), texts_see_references=False)
    monkeypatch.setattr(samples, "family_of", lambda model: family)
    config: Any = SimpleNamespace(model=SimpleNamespace(diffusers_path=folder))
    requests = tuple(
        ImageRequest(prompt, seed, 64, 32, "ignored", STEPS, guidance)
        for prompt, seed, guidance in zip(PROMPTS, SEEDS, (3.5, 1.0), strict=True)
    )
    sampler = Sampler(config, requests, texts, None, 4, 64 * 32, Launch(), CPU)
    sizes: list[int] = []

    def denoise(batch: Batch) -> Tensor:
        sizes.append(batch.size)
        return denoise_flux(pipe, batch)

    drawn = dict(sampler.draw(denoise))
    assert sizes == [1] * 2 * STEPS, "one pass per step"
    assert sampler.fault is None
    for number, request in enumerate(requests):
        expected = pipe(
            prompt_embeds=texts[request.prompt]["text"][None],
            pooled_prompt_embeds=texts[request.prompt]["pooled"][None],
            generator=torch.Generator("cpu").manual_seed(request.seed),
            num_inference_steps=STEPS,
            guidance_scale=request.guidance,
            width=64,
            height=32,
        ).images[0]
        assert np.array_equal(np.asarray(drawn[number]), np.asarray(expected))


# --- a stock pipeline of another family ----------------------------------------------------------


class FluxInputs(PipelineInputs):
    """Flux's stock pipeline: two texts, no negative prompt."""

    def facts(self) -> dict[str, Any]:
        return {}

    def negative_fault(self) -> str:
        return "Flux takes no negative prompt; leave it out"

    def size_fault(self, pipe: Any, width: int, height: int) -> str | None:
        return None if width % 16 == height % 16 == 0 else "sides must be multiples of 16"

    def text_limits(self, folder: Path) -> list[Any]:
        return []

    def encode(self, pipe: Any, texts: Sequence[str]) -> list[EncodedText]:
        encoded = flux_texts(PROMPTS)
        return [encoded[text] for text in texts]

    def arguments(
        self, pipe: Any, batch: Sequence[ImageRequest], encode: Callable[[Sequence[str]], list[EncodedText]]
    ) -> dict[str, Any]:
        texts = encode([request.prompt for request in batch])
        return {
            "prompt_embeds": torch.stack([text["text"] for text in texts]),
            "pooled_prompt_embeds": torch.stack([text["pooled"] for text in texts]),
            "guidance_scale": batch[0].guidance,
        }


@pytest.mark.parametrize("exact", [False, True])
def test_requests_are_drawn_by_the_stock_pipeline_of_another_family(flux: tuple[Any, Path], exact: bool) -> None:
    pipe, _ = flux
    inputs = FluxInputs()
    requests = [ImageRequest(prompt, seed, 64, 32) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    images = generate(pipe, requests, inputs, STEPS, 3.5, batch_size=1, exact=exact)
    texts = flux_texts(PROMPTS)
    for request, image in zip(requests, images, strict=True):
        expected = pipe(
            prompt_embeds=texts[request.prompt]["text"][None],
            pooled_prompt_embeds=texts[request.prompt]["pooled"][None],
            generator=torch.Generator("cpu").manual_seed(request.seed),
            num_inference_steps=STEPS,
            guidance_scale=3.5,
            width=64,
            height=32,
        ).images[0]
        difference = np.abs(np.asarray(image).astype(int) - np.asarray(expected).astype(int)).max()
        assert difference <= (1 if exact else 0), "exact images are drawn with one thread"
    assert inputs.default_size(pipe) == (1024, 1024)
