"""The sample stage: pictures from a model folder, by any number of processes.

Each process takes its share of the requests, writes its pictures and is done: none waits for another but the first,
which makes the grid when all are there. A picture's name is its request's number, so no process needs to ask another.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.export.lora_file import diffusers_tensors
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.files import write_errors
from sd3_light.runlog import info, progress
from sd3_light.sampling.generate import size_fault, stream_images
from sd3_light.sampling.grid import make_grid
from sd3_light.sampling.image_requests import ImageRequest, PromptRow
from sd3_light.sampling.lora_stack import Lora, add_loras
from sd3_light.sampling.png import PNG_FACTS, parameters, read_png_facts, save_png
from sd3_light.sampling.precision import check_dtype, compute_in
from sd3_light.sampling.scheduler import SAMPLERS, check_sampler, use_sampler
from sd3_light.sampling.texts import TextPolicy

GRID = "grid.png"

_GRID_MOST = 256  # pictures on a grid
_GRID_SIDE = 384  # larger pictures are shrunk to it, for the grid
_GRID_SMALL = 128  # smaller ones are enlarged to about this
_PATIENCE = 600.0  # seconds without a new picture of another process, at least, after which there will be none


@dataclass(frozen=True)
class SampleOptions:
    """How to sample, where a row does not say it. A size of 0 means the model's own."""

    steps: int = 28
    guidance: float = 4.0
    width: int = 0
    height: int = 0
    batch: int = 8
    negative_prompt: str = ""
    sampler: str = "euler"
    dtype: str = "float32"
    loras: tuple[Lora, ...] = ()
    grid: bool = True
    threads: int = 1


def run(
    model: Path,
    rows: Sequence[PromptRow],
    seeds: Sequence[int],
    out: Path,
    wishes: SampleOptions,
    launch: Launch | None = None,
) -> Path:
    """Write OUT/00000.png, ... and the grid: each row with each seed, or once with its own. Returns what to look at.

    A picture or grid that is there already is a fault, found before the model is loaded; nothing is overwritten.
    """
    launch = launch or Launch()
    if not rows:
        raise UserError("no prompt given; add one, or a file of prompts with --file")
    check_sampler(wishes.sampler)
    _check_wishes(rows, out, wishes)
    jobs = [(row, seed) for row in rows for seed in (seeds if row.seed is None else (row.seed,))]
    share = assign_rows([row for row, _ in jobs], launch.rank, launch.world)
    shown = list(range(len(jobs)))[:_GRID_MOST] if wishes.grid and launch.is_main else []
    _refuse_to_overwrite([*(_name(out, number) for number in share), *([out / GRID] if shown else [])])
    if share or shown:
        pipe, policy = _open(model, wishes, launch)
        requests = [_request(pipe, policy, row, seed, wishes) for row, seed in jobs]
        about = _about(pipe, policy, model, wishes)
        slowest = _draw(pipe, policy, {number: requests[number] for number in share}, out, wishes, about)
        if shown:
            _await([_name(out, number) for number in shown], max(_PATIENCE, 10 * slowest))
            _make_grid({number: requests[number] for number in shown}, len(jobs), out)
    return out / GRID if wishes.grid else out


def assign_rows(rows: Sequence[PromptRow], rank: int, world: int) -> list[int]:
    """The numbers of a process's rows: alike ones are dealt in turn, so that all have about the same work."""

    def kind(number: int) -> tuple[float, ...]:
        row = rows[number]
        return tuple(value or 0 for value in (row.width, row.height, row.steps, row.guidance))

    return sorted(sorted(range(len(rows)), key=kind)[rank::world])


def _check_wishes(rows: Sequence[PromptRow], out: Path, wishes: SampleOptions) -> None:
    """Faults that need no model to be seen."""
    if not math.isfinite(wishes.guidance):
        raise UserError(f"--guidance {wishes.guidance}: give a finite number")
    for text in (wishes.negative_prompt, *(row.prompt for row in rows)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"the prompt {text!a} is no UTF-8; set the terminal to UTF-8, or use --file") from None
    parent = next(place for place in (out, *out.absolute().parents) if os.path.lexists(place))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--out {out}: {parent} is no folder that can be written to; choose another")


def _name(out: Path, number: int) -> Path:
    return out / f"{number:05d}.png"


