"""Generate images with a loaded stock pipeline; every image depends only on its own request.

Matrix products round differently in a batch than alone, and with two threads than with one. So there are two modes:
`exact` generates each image alone with one thread, several in parallel on a CPU's cores, with the same bytes for any
batch size and number of processes or cores. The other generates batches, which GPUs need.
"""

import copy
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from sd3_light.config import DEFAULT_GUIDANCE
from sd3_light.config.faults import UserError
from sd3_light.model.masked_attention import real_text_mask, use_masked_attention
from sd3_light.sampling.image_requests import ImageRequest
from sd3_light.sampling.png import save_png
from sd3_light.sampling.texts import EncodedText, TextBatch, TextPolicy, batch_texts, encode, unconditional_text
from sd3_light.system import usable_cores

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

__all__ = [
    "Cancelled",
    "ImageRequest",
    "TextPolicy",
    "generate",
    "run_pipeline",
    "save_png",
    "size_fault",
    "stream_images",
]


class Cancelled(Exception):
    """The caller cancelled the images while they were drawn."""


NumberedImages = list[tuple[int, Image.Image]]
"""Images, each with the index of its request."""

_CACHED_TEXTS = 64  # an encoded text of SD3 takes 5 MB


def generate(
    pipe: "StableDiffusion3Pipeline",
    requests: Sequence[ImageRequest],
    policy: TextPolicy,
    steps: int = 28,
    guidance: float = DEFAULT_GUIDANCE,
    batch_size: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
    exact: bool = False,
) -> list[Image.Image]:
    """Return the image of every request, in order. See `stream_images`; `on_progress(done, total)` reports progress."""
    images: dict[int, Image.Image] = {}
    for batch in stream_images(pipe, requests, policy, steps, guidance, batch_size, exact):
        images.update(batch)
        if on_progress is not None:
            on_progress(len(images), len(requests))
    return [images[index] for index in range(len(requests))]


