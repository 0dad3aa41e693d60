"""A few images of the demo world at 32 px, and the smallest models."""

from pathlib import Path

import pytest

from sd3_light.config import DatasetConfig
from sd3_light.config.load_dataset import load_directories
from sd3_light.parts.images import Pool, load_pools
from sd3_light.world import write_dataset


def load(toml: Path, work: Path, max_images: int = 10**6) -> list[Pool]:
    directories, faults = load_directories(toml)
    assert not faults
    return load_pools(DatasetConfig(toml, work / "cache", directories), work, max_images, workers=0)


@pytest.fixture(scope="session")
def data_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts-data")
    write_dataset(folder / "images", 64, seed=5)
    toml = folder / "data.toml"
    toml.write_text('size_buckets = [[32, 32]]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    return toml


@pytest.fixture(scope="session")
def pools(data_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Pool]:
    return load(data_toml, tmp_path_factory.mktemp("parts-work"))
