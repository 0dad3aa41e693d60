"""Generate images with a stock pipeline, loaded or in phases; every image depends only on its own request.

Matrix products round differently in a batch than alone, and with two threads than with one. So there are two modes:
`exact` generates each image alone with one thread, several in parallel on a CPU's cores, with the same bytes for any
batch size and number of processes or cores. The other generates batches, which GPUs need.
"""

import copy
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sd3_light.config import DEFAULT_GUIDANCE
from sd3_light.config.faults import UserError
from sd3_light.core.sampling import EncodedText, ImageRequest, PipelineInputs
from sd3_light.runlog import info
from sd3_light.sample.phases import PER_ROUND, LatentsDrawn, Phases
from sd3_light.sample.png import save_png
from sd3_light.sample.watch import Cancelled, SeenBatch, Watch, cancellable
from sd3_light.system import usable_cores

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Result = TypeVar("Result")
Encode = Callable[[Sequence[str]], list[EncodedText]]
OnStep = Callable[[int, Tensor], None]
"""Called with the number of a step, from 0, and the latents after it."""

__all__ = [
    "Cancelled",
    "ImageRequest",
    "as_image",
    "choose_drawing",
    "drawing_note",
    "frames_of",
    "generate",
    "not_finite",
    "run_pipeline",
    "save_png",
    "stream_images",
    "to_images",
]


NumberedImages = list[tuple[int, Image.Image]]
"""Images, each with the index of its request."""

USUAL_DRAWING = (28, DEFAULT_GUIDANCE)
"""Steps and guidance where neither the user nor the model chooses them."""
_UNSEEN = Watch()
_FRAMES = "frames"  # in `info` of an image that stands for a clip
_CACHED_TEXTS = 64  # an encoded text of SD3 takes 5 MB


def choose_drawing(
    policy: PipelineInputs, steps: int | None, guidance: float | None, usual_steps: int = 28
) -> tuple[int, float]:
    """Return `PipelineInputs.drawing`; report what is not given, if the model has a note about it."""
    if note := drawing_note(policy, steps, guidance, usual_steps):
        info(note)
    return policy.drawing(steps, guidance, usual_steps)


def drawing_note(
    policy: PipelineInputs, steps: int | None, guidance: float | None, usual_steps: int = 28
) -> str | None:
    """Return the steps and the guidance of images with the model's note; None if both are given, or it has none."""
    note = policy.own_drawing.note
    if not note or (steps is not None and guidance is not None):
        return None
    chosen_steps, chosen_guidance = policy.drawing(steps, guidance, usual_steps)
    return f"{chosen_steps} steps, guidance {chosen_guidance:g}: {note}"


def generate(
    pipe: "DiffusionPipeline | Phases",
    requests: Sequence[ImageRequest],
    policy: PipelineInputs,
    drawing: tuple[int, float] = USUAL_DRAWING,
    batch_size: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
    exact: bool = False,
) -> list[Image.Image]:
    """Return the image of every request, in order; requests without their own have the steps and guidance ``drawing``.

    See `stream_images`; `on_progress(done, total)` reports progress.
    """
    images: dict[int, Image.Image] = {}
    complete = [_with_defaults(request, *drawing) for request in requests]
    for batch in stream_images(pipe, complete, policy, batch_size, exact):
        images.update(batch)
        if on_progress is not None:
            on_progress(len(images), len(requests))
    return [images[index] for index in range(len(requests))]


