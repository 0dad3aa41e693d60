"""A valid pair of TOML files in a folder, and helpers to break it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sd3_light.config import ConfigFaults, Fault, LoadedConfig, load_config

TOP = {"output_dir": '"out"', "dataset": '"data.toml"', "max_steps": "10", "save_every_n_steps": "5"}
MODEL = {"diffusers_path": '"folder"', "train_type": '"sd3_light_pretrain"'}
DATASET = 'resolutions = [256]\n[[directory]]\npath = "images"\n'


def faults_of(path: Path, overrides: tuple[str, ...] = ()) -> tuple[Fault, ...]:
    with pytest.raises(ConfigFaults) as caught:
        load_config(path, overrides)
    return caught.value.faults


class Files:
    def __init__(self, folder: Path):
        self.folder = folder
        self.train_path = folder / "train.toml"
        self.dataset_path = folder / "data.toml"

    def write(self, top: str = "", model: str = "", tables: str = "", dataset: str = DATASET) -> Path:
        """Write the files: `top` and `model`, valid values for the keys they leave out, then the tables."""
        lines = [top, *(f"{key} = {value}" for key, value in TOP.items() if f"{key} =" not in top), "[model]", model]
        lines += [f"{key} = {value}" for key, value in MODEL.items() if f"{key} =" not in model]
        self.train_path.write_text("\n".join([*lines, tables]), encoding="utf-8")
        self.dataset_path.write_text(dataset, encoding="utf-8")
        return self.train_path

    def load(self, top: str = "", model: str = "", tables: str = "", dataset: str = DATASET) -> LoadedConfig:
        return load_config(self.write(top, model, tables, dataset))

    def faults(
        self, top: str = "", model: str = "", tables: str = "", dataset: str = DATASET, overrides: tuple[str, ...] = ()
    ) -> tuple[Fault, ...]:
        return faults_of(self.write(top, model, tables, dataset), overrides)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def only_fault(files: Files) -> Callable[..., Fault]:
    def single(*args: str, **kwargs: str) -> Fault:
        faults = files.faults(*args, **kwargs)
        assert len(faults) == 1, [str(fault) for fault in faults]
        return faults[0]

    return single
