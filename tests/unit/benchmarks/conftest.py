"""The benchmark scripts as modules."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COMMON = ("ablations", "basics", "models", "processes", "world")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """Modules of the benchmarks by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = ("run_list", "ablate", "real_size", "step", *(f"common.{name}" for name in COMMON))
        yield SimpleNamespace(**{name.removeprefix("common."): importlib.import_module(name) for name in names})
