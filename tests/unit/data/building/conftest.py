"""Thirty pictures and a place for their cache."""

from pathlib import Path

import pytest

from tests.unit.data.building.catalogues import pictures_in


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return pictures_in(tmp_path / "pictures")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
