"""Two real processes (gloo) draw one grid: the same as one process draws."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from sd3_light.config import SIZES, TrainConfig
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.engines import Launch
from sd3_light.model.random_weights import new_transformer
from sd3_light.training.module import SD3TrainingModule
from sd3_light.training.samples import Sampler
from tests.project import Project

PROMPTS = ["a large red circle", "two small blue squares", "a star"]
SAMPLING = (f"sampling.prompts={json.dumps(PROMPTS)}", "sampling.every_n_steps=1", "sampling.steps=2")


def draw(config: TrainConfig, cache: Path, out: Path, launch: Launch) -> bool:
    """Draw the grid of a denoiser whose pictures show their text; whether this rank was given it."""
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.08, generator=generator)
    sampler = Sampler.of_config(config, cache, CachedDataset(LocalStore(cache)), launch, torch.device("cpu"))
    group = dist.new_group(backend="gloo") if launch.world > 1 else None
    return sampler.sample(SD3TrainingModule(transformer, config).denoise, out, {"step": 1}, group) is not None


def one_of(rank: int, world: int, config: TrainConfig, cache: Path, out: Path) -> None:
    """A process of its own; its exit code says whether it was given the grid."""
    meeting = f"file://{out.with_suffix('.meeting')}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    given = draw(config, cache, out, Launch(rank, rank, world))
    dist.destroy_process_group()
    raise SystemExit(10 if given else 11)


def test_two_processes_draw_the_grid_of_one(project: Project, tmp_path: Path) -> None:
    """Three pictures for two ranks: one draws a picture twice, and the grid has three."""
    project.build_cache(*SAMPLING)
    config = project.load(*SAMPLING).train
    assert draw(config, project.cache, tmp_path / "one.png", Launch())
    fork = multiprocessing.get_context("fork")  # spares both the seconds that torch takes to import
    arguments = (config, project.cache, tmp_path / "two.png")
    ranks = [fork.Process(target=one_of, args=(rank, 2, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
    for process in ranks:
        process.kill()
    assert [process.exitcode for process in ranks] == [10, 11]
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "two.png") as two:
        assert one.text == two.text  # type: ignore[attr-defined]
        alone, together = (np.asarray(image).astype(int) for image in (one, two))
    assert np.abs(alone - together).max() <= 1
    assert len(np.unique(alone)) > 50, "something is in the pictures"
