"""Prompts -> pictures, with a loaded stock pipeline; every picture depends on its own request alone.

In a batch, matrix products round differently than alone, and with two threads differently than with one. So there are
two ways to draw: `exact` draws each picture alone with one thread, several side by side on a CPU's cores, and gives the
same bytes whatever the batch, the number of processes and of cores. The other draws batches, which GPUs need.
"""

import copy
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.model.masked_attention import real_text_mask, use_masked_attention
from sd3_light.sampling.image_requests import ImageRequest
from sd3_light.sampling.png import save_png
from sd3_light.sampling.texts import EncodedText, TextBatch, TextPolicy, batch_texts, encode, unconditional_text

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

__all__ = ["ImageRequest", "TextPolicy", "generate", "run_pipeline", "save_png", "size_fault", "stream_images"]

Drawn = list[tuple[int, Image.Image]]
"""Pictures, each with the number of its request."""

_TEXTS_KEPT = 64  # a text of SD3 is 5 MB


def generate(
    pipe: "StableDiffusion3Pipeline",
    requests: Sequence[ImageRequest],
    policy: TextPolicy,
    steps: int = 28,
    guidance: float = 4.0,
    batch_size: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
    exact: bool = False,
) -> list[Image.Image]:
    """Return the image of every request, in order. See `stream_images`; `on_progress(done, total)` reports progress."""
    pictures: dict[int, Image.Image] = {}
    for drawn in stream_images(pipe, requests, policy, steps, guidance, batch_size, exact):
        pictures.update(drawn)
        if on_progress is not None:
            on_progress(len(pictures), len(requests))
    return [pictures[index] for index in range(len(requests))]


def stream_images(
    pipe: "StableDiffusion3Pipeline",
    requests: Sequence[ImageRequest],
    policy: TextPolicy,
    steps: int = 28,
    guidance: float = 4.0,
    batch_size: int = 16,
    exact: bool = False,
    threads: int = 1,
) -> Generator[Drawn, None, None]:
    """The pictures as they are done; a `guidance` of 1 or less means none. `steps` and `guidance` are those of the
    requests that do not say their own.

    The start noise of a picture comes from its own CPU generator, so with `uncond_text` "empty" this is the picture of
    `pipe(prompt, generator=torch.Generator("cpu").manual_seed(seed), max_sequence_length=t5_max_length,
    num_inference_steps=steps, guidance_scale=guidance, width=..., height=...)`: the same bytes when `batch_size` is 1
    or with `exact` (there with `threads` threads of torch). In larger batches here and there a colour is one step of
    255 off in fp32, more in half precision. With `exact` at most `batch_size` pictures are drawn side by side, by as
    many threads of Python as cores allow.
    """
    full = [_with_defaults(request, steps, guidance) for request in requests]
    for request in full:
        fault = size_fault(pipe, request.width, request.height)
        if fault:
            raise UserError(fault)
    masked = use_masked_attention(pipe.transformer) if policy.text_tokens == "real" else nullcontext()
    with masked:
        if exact:
            yield from _draw_exactly(pipe, full, policy, batch_size, threads)
            return
        for indices in _batches(full, batch_size):
            batch = [full[index] for index in indices]
            yield list(zip(indices, _draw_batch(pipe, batch, policy, encode), strict=True))


def size_fault(pipe: "StableDiffusion3Pipeline", width: int, height: int) -> str | None:
    """What is wrong with a size for this model, if anything."""
    step = pipe.vae_scale_factor * pipe.patch_size
    largest = step * pipe.transformer.config.pos_embed_max_size
    if all(side % step == 0 and step <= side <= largest for side in (width, height)):
        return None
    return f"a picture of {width}x{height}: the sides of this model are multiples of {step} from {step} to {largest}"


def _with_defaults(request: ImageRequest, steps: int, guidance: float) -> ImageRequest:
    return replace(
        request,
        steps=steps if request.steps is None else request.steps,
        guidance=guidance if request.guidance is None else request.guidance,
    )


