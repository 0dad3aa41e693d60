"""Prompts -> pictures, with a loaded stock pipeline; every picture depends on its own request alone."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd3_light.config.faults import UserError
from sd3_light.model.attention import real_text_mask, use_masked_attention
from sd3_light.sampling.texts import Text, TextBatch, TextPolicy, batched, encode, no_text

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

__all__ = ["Request", "TextPolicy", "generate", "run_pipeline", "save_png"]


@dataclass(frozen=True)
class Request:
    """One picture to make; sides in pixels. The negative prompt is read only where `uncond_text` is "empty"."""

    prompt: str
    seed: int
    width: int
    height: int
    negative_prompt: str = ""


def generate(
    pipe: "StableDiffusion3Pipeline",
    requests: Sequence[Request],
    policy: TextPolicy,
    steps: int = 28,
    guidance: float = 4.0,
    batch_size: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Image.Image]:
    """The picture of every request, in their order; `guidance` of 1 or less means none.

    The start noise of a picture comes from its own CPU generator, so with `uncond_text` "empty" this is the picture of
    `pipe(prompt, generator=torch.Generator("cpu").manual_seed(seed), max_sequence_length=t5_max_length,
    num_inference_steps=steps, guidance_scale=guidance, width=..., height=...)`: the same bytes when `batch_size` is 1.
    In larger batches matrix products round differently: here and there a colour is one step of 255 off in fp32, more in
    half precision. Requests of one size share batches; `on_progress(done, total)` is called after each.
    """
    _check(pipe, requests)
    pictures: dict[int, Image.Image] = {}
    with torch.no_grad():
        for indices in _batches(requests, batch_size):
            batch = [requests[index] for index in indices]
            images = _generate_batch(pipe, batch, policy, steps, guidance)
            pictures.update(zip(indices, images, strict=True))
            if on_progress is not None:
                on_progress(len(pictures), len(requests))
    return [pictures[index] for index in range(len(requests))]


def save_png(image: Image.Image, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a PNG whose text chunks hold the metadata: texts as they are, anything else as JSON.

    `PIL.Image.open(path).text` reads them back. The file appears whole or not at all.
    """
    info = PngInfo()
    for key, value in metadata.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        image.save(unfinished, format="PNG", pnginfo=info)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check(pipe: "StableDiffusion3Pipeline", requests: Sequence[Request]) -> None:
    step = pipe.vae_scale_factor * pipe.patch_size
    largest = step * pipe.transformer.config.pos_embed_max_size
    for request in requests:
        sides = (request.width, request.height)
        if any(side % step or not step <= side <= largest for side in sides):
            wanted = f"multiples of {step} from {step} to {largest}"
            raise UserError(f"a picture of {request.width}x{request.height}: the sides of this model are {wanted}")


def _batches(requests: Sequence[Request], batch_size: int) -> Iterator[list[int]]:
    """The requests' indices in batches of one size of picture, sizes in the order in which they first occur."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(requests):
        by_size.setdefault((request.width, request.height), []).append(index)
    for indices in by_size.values():
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def _generate_batch(
    pipe: "StableDiffusion3Pipeline", batch: Sequence[Request], policy: TextPolicy, steps: int, guidance: float
) -> list[Image.Image]:
    texts = encode(pipe, [request.prompt for request in batch], policy)
    if guidance > 1:
        texts = [*_negatives(pipe, batch, texts, policy), *texts]
    text = batched(texts, texts[0].tokens.device, texts[0].tokens.dtype)
    if policy.text_tokens == "padded":
        return run_pipeline(pipe, batch, text, steps, guidance)
    step = pipe.vae_scale_factor * pipe.patch_size
    num_image = (batch[0].width // step) * (batch[0].height // step)
    mask = real_text_mask(text.lengths, text.tokens.shape[1], num_image)
    with use_masked_attention(pipe.transformer):
        return run_pipeline(pipe, batch, text, steps, guidance, {"attention_mask": mask})


def _negatives(
    pipe: "StableDiffusion3Pipeline", batch: Sequence[Request], texts: Sequence[Text], policy: TextPolicy
) -> list[Text]:
    """What guidance leads away from, a text a request."""
    if policy.uncond_text == "zero":
        return [no_text(text, policy.text_tokens) for text in texts]
    return encode(pipe, [request.negative_prompt for request in batch], policy)


def run_pipeline(
    pipe: "StableDiffusion3Pipeline",
    batch: Sequence[Request],
    text: TextBatch,
    steps: int,
    guidance: float,
    attention: dict[str, Any] | None = None,
) -> list[Image.Image]:
    """The stock pipeline's own sampling of requests of one size, without its text encoders.

    With guidance the rows of ``text`` are all negative ones, then the prompts'. ``attention`` goes to the denoiser as
    its ``joint_attention_kwargs``.
    """
    rows = {"prompt_embeds": text.tokens, "pooled_prompt_embeds": text.pooled}
    given = {name: tensor[-len(batch) :] for name, tensor in rows.items()}
    if guidance > 1:
        given |= {f"negative_{name}": tensor[: len(batch)] for name, tensor in rows.items()}
    with _quiet(pipe), torch.no_grad():
        result = pipe(
            **given,
            # with a list, diffusers draws every picture's noise as if it were alone
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in batch],
            width=batch[0].width,
            height=batch[0].height,
            num_inference_steps=steps,
            guidance_scale=guidance,
            joint_attention_kwargs=attention,
        )
    images: list[Image.Image] = result.images
    return images


@contextmanager
def _quiet(pipe: "StableDiffusion3Pipeline") -> Iterator[None]:
    """Without diffusers' own bar, one a batch; its settings come back afterwards."""
    settings = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**settings)
