"""Images of every stock family: our loop against its pipeline, bit for bit."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.core.registry import family_named
from sd3_light.core.sampling import ImageRequest
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.inputs import StockInputs
from sd3_light.flow.packing import pack_latents
from sd3_light.sample.loop import draw_latents, starting_noise
from sd3_light.sample.precision import compute_in
from tests.families import TinyFolder
from tests.stock import model_table, open_stock

CPU = torch.device("cpu")
FAMILIES = ("flux", "flux2", "krea2", "prx", "qwen_image", "sana", "wan", "z_image")
LENGTHS = {"flux": 12, "flux2": 40, "krea2": 160, "prx": 32, "qwen_image": 320}  # tokens; tiny templates have many
PROMPTS = ["a red fox", "two cats on a mat"]
SEEDS = [3, 4]
STEPS = 3


def sizes(family: StockFamily) -> tuple[int, int]:
    """Width and height of images that are not square."""
    side = 32 if family.name == "sana" else 16
    return 3 * side, 2 * side


@torch.no_grad()
def drawn(
    family: StockFamily, pipe: Any, folder: Path, guidance: float, noise: Tensor, prompts: Sequence[str] = PROMPTS
) -> Tensor:
    """Our images, or clips with several frames of noise; with texts in float32, whatever encodes them."""
    if family.single_prompts and len(prompts) > 1:
        images = zip(noise.split(1), prompts, strict=True)
        return torch.cat([drawn(family, pipe, folder, guidance, one, [prompt]) for one, prompt in images])
    length = {"text_max_length": LENGTHS.get(family.name, 80)}
    model = model_table(family.name, folder, **length)
    inputs = StockInputs(family, folder, length)
    sampling = family.sampling
    texts = [inputs.encode(pipe, prompts)]
    negative = sampling.negative_text(family.encode_empty(pipe, model), model)
    guide = None
    if negative is not None and sampling.is_guided(guidance):
        negatives = [negative] * len(prompts)
        texts = [[*negatives, *texts[0]]] if family.joins_guidance else [negatives, *texts]
        guide = partial(sampling.guide, guidance=guidance)
    scheduler = sampling.scheduler(model, sizes(family), STEPS, CPU)
    batches = [sampling.batch(part, model, guidance) for part in texts]
    denoise = partial(family.denoise, pipe.transformer, guidance=1.0)
    latents = draw_latents(denoise, scheduler, noise, batches, guide)
    with sampling.decoder(model, CPU) as decoder:
        images = decoder.decode(latents)
    return images[:, :, 0] if images.dim() == 5 and images.shape[2] == 1 else images


def stock_latents(family: StockFamily, latents: torch.Tensor) -> torch.Tensor:
    """Return initial latents [B, C, h, w] as the stock pipeline takes them."""
    if family.name == "flux2":  # patches as channels
        patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [B, C, h, 2, w, 2]
        return patches.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    return pack_latents(latents) if family.packs_latents else latents


@pytest.mark.parametrize(
    ("guidance", "dtype"), [(0.0, torch.float32), (3.5, torch.float32), (3.5, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_images_are_those_of_stock(name: str, stock_folder: TinyFolder, guidance: float, dtype: torch.dtype) -> None:
    """In bfloat16 denoiser and text encoders round; noise, guidance and steps are float32, as `sample` runs them."""
    family: Any = family_named(name)
    path = stock_folder(name)
    pipe = open_stock(path)
    compute_in(pipe, dtype)
    assert pipe.transformer.dtype == dtype
    model = model_table(family.name, path)
    size = sizes(family)
    noise = starting_noise(SEEDS, family.sampling.latent_shape(model, size), CPU)
    inputs = StockInputs(family, path, {"text_max_length": LENGTHS.get(family.name, 80)})
    requests = [ImageRequest(prompt, 0, *size, guidance=guidance) for prompt in PROMPTS]
    pipe.vae.enable_slicing()  # one image at a time, as in a run
    options = {"width": size[0], "height": size[1], "num_inference_steps": STEPS, "output_type": "pt"}
    batches = [(noise, requests)]
    if family.single_prompts:
        batches = [(noise[number : number + 1], [request]) for number, request in enumerate(requests)]
    images = []
    for latents, batch in batches:
        arguments = inputs.arguments(pipe, batch, partial(inputs.encode, pipe))
        stock = pipe(**arguments, latents=stock_latents(family, latents), **options)[0]
        images.append(stock[:, 0] if stock.dim() == 5 else stock)
    expected = torch.cat(images)
    assert expected.std() > 1e-3
    assert torch.equal(drawn(family, pipe, path, guidance, noise), expected)
    if guidance:
        assert not torch.equal(drawn(family, pipe, path, 0.0, noise), expected)
