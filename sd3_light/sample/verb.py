"""The sample stage: generate images from a model folder with any number of processes.

Each process generates its share of the requests. Only the main process waits for the others, to make the grid. An
image is named by the number of its request, so processes need not communicate.
"""

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.core.caption_lengths import cut_prompts
from sd3_light.core.sampling import ImageRequest, PipelineInputs
from sd3_light.engines import Launch
from sd3_light.export.chosen import ChosenModel, choose_model
from sd3_light.export.lora_merge import add_adapters, draw_as_adapters, text_folder
from sd3_light.export.lora_stack import Lora, set_strengths
from sd3_light.export.lycoris_file import is_lycoris
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.export.weights_fingerprint import file_fingerprint, model_fingerprint
from sd3_light.files import sweep_files, write_errors
from sd3_light.flow.scheduler import check_sampler, sampler_title, use_sampler, with_shift
from sd3_light.runlog import info, progress
from sd3_light.sample.generate import choose_drawing, frames_of, stream_images
from sd3_light.sample.grid import make_thumbnail_grid
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.phases import Phases
from sd3_light.sample.png import PNG_FACTS, parameters, read_png_facts, save_new_png, save_png
from sd3_light.sample.precision import check_dtype, compute_in
from sd3_light.sample.watch import Watch
from sd3_light.sources.video import clip_suffix, has_av, write_video

GRID = "grid.png"

_REQUEST_FACTS = ("prompt", "negative_prompt", "seed", "steps", "guidance", "width", "height")
_MAX_GRID_IMAGES = 256
_MIN_TIMEOUT_SEC = 600.0  # without a new image from another process


@dataclass(frozen=True)
class SampleOptions:
    """How to sample, unless a row overrides it. A size of 0 means the model's own, and so do 0 frames, and None.

    ``shift`` replaces the shift of the model's scheduler by a constant one.
    """

    steps: int | None = None
    guidance: float | None = None
    width: int = 0
    height: int = 0
    batch: int = 8
    negative_prompt: str = ""
    sampler: str = "euler"
    dtype: str = "float32"
    loras: tuple[Lora, ...] = ()
    grid: bool = True
    threads: int = 1
    best: bool = False
    frames: int = 0
    shift: float | None = None
    references: tuple[Path, ...] = ()


def run(
    model: Path,
    rows: Sequence[PromptRow],
    seeds: Sequence[int],
    out: Path,
    options: SampleOptions,
    launch: Launch | None = None,
) -> Path:
    """Write OUT/00000.png, ... and the grid: each row with each seed, or once with its own seed.

    ``model`` may be a run folder (see `choose_model`). Returns the path to show to the user: the grid or the folder.
    Nothing is overwritten: numbers continue after those in the folder. Several processes, which do not communicate,
    need a folder without such images.
    """
    launch = launch or Launch()
    if not rows:
        raise UserError("no prompt; pass one, or a prompt file with --file")
    check_sampler(options.sampler)
    _check_options(rows, out, options)
    jobs = [(row, seed) for row in rows for seed in (seeds if row.seed is None else (row.seed,))]
    first = first_free_number(out) if launch.world_size == 1 else 0
    share = [first + number for number in assign_rows([row for row, _ in jobs], launch.rank, launch.world_size)]
    shown = list(range(first, first + len(jobs)))[:_MAX_GRID_IMAGES] if options.grid and launch.is_main else []
    grid = out / (f"grid-{first:05d}.png" if first else GRID)
    _refuse_to_overwrite([*(image_path(out, number) for number in share), *([grid] if shown else [])])
    if share or shown:
        sweep_images(out)
        opened = open_model(model, options, launch)
        requests = {first + at: opened.request(row, seed) for at, (row, seed) in enumerate(jobs)}
        if launch.is_main:
            choose_drawing(opened.policy, options.steps, options.guidance)
        for line in opened.cut_prompts(requests.values()):
            info(f"warning: {line}")
        if launch.is_main and any(request.frames > 1 for request in requests.values()) and not has_av():
            info("clips are written as .webp; for .mp4 run `pip install 'sd3-light[video]'`")
        slowest = _generate(opened, {number: requests[number] for number in share}, out)
        if shown:
            _wait_for([image_path(out, number) for number in shown], max(_MIN_TIMEOUT_SEC, 10 * slowest))
            _make_grid({number: requests[number] for number in shown}, len(jobs), out, grid)
    return grid if options.grid else out