def _batches(requests: Sequence[ImageRequest], batch_size: int) -> Iterator[list[int]]:
    """The requests' indices in batches of one size of picture, steps and guidance, in the order in which these first
    occur."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(requests):
        alike.setdefault((one.width, one.height, one.steps, one.guidance), []).append(index)
    for indices in alike.values():
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def _draw_exactly(
    pipe: "StableDiffusion3Pipeline",
    requests: Sequence[ImageRequest],
    policy: TextPolicy,
    side_by_side: int,
    threads: int,
) -> Iterator[Drawn]:
    """One picture a call, so that nothing of it depends on the others."""
    workers = max(1, min(side_by_side, len(requests), _cores() // threads))
    pipes: SimpleQueue[StableDiffusion3Pipeline] = SimpleQueue()
    for _ in range(workers):
        pipes.put(_twin(pipe))
    shelf = _Shelf()

    def one(index: int) -> Drawn:
        mine = pipes.get()
        try:
            (image,) = _draw_batch(mine, [requests[index]], policy, shelf.encode)
            return [(index, image)]
        finally:
            pipes.put(mine)

    with _torch_threads(threads), ThreadPoolExecutor(workers) as pool:
        try:
            for done in as_completed([pool.submit(one, index) for index in range(len(requests))]):
                yield done.result()
        finally:  # after a fault, or when the caller wants no more
            pool.shutdown(cancel_futures=True)


def _twin(pipe: "StableDiffusion3Pipeline") -> "StableDiffusion3Pipeline":
    """The same networks in a pipeline whose settings and scheduler are its own, for use in another thread."""
    scheduler = copy.copy(pipe.scheduler)
    scheduler.register_to_config()  # a config of its own: DPM++ writes the shift of a picture's size into it
    twin = copy.copy(pipe)
    twin.scheduler = scheduler
    return twin


class _Shelf:
    """Texts encoded one at a time, the latest of them kept."""

    def __init__(self) -> None:
        self._texts: dict[str, EncodedText] = {}
        self._lock = Lock()  # a tokenizer's settings change with each call

    def encode(self, pipe: "StableDiffusion3Pipeline", texts: Sequence[str], policy: TextPolicy) -> list[EncodedText]:
        """As `texts.encode`, but no text's encoding depends on the others. Threads may come at once."""
        with self._lock:
            return [self._one(pipe, text, policy) for text in texts]

    def _one(self, pipe: "StableDiffusion3Pipeline", text: str, policy: TextPolicy) -> EncodedText:
        found = self._texts.pop(text, None) or encode(pipe, [text], policy)[0]
        self._texts[text] = found  # at the end: the oldest goes first
        for oldest in list(self._texts)[:-_TEXTS_KEPT]:
            del self._texts[oldest]
        return found


def _cores() -> int:
    """Cores that this process may use, shared with the others of its launcher on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """With this many threads of torch, in this thread and those that are started meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Encode = Callable[["StableDiffusion3Pipeline", Sequence[str], TextPolicy], list[EncodedText]]


@torch.no_grad()
def _draw_batch(
    pipe: "StableDiffusion3Pipeline", batch: Sequence[ImageRequest], policy: TextPolicy, encoder: Encode
) -> list[Image.Image]:
    """Requests of one size, steps and guidance."""
    steps, guidance = batch[0].steps, batch[0].guidance
    assert steps is not None and guidance is not None
    texts = encoder(pipe, [request.prompt for request in batch], policy)
    if guidance > 1:
        texts = [*_negatives(pipe, batch, texts, policy, encoder), *texts]
    # latents take the type of the text, and the VAE must understand them
    text = batch_texts(texts, texts[0].tokens.device, pipe.vae.dtype)
    if policy.text_tokens == "padded":
        return run_pipeline(pipe, batch, text, steps, guidance)
    step = pipe.vae_scale_factor * pipe.patch_size
    num_image = (batch[0].width // step) * (batch[0].height // step)
    mask = real_text_mask(text.lengths, text.tokens.shape[1], num_image)
    return run_pipeline(pipe, batch, text, steps, guidance, {"attention_mask": mask})


def _negatives(
    pipe: "StableDiffusion3Pipeline",
    batch: Sequence[ImageRequest],
    texts: Sequence[EncodedText],
    policy: TextPolicy,
    encoder: Encode,
) -> list[EncodedText]:
    """What guidance leads away from, a text a request."""
    if policy.uncond_text == "zero":
        return [unconditional_text(text, policy.text_tokens) for text in texts]
    return encoder(pipe, [request.negative_prompt for request in batch], policy)


def run_pipeline(
    pipe: "StableDiffusion3Pipeline",
    batch: Sequence[ImageRequest],
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
