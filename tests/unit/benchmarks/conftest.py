"""The benchmark scripts as modules."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """Modules of the benchmarks by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = ("paired", "lanes", "run_list", "world_runs", "ablate", "real_families", "real_size")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