def assign_rows(rows: Sequence[PromptRow], rank: int, world_size: int) -> list[int]:
    """Return the numbers of a process's rows. Similar rows are spread evenly, so that all have about the same work."""

    def cost_key(number: int) -> tuple[float, ...]:
        row = rows[number]
        return tuple(value or 0 for value in (row.width, row.height, row.steps, row.guidance))

    return sorted(sorted(range(len(rows)), key=cost_key)[rank::world_size])


def _check_options(rows: Sequence[PromptRow], out: Path, options: SampleOptions) -> None:
    """Raise a UserError for faults that can be detected without the model."""
    if options.guidance is not None and not math.isfinite(options.guidance):
        raise UserError(f"--guidance {options.guidance}: pass a finite number")
    for text in (options.negative_prompt, *(row.prompt for row in rows)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"the prompt {text!a} is not UTF-8; set the terminal to UTF-8, or use --file") from None
    parent = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--out {out}: {parent} is not a writable folder; choose another")


def image_path(out: Path, number: int) -> Path:
    """Return the path of an image by its number."""
    return out / f"{number:05d}.png"


def first_free_number(out: Path) -> int:
    """Return the number after the highest of the images in the folder."""
    numbers = [int(path.stem) for path in out.glob("*.png") if re.fullmatch(r"\d{5,}", path.stem)]
    return max(numbers, default=-1) + 1


def sweep_images(out: Path) -> None:
    """Remove the parts of images that killed processes left in the folder."""
    sweep_files(out, [".*.png.*~*~*.tmp"])


def _refuse_to_overwrite(paths: Sequence[Path]) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise UserError(f"{path} already exists; choose another folder with --out. Nothing was changed")


