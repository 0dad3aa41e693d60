"""The benchmark scripts as modules."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: scripts have names of other modules
COMMON = ("ablations", "basics", "models", "processes", "world")


@pytest.fixture(scope="module")
def scripts() -> SimpleNamespace:
    """Modules of the benchmarks by name."""
    names = ("run_list", "ablate", "real_size", "step", *(f"common.{name}" for name in COMMON))
    return SimpleNamespace(**{name.removeprefix("common."): importlib.import_module(name) for name in names})
