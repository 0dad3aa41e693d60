"""The valid files that the fuzz job starts from, built once: a project, its cache and run, a model, a LoRA."""

import os
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel

from sd3_light.assets import DEMO
from sd3_light.config import SIZES
from sd3_light.export.lora_file import write_lora
from sd3_light.model.lora_layers import LoraModule
from sd3_light.world import write_dataset
from tests.hostile import run_cli
from tests.project import DATA_TOML, TRAIN_TOML, Project

_IMAGES = 6


def _run(*arguments: object) -> None:
    outcome = run_cli(*arguments, seconds=300)
    assert outcome.code == 0, outcome


class World:
    """Everything below ``root`` is read-only after it is built: a case works on copies."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def model(self) -> Path:
        """A complete model folder of one block."""
        folder = self.root / "model"
        shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("transformer", "*.md"))
        size = replace(SIZES["tiny2"], num_layers=1)
        SD3Transformer2DModel(**size.transformer_config()).save_pretrained(folder / "transformer")
        return folder

    @cached_property
    def project(self) -> Project:
        """A project without a cache, with few images."""
        project = Project(self.root / "project", self.model)
        write_dataset(project.images, _IMAGES, seed=1)
        text = TRAIN_TOML.format(model=self.model).replace("max_steps = 4", "max_steps = 1")
        project.train_toml.write_text(text.replace("checkpoint_every_n_steps = 2", "checkpoint_every_n_steps = 1"))
        project.data(DATA_TOML)
        return project

    @cached_property
    def run(self) -> Project:
        """The project with its cache and a run of one step."""
        project = self.project.copy(self.root / "run_project")
        _run("train", project.train_toml)
        shutil.rmtree(project.run / "exports", ignore_errors=True)
        return project

    @cached_property
    def cached(self) -> Project:
        project = self.project.copy(self.root / "cached_project")
        _run("cache", project.train_toml)
        return project

    @cached_property
    def single_file(self) -> Path:
        path = self.root / "single.safetensors"
        _run("convert", self.model, path)
        return path

    @cached_property
    def lora(self) -> Path:
        names = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_v")
        modules = {name: LoraModule(torch.ones(2, 128), torch.ones(128, 2)) for name in names}
        return write_lora(self.root / "lora.safetensors", modules)

    @cached_property
    def images(self) -> list[tuple[str, bytes]]:
        return [(path.name, path.read_bytes()) for path in sorted(self.project.images.glob("*.png"))]

    def linked_model(self, target: Path) -> Path:
        """Return a copy of the model whose files are links; replace a file, never write into it."""
        return Path(shutil.copytree(self.model, target, copy_function=os.link))


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file that may be a link to one of the world's."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