def stream_images(
    pipe: "DiffusionPipeline | Phases",
    requests: Sequence[ImageRequest],
    policy: PipelineInputs,
    batch_size: int = 16,
    exact: bool = False,
    threads: int = 1,
    watch: Watch = _UNSEEN,
) -> Generator[NumberedImages, None, None]:
    """Yield the images as they are finished. Requests have steps and guidance; a `guidance` of 1 or less disables it.

    The initial noise of an image comes from its own CPU generator, so with `uncond_text` "empty" SD3's image equals
    `pipe(prompt, generator=torch.Generator("cpu").manual_seed(seed), max_sequence_length=t5_max_length,
    num_inference_steps=..., guidance_scale=..., width=..., height=...)`: the same bytes when `batch_size` is 1
    or with `exact` (there with `threads` torch threads). In larger batches a few colours differ by 1/255 in fp32, more
    in half precision. With `exact`, up to `batch_size` images are generated in parallel, as cores allow.

    ``watch`` may cancel them, which raises `Cancelled` before the next operation, and sees each step.

    A model in phases has the same images, and they are finished in groups of `PER_ROUND`.
    """
    for request in requests:
        settings = pipe.pipe if isinstance(pipe, Phases) else pipe
        fault = policy.size_fault(settings, request.width, request.height) or policy.frames_fault(request.frames)
        if request.steps == 1 and settings.scheduler.config.get("shift_terminal"):
            fault = fault or "this model's scheduler has a last time, and needs at least 2 steps"
        fault = fault or policy.references_fault(len(request.references))
        if request.references and isinstance(pipe, Phases):
            fault = "references need the whole model on the device, and it does not fit; sample on a larger one"
        if fault:
            raise UserError(fault)
    batches = [[index] for index in range(len(requests))]
    if not exact:
        largest = min(batch_size, policy.largest_batch or batch_size)
        batches = list(_batches(requests, largest, policy.shares_references))
    drawing = _Drawing(requests, batches, batch_size if exact else None, threads, watch)
    yield from _in_phases(pipe, policy, drawing) if isinstance(pipe, Phases) else _all_loaded(pipe, policy, drawing)


def _with_defaults(request: ImageRequest, steps: int, guidance: float) -> ImageRequest:
    return replace(
        request,
        steps=steps if request.steps is None else request.steps,
        guidance=guidance if request.guidance is None else request.guidance,
    )


