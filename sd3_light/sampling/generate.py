"""Prompts -> pictures, with a loaded stock pipeline; every picture depends on its own request alone."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from sd3_light.config.faults import UserError

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline


@dataclass(frozen=True)
class TextPolicy:
    """How text was shown to the model in training, and so must be in sampling.

    `uncond_text` is what guidance leads away from: all zeros, or the encoding of the negative prompt (as stock).
    """

    t5_max_length: int
    uncond_text: Literal["zero", "empty"]
    text_tokens: Literal["padded", "real"]


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
    _check(pipe, requests, policy)
    pictures: dict[int, Image.Image] = {}
    with _quiet(pipe), torch.no_grad():
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
    image.save(unfinished, format="PNG", pnginfo=info)
    unfinished.replace(path)


def _check(pipe: "StableDiffusion3Pipeline", requests: Sequence[Request], policy: TextPolicy) -> None:
    if policy.text_tokens == "real":
        raise UserError('text_tokens = "real": sampling with real tokens is not available yet; use "padded"')
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
    tokens, pooled = _encode(pipe, [request.prompt for request in batch], policy)
    text = {"prompt_embeds": tokens, "pooled_prompt_embeds": pooled}
    if guidance > 1:
        if policy.uncond_text == "zero":
            tokens, pooled = torch.zeros_like(tokens), torch.zeros_like(pooled)
        else:
            tokens, pooled = _encode_once_each(pipe, [request.negative_prompt for request in batch], policy)
        text |= {"negative_prompt_embeds": tokens, "negative_pooled_prompt_embeds": pooled}
    result = pipe(
        **text,
        # with a list, diffusers draws every picture's noise as if it were alone
        generator=[torch.Generator("cpu").manual_seed(request.seed) for request in batch],
        width=batch[0].width,
        height=batch[0].height,
        num_inference_steps=steps,
        guidance_scale=guidance,
    )
    images: list[Image.Image] = result.images
    return images


def _encode_once_each(
    pipe: "StableDiffusion3Pipeline", texts: Sequence[str], policy: TextPolicy
) -> tuple[Tensor, Tensor]:
    """As `_encode`, but equal texts are encoded once: negative prompts mostly are."""
    unique = list(dict.fromkeys(texts))
    tokens, pooled = _encode(pipe, unique, policy)
    rows = torch.tensor([unique.index(text) for text in texts], device=tokens.device)
    return tokens[rows], pooled[rows]


def _encode(pipe: "StableDiffusion3Pipeline", texts: list[str], policy: TextPolicy) -> tuple[Tensor, Tensor]:
    """The tokens and the pooled vectors of texts, as the stock pipeline computes them."""
    tokens, _, pooled, _ = pipe.encode_prompt(
        prompt=texts,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=policy.t5_max_length,
    )
    return tokens, pooled


@contextmanager
def _quiet(pipe: "StableDiffusion3Pipeline") -> Iterator[None]:
    """Without diffusers' own bar, one a batch; its settings come back afterwards."""
    settings = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**settings)