def _refuse_to_overwrite(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise UserError(f"{path} already exists; choose another folder with --out. Nothing was changed")


def _open(model: Path, wishes: SampleOptions, launch: Launch) -> tuple[StableDiffusion3Pipeline, TextPolicy]:
    dtype = check_dtype(wishes.dtype)
    pipe, policy = open_pipeline(model, torch.device("cpu"))
    use_sampler(pipe, wishes.sampler)
    add_loras(pipe, wishes.loras, diffusers_tensors)
    compute_in(pipe, dtype)  # before the device: it need not hold the model in float32
    pipe.vae.enable_slicing()  # one picture at a time: its activations are the largest of all
    return pipe.to(launch.device()), policy


def _request(
    pipe: StableDiffusion3Pipeline, policy: TextPolicy, row: PromptRow, seed: int, wishes: SampleOptions
) -> ImageRequest:
    """A row's picture, complete; a fault names the row's place."""
    own = pipe.transformer.config.sample_size * pipe.vae_scale_factor
    width, height = row.width or wishes.width or own, row.height or wishes.height or own
    negative = wishes.negative_prompt if row.negative_prompt is None else row.negative_prompt
    fault = size_fault(pipe, width, height)
    if negative and policy.uncond_text == "zero":
        fault = 'a negative prompt, but the model was trained with uncond_text = "zero" and takes none; leave it out'
    if fault:
        raise UserError(f"{row.where}: {fault}" if row.where else fault)
    steps = wishes.steps if row.steps is None else row.steps
    guidance = wishes.guidance if row.guidance is None else row.guidance
    return ImageRequest(row.prompt, seed, width, height, negative, steps, guidance)


def _about(pipe: StableDiffusion3Pipeline, policy: TextPolicy, model: Path, wishes: SampleOptions) -> dict[str, Any]:
    """What all pictures of a command share."""
    scheduler = pipe.scheduler.config
    return {
        "sampler": wishes.sampler,
        "shift": "dynamic"
        if scheduler.get("use_dynamic_shifting")
        else scheduler.get("flow_shift", scheduler.get("shift")),
        "dtype": wishes.dtype,
        "device": pipe.device.type,
        "model": model.resolve().name,
        "loras": [{"file": lora.file.name, "strength": lora.strength} for lora in wishes.loras],
        "t5_max_length": policy.t5_max_length,
        "uncond_text": policy.uncond_text,
        "text_tokens": policy.text_tokens,
        "made_by": f"sd3-light {__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}",
    }


def _facts(request: ImageRequest, about: dict[str, Any]) -> dict[str, Any]:
    names = ("prompt", "negative_prompt", "seed", "steps", "guidance", "width", "height")
    return {name: getattr(request, name) for name in names} | about


def _draw(
    pipe: StableDiffusion3Pipeline,
    policy: TextPolicy,
    requests: dict[int, ImageRequest],
    out: Path,
    wishes: SampleOptions,
    about: dict[str, Any],
) -> float:
    """Draw and write this process's pictures; returns the longest time between two."""
    numbers, slowest, before = list(requests), 0.0, time.monotonic()
    drawing = stream_images(
        pipe,
        list(requests.values()),
        policy,
        batch_size=wishes.batch,
        exact=pipe.device.type == "cpu",
        threads=wishes.threads,
    )
    with progress("sample", len(numbers), "images") as bar, closing(drawing):
        for drawn in drawing:
            for index, image in drawn:
                path = _name(out, numbers[index])
                _refuse_to_overwrite([path])
                facts = _facts(requests[numbers[index]], about)
                metadata = {"parameters": parameters(facts, SAMPLERS[wishes.sampler]), PNG_FACTS: facts}
                with write_errors(path):
                    save_png(image, path, metadata)
            bar.advance(len(drawn))
            slowest, before = max(slowest, time.monotonic() - before), time.monotonic()
    return slowest


def _await(paths: Sequence[Path], patience: float, pause: float = 0.2) -> None:
    """Return when all files are there; a UserError after ``patience`` seconds in which none came."""
    missing, since = [path for path in paths if not path.exists()], time.monotonic()
    while missing:
        if time.monotonic() - since > patience:
            raise UserError(
                f"no grid: {len(missing)} pictures of other processes did not come, such as {missing[0]}; "
                "where machines share no folder, use --no-grid"
            )
        time.sleep(pause)
        still = [path for path in missing if not path.exists()]
        missing, since = still, time.monotonic() if len(still) < len(missing) else since


def _make_grid(requests: dict[int, ImageRequest], total: int, out: Path) -> None:
    several = len({request.seed for request in requests.values()}) > 1
    captions = [f"{one.prompt} (seed {one.seed})" if several else one.prompt for one in requests.values()]
    images = list(_thumbnails(requests, out))
    largest = max(max(image.size) for image in images)
    sheet = make_grid(images, captions, columns=min(8, len(images)), scale=max(1, _GRID_SMALL // largest))
    with write_errors(out / GRID):
        save_png(sheet, out / GRID, {})
    if total > len(images):
        info(f"the grid shows the first {len(images)} of {total} pictures")


def _thumbnails(requests: dict[int, ImageRequest], out: Path) -> Iterator[Image.Image]:
    for number, request in requests.items():
        path = _name(out, number)
        facts = read_png_facts(path)
        if (facts.get("prompt"), facts.get("seed")) != (request.prompt, request.seed):
            raise UserError(f"no grid: {path} is of another command; choose another folder with --out")
        with Image.open(path) as image:
            image.thumbnail((_GRID_SIDE, _GRID_SIDE), Image.Resampling.LANCZOS)  # never enlarges
            yield image.convert("RGB")