def _batches(requests: Sequence[ImageRequest], batch_size: int, shares_references: bool = False) -> Iterator[list[int]]:
    """Yield the requests' indices in batches of equal image size, steps, guidance and number of references.

    They are in order of first occurrence. ``shares_references``: those of a batch have the same references.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, request in enumerate(requests):
        references = request.references if shares_references else len(request.references)
        groups.setdefault((*request.size, request.steps, request.guidance, references), []).append(index)
    for indices in groups.values():
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


@dataclass(frozen=True)
class _Drawing:
    """Requests, and batches of their indices; with ``parallel`` each is alone, and up to that many run in parallel."""

    requests: Sequence[ImageRequest]
    batches: Sequence[list[int]]
    parallel: int | None
    threads: int
    watch: Watch

    def batch(self, number: int) -> list[ImageRequest]:
        return [self.requests[index] for index in self.batches[number]]

    def seen(self, pipe: "DiffusionPipeline", number: int) -> SeenBatch:
        """Return what shows a batch after each step."""
        first = self.batch(number)[0]
        return SeenBatch(self.watch, pipe, self.batches[number], first.height / first.width)

    def encoder(
        self, policy: PipelineInputs, pipe: "DiffusionPipeline"
    ) -> Callable[[Sequence[str]], list[EncodedText]]:
        """Return what encodes texts: together, or each alone, in any thread; those that were encoded last are kept."""
        if self.parallel is None:
            return partial(policy.encode, pipe)
        lock = Lock()  # tokenizers change their settings in each call

        @lru_cache(_CACHED_TEXTS)
        def encode_one(text: str) -> EncodedText:
            return policy.encode(pipe, [text])[0]

        def encode(texts: Sequence[str]) -> list[EncodedText]:
            with lock:
                return [encode_one(text) for text in texts]

        return encode

    def each(
        self,
        pipe: "DiffusionPipeline",
        numbers: Sequence[int],
        work: "Callable[[DiffusionPipeline, int], Result]",
    ) -> Iterator[Result]:
        """Yield the results of ``work(pipe, number)`` for batches, as they are finished."""
        if self.parallel is None:
            for number in numbers:
                with cancellable(self.watch.is_cancelled):
                    result = work(pipe, number)
                yield result
            return
        workers = max(1, min(self.parallel, len(numbers), _cores() // self.threads))
        pipes: SimpleQueue[DiffusionPipeline] = SimpleQueue()
        for _ in range(workers):
            pipes.put(_copy_pipeline(pipe))
        stopped = Event()

        def is_stopped() -> bool:
            return stopped.is_set() or (self.watch.is_cancelled is not None and self.watch.is_cancelled())

        def run(number: int) -> Result:
            own_pipe = pipes.get()
            try:
                with cancellable(is_stopped):
                    return work(own_pipe, number)
            finally:
                pipes.put(own_pipe)

        with self.torch_threads(), ThreadPoolExecutor(workers) as pool:
            try:
                for done in as_completed([pool.submit(run, number) for number in numbers]):
                    yield done.result()
            finally:  # after an error, or when the caller stops early
                stopped.set()
                pool.shutdown(cancel_futures=True)

    @contextmanager
    def torch_threads(self) -> Iterator[None]:
        """Set the number of torch threads for this thread and those started in the block, if images are alone."""
        before = torch.get_num_threads()
        torch.set_num_threads(before if self.parallel is None else self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _all_loaded(
    pipe: "DiffusionPipeline", policy: PipelineInputs, drawing: _Drawing
) -> Generator[NumberedImages, None, None]:
    encode = drawing.encoder(policy, pipe)

    @torch.no_grad()
    def generate_batch(own_pipe: "DiffusionPipeline", number: int) -> NumberedImages:
        batch = drawing.batch(number)
        arguments = policy.arguments(own_pipe, batch, encode)
        seen = drawing.seen(own_pipe, number)
        images, fault = run_pipeline(own_pipe, batch, arguments, seen.after)
        _refuse(fault, batch)
        seen.finish(images)
        return list(zip(drawing.batches[number], images, strict=True))

    with policy.prepared(pipe):
        yield from drawing.each(pipe, range(len(drawing.batches)), generate_batch)


def _in_phases(phases: Phases, policy: PipelineInputs, drawing: _Drawing) -> Generator[NumberedImages, None, None]:
    """Encode the texts of several batches, then draw all of them, then decode them."""
    for numbers in _rounds(drawing.batches):
        with drawing.torch_threads():
            arguments = _encode_texts(phases, policy, drawing, numbers)
            phases.free()
            with cancellable(drawing.watch.is_cancelled):
                decoder = phases.decoder()
                denoiser = phases.denoiser(decoder.vae)
            latents = _draw_latents(denoiser, policy, drawing, arguments)
            del denoiser
            phases.free()
            with decoder:
                for number in numbers:
                    with cancellable(drawing.watch.is_cancelled):
                        pixels = decoder.pixels(latents.pop(number).to(phases.device))
                    _refuse(not_finite({"VAE": [pixels]}), drawing.batch(number))
                    yield list(zip(drawing.batches[number], to_images(pixels), strict=True))


def _rounds(batches: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the numbers of batches that have up to `PER_ROUND` images together."""
    gathered: list[int] = []
    for number, batch in enumerate(batches):
        if gathered and sum(len(batches[other]) for other in gathered) + len(batch) > PER_ROUND:
            yield gathered
            gathered = []
        gathered.append(number)
    if gathered:
        yield gathered


