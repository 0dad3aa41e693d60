"""What every test stands on: no network, one thread a process, and the mark of the folder it lies in."""

import os

# Set before torch or a hub client is imported; child processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
FOLDERS = ("unit", "distributed", "e2e", "gpu", "docs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, before `-m` chooses among them."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else str(item.path.parent)
        if folder not in FOLDERS:
            raise pytest.UsageError(f"{item.path}: a test lies in one of tests/{{{','.join(FOLDERS)}}}, move it there")
        item.add_marker(getattr(pytest.mark, folder))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests by name where there is no GPU; torch is imported for no other test."""
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip(f"needs CUDA: {item.name}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give a worker whole files, so that costly fixtures are made once, and all distributed tests to one worker.

    A distributed test takes several cores already; two at a time starve each other. (`--dist loadgroup` would say the
    same with marks, but pytest-xdist 3.8 does not group under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByWeight(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "distributed" if nodeid.startswith("tests/distributed/") else nodeid.split("::", 1)[0]

    return ByWeight(config, log)
