"""Thirty images and the path of their cache."""

from pathlib import Path

import pytest

from tests.unit.sources.catalogues import write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
