"""The sample stage: pictures from a model folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.export.open import open_pipeline
from sd3_light.runlog import progress
from sd3_light.sampling.generate import Request, generate, save_png
from sd3_light.sampling.grid import make_grid


@dataclass(frozen=True)
class Wishes:
    """How to sample. A size of 0 means the model's own."""

    steps: int = 28
    guidance: float = 4.0
    width: int = 0
    height: int = 0
    batch: int = 8
    negative_prompt: str = ""


def run(model: Path, prompts: Sequence[str], seeds: Sequence[int], out: Path, wishes: Wishes) -> Path:
    """One PNG for each prompt and seed, and a grid; returns the grid's path."""
    if not prompts:
        raise UserError("no prompt given; add one, or a file of prompts with --file")
    pipe, policy = open_pipeline(model, Launch().device())
    side = pipe.transformer.config.sample_size * pipe.vae_scale_factor
    size = (wishes.width or side, wishes.height or side)
    requests = [Request(prompt, seed, *size, wishes.negative_prompt) for prompt in prompts for seed in seeds]
    with progress("sample", len(requests), "images") as bar:
        images = generate(pipe, requests, policy, wishes.steps, wishes.guidance, wishes.batch, on_progress=bar.reach)
    _save(images, requests, out, wishes, model)
    grid = make_grid(images, [request.prompt for request in requests], columns=min(8, len(images)))
    grid.save(out / "grid.png")
    return out / "grid.png"


def _save(images: Sequence[Image.Image], requests: Sequence[Request], out: Path, wishes: Wishes, model: Path) -> None:
    for number, (image, request) in enumerate(zip(images, requests, strict=True)):
        facts = {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "seed": request.seed,
            "steps": wishes.steps,
            "guidance": wishes.guidance,
            "model": model.name,
        }
        save_png(image, out / f"{number:05d}.png", facts)
