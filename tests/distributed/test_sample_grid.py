"""Two processes sample the grid, and write the sample files, of one."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.config import SIZES, TrainConfig
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.engines import Launch
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.sample.in_training import SampledCache, Sampler
from tests.distributed.layouts import run_ranks
from tests.project import Project
from tests.waiting import HANG_SECONDS

PROMPTS = ["a large red circle", "two small blue squares", "a star"]
SAMPLING = (f"sampling.prompts={json.dumps(PROMPTS)}", "sampling.every_n_steps=1", "sampling.steps=2")


def sample_grid(config: TrainConfig, cache: Path, out: Path, launch: Launch) -> bool:
    """Sample the grid of a random denoiser that depends on its text; return whether this rank got the grid."""
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.08, generator=generator)
    data = CachedDataset(LocalStore(cache))
    sampler = Sampler.of_config(config, SampledCache(cache, data, data.buckets[0]), launch, torch.device("cpu"))
    group = dist.new_group(backend="gloo") if launch.world_size > 1 else None
    return sampler.sample(SD3TrainingModule(transformer, config).denoise, out, {"step": 1}, group) is not None


def run_rank(rank: int, world: int, config: TrainConfig, cache: Path, out: Path) -> None:
    """Run one rank in a process; exit with 10 if it got the grid, else 11."""
    rendezvous = f"file://{out.with_suffix('.rendezvous')}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    has_grid = sample_grid(config, cache, out, Launch(rank, rank, world))
    dist.destroy_process_group()
    raise SystemExit(10 if has_grid else 11)


def test_two_processes_sample_the_grid_of_one(project: Project, tmp_path: Path) -> None:
    """Three images for two ranks: one is sampled twice, and the grid has three."""
    project.build_cache(*SAMPLING)
    config = project.load(*SAMPLING).train
    assert sample_grid(config, project.cache, tmp_path / "one.png", Launch())
    fork = multiprocessing.get_context("fork")  # saves the seconds of importing torch
    arguments = (config, project.cache, tmp_path / "two.png")
    ranks = [fork.Process(target=run_rank, args=(rank, 2, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(HANG_SECONDS)
    for process in ranks:
        process.kill()
    assert [process.exitcode for process in ranks] == [10, 11]
    with Image.open(tmp_path / "one.png") as first, Image.open(tmp_path / "two.png") as second:
        assert first.text == second.text  # type: ignore[attr-defined]
        alone, together = (np.asarray(image).astype(int) for image in (first, second))
    assert np.abs(alone - together).max() <= 1
    assert len(np.unique(alone)) > 50, "the images are not blank"


def sample(out: Path, table: Path, processes: int) -> str:
    """Run `sd3-light sample` in some processes; return its stdout."""
    command = ["-m", "sd3_light", "sample", DEMO, "a star", "--file", table, "--seed", 1, "--seed", 2]
    return run_ranks(processes, *command, "--steps", 2, "--out", out).stdout


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow  # test_sample.py compares the shares of two ranks in one process
def test_two_processes_write_the_files_of_one(tmp_path: Path) -> None:
    table = tmp_path / "prompts.csv"
    table.write_text("prompt,seed,width\na large red circle,,\ntwo blue squares,7,80\n", encoding="utf-8")
    alone = sample(tmp_path / "one", table, 1)
    together = sample(tmp_path / "two", table, 2)
    expected = files(tmp_path / "one")
    assert sorted(expected) == [*(f"0000{number}.png" for number in range(5)), "grid.png"]
    assert files(tmp_path / "two") == expected
    assert alone.count("wrote") == together.count("wrote") == 1