@dataclass(frozen=True)
class OpenModel:
    """A model with its adapters, loaded or in phases; ``options`` are those of the images to draw next.

    ``scheduler`` is the model's own, with what its adapters state.
    """

    pipe: DiffusionPipeline | Phases
    policy: PipelineInputs
    chosen: ChosenModel
    options: SampleOptions
    scheduler: Any = None

    def adjusted(self, options: SampleOptions) -> "OpenModel":
        """Return the same loaded model for other options with the same `weights_key`.

        Sampler, shift and strengths of the loaded model change too: of several, only the one returned last is used.
        """
        loras = (*self.chosen.loras, *options.loras)
        pipe = self.pipe
        # the scheduler first: where it does not take the options, the strengths stay those of `self.options`
        _set_scheduler(pipe.pipe if isinstance(pipe, Phases) else pipe, self.scheduler, options, self.policy)
        if isinstance(pipe, Phases):
            pipe = replace(pipe, loras=loras)
        elif loras != (*self.chosen.loras, *self.options.loras):
            set_strengths(pipe, loras)
        return replace(self, pipe=pipe, options=options)

    def request(self, row: PromptRow, seed: int) -> ImageRequest:
        """Return the complete request of a row; an error names the row's file and line."""
        options = self.options
        pipe = self.pipe.pipe if isinstance(self.pipe, Phases) else self.pipe
        default_width, default_height = self.policy.default_size(pipe)
        width = row.width or options.width or default_width
        height = row.height or options.height or default_height
        negative = options.negative_prompt if row.negative_prompt is None else row.negative_prompt
        frames = options.frames or self.policy.default_frames
        fault = self.policy.size_fault(pipe, width, height) or self.policy.frames_fault(frames)
        fault = fault or self.policy.references_fault(len(options.references))
        if negative:
            fault = self.policy.negative_fault() or fault
        if fault:
            raise UserError(f"{row.where}: {fault}" if row.where else fault)
        guidance = options.guidance if row.guidance is None else row.guidance
        drawing = self.policy.drawing(row.steps or options.steps, guidance)
        return ImageRequest(row.prompt, seed, width, height, negative, *drawing, frames, options.references)

    def cut_prompts(self, requests: Iterable[ImageRequest]) -> list[str]:
        """Return one line per prompt or negative prompt that the text encoders cut."""
        texts = [text for request in requests for text in (request.prompt, request.negative_prompt)]
        return cut_prompts(texts, self.policy.text_limits(self.chosen.folder))

    def draw(
        self,
        requests: Mapping[int, ImageRequest],
        out: Path,
        renumber: bool = False,
        watch: Watch | None = None,
    ) -> Iterator[dict[int, Path]]:
        """Generate the images and write each to ``out`` by its number; yield the files by number as they are written.

        A number that another process has used meanwhile is an error, or, with ``renumber``, replaced by the next free
        one. ``watch`` follows the images by their index among the requests.
        """
        numbers = list(requests)
        options = self.options
        common = self._common_facts()
        exact = self.pipe.device.type == "cpu"
        images = list(requests.values())
        batches = stream_images(
            self.pipe,
            images,
            self.policy,
            batch_size=options.batch,
            exact=exact,
            threads=options.threads,
            watch=watch or Watch(),
        )
        with closing(batches):
            for batch in batches:
                files = {}
                for index, image in batch:
                    facts = {name: getattr(images[index], name) for name in _REQUEST_FACTS} | common
                    if references := [path.name for path in images[index].references]:
                        facts["references"] = references
                    facts |= {"frames": images[index].frames} if images[index].frames > 1 else {}
                    title = sampler_title(self.pipe.scheduler, options.sampler)
                    metadata = {"parameters": parameters(facts, title), PNG_FACTS: facts}
                    files[numbers[index]] = _write_image(image, metadata, out, numbers[index], renumber)
                yield files

    def _common_facts(self) -> dict[str, Any]:
        """Return the metadata that all images share."""
        scheduler = self.pipe.scheduler.config
        options = self.options
        shift = scheduler.get("flow_shift", scheduler.get("shift"))
        loras = (*self.chosen.loras, *options.loras)
        return {
            "sampler": options.sampler,
            "shift": "dynamic" if scheduler.get("use_dynamic_shifting") else shift,
            "dtype": options.dtype,
            "device": self.pipe.device.type,
            "threads": options.threads,
            "model": self.chosen.folder.resolve().name,
            "fingerprint": model_fingerprint(self.chosen.folder),
            "loras": [lora_facts(lora) for lora in loras],
            **self.policy.facts(),
            "made_by": f"sd3-light {__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}",
        }


def lora_facts(lora: Lora) -> dict[str, Any]:
    """Return what an image says about a LoRA."""
    return {"file": lora.file.name, "strength": lora.strength, "fingerprint": file_fingerprint(lora.file)}


def _write_image(image: Image.Image, metadata: Mapping[str, Any], out: Path, number: int, renumber: bool) -> Path:
    """Write an image by its number, with ``renumber`` by the next free one where that is taken; return its path."""
    while True:
        path = image_path(out, number)
        with write_errors(path):
            try:
                if len(frames_of(image)) > 1 and not path.exists():
                    write_video(path.with_suffix(clip_suffix()), frames_of(image))
                save_new_png(image, path, metadata)
            except FileExistsError:
                if renumber:
                    number = first_free_number(out)
                else:
                    _refuse_to_overwrite([path])
            else:
                return path


def weights_key(chosen: ChosenModel, options: SampleOptions) -> object:
    """Return what decides the weights of an open model; of adapters that are not merged, not their strengths."""
    loras = [(lora.file, lora.strength if is_lycoris(lora.file) else None) for lora in options.loras]
    return chosen, tuple(loras), options.dtype