@torch.no_grad()
def _encode_texts(
    phases: Phases, policy: PipelineInputs, drawing: _Drawing, numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return the arguments of the pipeline's call for batches, on the host."""
    arguments = {}
    with cancellable(drawing.watch.is_cancelled):
        encode = drawing.encoder(policy, phases.text_encoders())
        for number in numbers:
            inputs = policy.arguments(phases.pipe, drawing.batch(number), encode)
            arguments[number] = _moved(inputs, torch.device("cpu"))
    return arguments


def _draw_latents(
    pipe: "DiffusionPipeline", policy: PipelineInputs, drawing: _Drawing, arguments: Mapping[int, dict[str, Any]]
) -> dict[int, Tensor]:
    """Return the latents of batches as the VAE takes them, on the host."""

    def draw(own_pipe: "DiffusionPipeline", number: int) -> tuple[int, Tensor]:
        inputs = _moved(arguments[number], own_pipe.device)
        batch = drawing.batch(number)
        try:
            _call(own_pipe, batch, inputs, drawing.seen(own_pipe, number).after)
        except LatentsDrawn as drawn:
            latents = drawn.latents
        _refuse(not_finite({"text encoder": _tensors_of(inputs), "denoiser": [latents]}), batch)
        return number, latents.cpu()

    with policy.prepared(pipe):
        return dict(drawing.each(pipe, list(arguments), draw))


def _moved(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a pipeline's arguments with their tensors on the device."""
    moved: dict[str, Any] = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, arguments)
    return moved


def _refuse(fault: str | None, batch: Sequence[ImageRequest]) -> None:
    """Raise a UserError about what is wrong with the images of a batch, if there is something."""
    if fault:
        raise UserError(f"no image of {batch[0].prompt!r}: {fault}")


def _copy_pipeline(pipe: "DiffusionPipeline") -> "DiffusionPipeline":
    """Return a pipeline with the same weights but its own settings and scheduler, for use in another thread."""
    scheduler = copy.copy(pipe.scheduler)
    scheduler.register_to_config()  # copies the config: DPM++ writes the shift for an image size into it
    own_pipe = copy.copy(pipe)
    own_pipe.scheduler = scheduler
    if isinstance(pipe.vae, nn.Module):
        own_pipe.vae = copy.copy(pipe.vae)  # a VAE of videos keeps the last frames while it decodes
    return own_pipe


def _cores() -> int:
    """Return the cores for this process: its share among the processes of its launcher on this machine."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def run_pipeline(
    pipe: "DiffusionPipeline",
    batch: Sequence[ImageRequest],
    arguments: Mapping[str, Any],
    on_step: OnStep | None = None,
) -> tuple[list[Image.Image], str | None]:
    """Run the stock pipeline for requests of one size; return the images and what is wrong with them.

    ``arguments`` are those of `PipelineInputs.arguments`. ``on_step`` sees the latents after every step.
    """
    output, latents = _call(pipe, batch, arguments, on_step)
    pixels: Tensor = output.images if hasattr(output, "images") else output.frames.transpose(1, 2)
    computed = {"text encoder": _tensors_of(arguments), "denoiser": [latents], "VAE": [pixels]}
    return to_images(pixels), not_finite(computed)


def _call(
    pipe: "DiffusionPipeline",
    batch: Sequence[ImageRequest],
    arguments: Mapping[str, Any],
    on_step: OnStep | None,
) -> tuple[Any, Tensor]:
    """Return the output of the pipeline, and the latents after its last step."""
    latents: Tensor | None = None

    def keep_latents(_pipe: object, step: int, _time: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal latents
        latents = tensors["latents"]
        if on_step is not None:
            on_step(step, latents)
        return {}

    with _no_progress_bar(pipe), torch.no_grad():
        output = pipe(
            **arguments,
            # with a list, diffusers draws each image's noise independently of the batch
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in batch],
            width=batch[0].width,
            height=batch[0].height,
            num_inference_steps=batch[0].steps,
            callback_on_step_end=keep_latents,
            output_type="pt",
        )
    assert latents is not None, "at least one step"
    return output, latents


def _tensors_of(arguments: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in arguments.values() if isinstance(value, Tensor)]


def to_images(pixels: Tensor) -> list[Image.Image]:
    """Return images of pixels [B, 3, H, W] from 0 to 1, as stock pipelines convert them.

    Of clips [B, 3, F, H, W] they are the frames in the middle; `frames_of` returns all.
    """
    if pixels.dim() == 5:
        return [as_image(to_images(clip.transpose(0, 1))) for clip in pixels]
    images: list[Image.Image] = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(pixels.nan_to_num()))
    return images


def as_image(frames: Sequence[Image.Image]) -> Image.Image:
    """Return the image that stands for a clip: the frame in its middle. It knows the others."""
    middle = frames[len(frames) // 2]
    if len(frames) > 1:
        middle.info[_FRAMES] = list(frames)
    return middle


def frames_of(image: Image.Image) -> list[Image.Image]:
    """Return the frames of the clip that an image stands for; of an image itself."""
    frames: list[Image.Image] = image.info.get(_FRAMES, [image])
    return frames


def not_finite(computed: Mapping[str, Iterable[Tensor]]) -> str | None:
    """Return what is wrong with the first part that computed values which are not finite; None if there is none."""
    for part, tensors in computed.items():
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            return f"the {part} returned NaN or infinity; check its weights"
    return None


@contextmanager
def _no_progress_bar(pipe: "DiffusionPipeline") -> Iterator[None]:
    """Disable diffusers' progress bar (one per batch), and restore its settings afterwards."""
    settings = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**settings)
