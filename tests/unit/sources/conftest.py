"""Thirty images, the path of their cache, and a catalogue of small parts."""

from pathlib import Path

import pytest

from sd3_light.sources import catalogue, claims
from tests.unit.sources.catalogues import write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, so that thirty rows fill several."""
    monkeypatch.setattr(catalogue, "PART_ROWS", 8)
    monkeypatch.setattr(claims, "POLL_SECONDS", 0.01)