def open_model(model: Path, options: SampleOptions, launch: Launch) -> OpenModel:
    """Open a model folder, or an export of a run folder (see `choose_model`), with the adapters of the options.

    All parts stay loaded where they fit on the device.
    """
    chosen = choose_model(model, options.best)
    if chosen.text_facts != model:
        info(f"using {chosen.text_facts}")
    dtype = check_dtype(options.dtype)
    loras = (*chosen.loras, *options.loras)
    text = text_folder(chosen, options.loras)
    encoded = replace(chosen, text_facts=text)
    if (in_phases := Phases.of_model(encoded, loras, launch.device(), dtype)) is not None:
        phases, policy = in_phases
        opened = OpenModel(phases, policy, chosen, options, phases.scheduler)
        return opened.adjusted(options)
    # a LoKr or LoHa is added to the weights, in float32
    loaded_dtype = torch.float32 if any(is_lycoris(lora.file) for lora in loras) else dtype
    pipe, policy = open_pipeline(chosen.folder, torch.device("cpu"), text, loaded_dtype)
    policy = draw_as_adapters(pipe, policy, loras)
    own = pipe.scheduler
    _set_scheduler(pipe, own, options, policy)  # reports a wrong sampler before the rest is loaded
    add_adapters(pipe, loras)
    compute_in(pipe, dtype)  # before the move: the device need not hold the model in float32
    pipe.vae.enable_slicing()  # one image at a time: its activations are the largest
    return OpenModel(pipe.to(launch.device()), policy, chosen, options, own)


def _set_scheduler(pipe: Any, own: Any, options: SampleOptions, policy: PipelineInputs) -> None:
    """Give a pipeline its own scheduler with the sampler and the shift of the options."""
    pipe.scheduler = own if options.shift is None else with_shift(own, options.shift)
    use_sampler(pipe, options.sampler, policy)


def _generate(model: OpenModel, requests: Mapping[int, ImageRequest], out: Path) -> float:
    """Generate and write this process's images; return the longest time between two batches, in seconds."""
    slowest = 0.0
    last = time.monotonic()
    with progress("sample", len(requests), "images") as bar:
        for files in model.draw(requests, out):
            bar.advance(len(files))
            slowest = max(slowest, time.monotonic() - last)
            last = time.monotonic()
    return slowest


def _wait_for(paths: Sequence[Path], timeout: float, pause: float = 0.2) -> None:
    """Wait until all files exist; raise a UserError after ``timeout`` seconds without a new one."""
    missing = [path for path in paths if not path.exists()]
    last_change = time.monotonic()
    while missing:
        if time.monotonic() - last_change > timeout:
            raise UserError(
                f"no grid: {len(missing)} images of other processes are missing, such as {missing[0]}; "
                "use --no-grid if the machines do not share a folder"
            )
        time.sleep(pause)
        still_missing = [path for path in missing if not path.exists()]
        if len(still_missing) < len(missing):
            missing = still_missing
            last_change = time.monotonic()


def _make_grid(requests: dict[int, ImageRequest], total: int, out: Path, path: Path) -> None:
    several_seeds = len({request.seed for request in requests.values()}) > 1
    captions = [f"{r.prompt} (seed {r.seed})" if several_seeds else r.prompt for r in requests.values()]
    images = [image_path(out, number) for number in requests]
    for image, request in zip(images, requests.values(), strict=True):
        facts = read_png_facts(image)
        if (facts.get("prompt"), facts.get("seed")) != (request.prompt, request.seed):
            raise UserError(f"no grid: {image} was written by another command; choose another folder with --out")
    sheet = make_thumbnail_grid(images, captions, columns=8)
    with write_errors(path):
        save_png(sheet, path, {})
    if total > len(images):
        info(f"the grid shows the first {len(images)} of {total} images")