def stream_images(
    pipe: "StableDiffusion3Pipeline",
    requests: Sequence[ImageRequest],
    policy: TextPolicy,
    steps: int = 28,
    guidance: float = DEFAULT_GUIDANCE,
    batch_size: int = 16,
    exact: bool = False,
    threads: int = 1,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Generator[NumberedImages, None, None]:
    """Yield the images as they are finished.

    `steps` and `guidance` are the defaults for requests without their own; a `guidance` of 1 or less disables it.

    The initial noise of an image comes from its own CPU generator, so with `uncond_text` "empty" the image equals
    `pipe(prompt, generator=torch.Generator("cpu").manual_seed(seed), max_sequence_length=t5_max_length,
    num_inference_steps=steps, guidance_scale=guidance, width=..., height=...)`: the same bytes when `batch_size` is 1
    or with `exact` (there with `threads` torch threads). In larger batches a few colours differ by 1/255 in fp32, more
    in half precision. With `exact`, up to `batch_size` images are generated in parallel, as cores allow.

    `is_cancelled` is called after every denoising step; once it returns True, `Cancelled` is raised.
    """
    full = [_with_defaults(request, steps, guidance) for request in requests]
    for request in full:
        fault = size_fault(pipe, request.width, request.height)
        if fault:
            raise UserError(fault)
    masked = use_masked_attention(pipe.transformer) if policy.text_tokens == "real" else nullcontext()
    with masked:
        if exact:
            yield from _generate_exactly(pipe, full, policy, batch_size, threads, is_cancelled)
            return
        encode_batch = partial(encode, pipe, policy=policy)
        for indices in _batches(full, batch_size):
            batch = [full[index] for index in indices]
            images = _generate_batch(pipe, batch, policy, encode_batch, is_cancelled)
            yield list(zip(indices, images, strict=True))


def size_fault(pipe: "StableDiffusion3Pipeline", width: int, height: int) -> str | None:
    """Return why the model cannot generate an image of this size; None if it can."""
    step = pipe.vae_scale_factor * pipe.patch_size
    largest = step * pipe.transformer.config.pos_embed_max_size
    if all(side % step == 0 and step <= side <= largest for side in (width, height)):
        return None
    return f"image size {width}x{height}: this model needs sides that are multiples of {step} from {step} to {largest}"


def _with_defaults(request: ImageRequest, steps: int, guidance: float) -> ImageRequest:
    return replace(
        request,
        steps=steps if request.steps is None else request.steps,
        guidance=guidance if request.guidance is None else request.guidance,
    )


def _batches(requests: Sequence[ImageRequest], batch_size: int) -> Iterator[list[int]]:
    """Yield the requests' indices in batches of equal image size, steps and guidance, in order of first occurrence."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault((request.width, request.height, request.steps, request.guidance), []).append(index)
    for indices in groups.values():
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def _generate_exactly(
    pipe: "StableDiffusion3Pipeline",
    requests: Sequence[ImageRequest],
    policy: TextPolicy,
    parallel: int,
    threads: int,
    is_cancelled: Callable[[], bool],
) -> Iterator[NumberedImages]:
    """Generate one image per pipeline call, so that images do not affect each other."""
    workers = max(1, min(parallel, len(requests), _cores() // threads))
    pipes: SimpleQueue[StableDiffusion3Pipeline] = SimpleQueue()
    for _ in range(workers):
        pipes.put(_copy_pipeline(pipe))
    stopped = Event()
    lock = Lock()  # tokenizers change their settings in each call

    @lru_cache(_CACHED_TEXTS)
    def encode_one(text: str) -> EncodedText:
        return encode(pipe, [text], policy)[0]

    def encode_each(texts: Sequence[str]) -> list[EncodedText]:
        with lock:
            return [encode_one(text) for text in texts]

    def generate_one(index: int) -> NumberedImages:
        own_pipe = pipes.get()
        try:
            (image,) = _generate_batch(
                own_pipe, [requests[index]], policy, encode_each, lambda: stopped.is_set() or is_cancelled()
            )
            return [(index, image)]
        finally:
            pipes.put(own_pipe)

    with _torch_threads(threads), ThreadPoolExecutor(workers) as pool:
        try:
            for done in as_completed([pool.submit(generate_one, index) for index in range(len(requests))]):
                yield done.result()
        finally:  # after an error, or when the caller stops early
            stopped.set()
            pool.shutdown(cancel_futures=True)


def _copy_pipeline(pipe: "StableDiffusion3Pipeline") -> "StableDiffusion3Pipeline":
    """Return a pipeline with the same networks but its own settings and scheduler, for use in another thread."""
    scheduler = copy.copy(pipe.scheduler)
    scheduler.register_to_config()  # copies the config: DPM++ writes the shift for an image size into it
    own_pipe = copy.copy(pipe)
    own_pipe.scheduler = scheduler
    return own_pipe


def _cores() -> int:
    """Return the cores for this process: its share among the processes of its launcher on this machine."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads for this thread and those started in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _generate_batch(
    pipe: "StableDiffusion3Pipeline",
    batch: Sequence[ImageRequest],
    policy: TextPolicy,
    encoder: Callable[[Sequence[str]], list[EncodedText]],
    is_cancelled: Callable[[], bool],
) -> list[Image.Image]:
    """Generate requests of equal size, steps and guidance."""
    steps, guidance = batch[0].steps, batch[0].guidance
    assert steps is not None and guidance is not None
    texts = encoder([request.prompt for request in batch])
    if guidance > 1 and policy.uncond_text == "zero":
        texts = [*(unconditional_text(text, policy.text_tokens) for text in texts), *texts]
    elif guidance > 1:
        texts = [*encoder([request.negative_prompt for request in batch]), *texts]
    # latents get the dtype of the text, and the VAE must accept it
    text = batch_texts(texts, texts[0].tokens.device, pipe.vae.dtype)
    attention = None
    if policy.text_tokens == "real":
        step = pipe.vae_scale_factor * pipe.patch_size
        num_image = (batch[0].width // step) * (batch[0].height // step)
        attention = {"attention_mask": real_text_mask(text.lengths, text.tokens.shape[1], num_image)}
    images, fault = run_pipeline(pipe, batch, text, steps, guidance, attention, is_cancelled)
    if fault:
        raise UserError(f"no image of {batch[0].prompt!r}: {fault}")
    return images


def run_pipeline(
    pipe: "StableDiffusion3Pipeline",
    batch: Sequence[ImageRequest],
    text: TextBatch,
    steps: int,
    guidance: float,
    attention: dict[str, Any] | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[list[Image.Image], str | None]:
    """Run the stock pipeline on encoded texts, for requests of one size; return the images and what is wrong with them.

    With guidance, the rows of ``text`` are all negative texts, then all prompts. ``attention`` is passed to the
    denoiser as ``joint_attention_kwargs``. Raises `Cancelled` after a step where ``is_cancelled`` returns True.
    """
    rows = {"prompt_embeds": text.tokens, "pooled_prompt_embeds": text.pooled}
    embeds = {name: tensor[-len(batch) :] for name, tensor in rows.items()}
    if guidance > 1:
        embeds |= {f"negative_{name}": tensor[: len(batch)] for name, tensor in rows.items()}
    latents: Tensor | None = None

    def keep_latents(_pipe: object, _step: int, _time: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal latents
        latents = tensors["latents"]
        if is_cancelled():
            raise Cancelled
        return {}

    with _no_progress_bar(pipe), torch.no_grad():
        pixels: Tensor = pipe(
            **embeds,
            # with a list, diffusers draws each image's noise independently of the batch
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in batch],
            width=batch[0].width,
            height=batch[0].height,
            num_inference_steps=steps,
            guidance_scale=guidance,
            joint_attention_kwargs=attention,
            callback_on_step_end=keep_latents,
            output_type="pt",
        ).images
    assert latents is not None, "at least one step"
    computed = {"text encoder": (text.tokens, text.pooled), "denoiser": (latents,), "VAE": (pixels,)}
    fault = next((_not_finite(part) for part, tensors in computed.items() if not _are_finite(tensors)), None)
    processor = pipe.image_processor
    images: list[Image.Image] = processor.numpy_to_pil(processor.pt_to_numpy(pixels.nan_to_num()))
    return images, fault


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _not_finite(part: str) -> str:
    return f"the {part} returned NaN or infinity; check its weights"


@contextmanager
def _no_progress_bar(pipe: "StableDiffusion3Pipeline") -> Iterator[None]:
    """Disable diffusers' progress bar (one per batch), and restore its settings afterwards."""
    settings = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**settings)
