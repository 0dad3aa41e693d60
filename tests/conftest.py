"""Shared setup and fixtures: no network, one thread per process, a mark per test folder, a small project."""

import gc
import os
import shutil
import signal
import sys

# Set before torch or a hub client is imported; child processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_ETAG_TIMEOUT"] = os.environ["HF_HUB_DOWNLOAD_TIMEOUT"] = "120"  # a busy machine is slow
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sd3_light.system import available_memory
from tests import warm
from tests.project import DATA_TOML, NUM_IMAGES, TRAIN_TOML, Project, without_proofs

TESTS = Path(__file__).parent
FOLDERS = ("unit", "distributed", "e2e", "gpu", "docs", "fuzz")
TEMPORARY_BYTES = 12 * 2**30
"""More than what all tests write, and what their processes need beside it."""

FEW_OBJECTS = 50_000


def pytest_configure() -> None:
    """Keep temporary files in memory where there is plenty: most tests write and sync many small files.

    Write bytecode, whatever the environment says: without it every child process would compile the package.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    memory = Path("/dev/shm")
    if memory.is_dir() and min(shutil.disk_usage(memory).free, available_memory() or 0) > TEMPORARY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_collection_finish() -> None:
    """Leave what exists by now out of garbage collections, which the package asks for and which get slow."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _quick_garbage_collections() -> None:
    """Leave out, too, what was imported and cached since: every cache and every run collects garbage a few times."""
    if len(gc.get_objects()) > FEW_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder, before `-m` selects."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else str(item.path.parent)
        if folder not in FOLDERS:
            raise pytest.UsageError(f"{item.path}: tests belong in tests/{{{','.join(FOLDERS)}}}; move this file there")
        item.add_marker(getattr(pytest.mark, folder))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests, by name, where there is no GPU; only GPU tests import torch for this."""
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip(f"needs CUDA: {item.name}")


def pytest_runtest_teardown() -> None:
    """Turn oneDNN on again: torch turns it off for the whole process after the first bf16 product (Muon has some) on a
    CPU without bf16, and the next test would compute with other rounding than its fixtures."""
    if torch := sys.modules.get("torch"):
        torch.backends.mkldnn.set_flags(True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Schedule whole files, so that expensive fixtures run once, and all distributed tests on one worker.

    A distributed test already uses several cores; two at a time starve each other. (`--dist loadgroup` would do the
    same with marks, but pytest-xdist 3.8 does not group under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "distributed" if nodeid.startswith("tests/distributed/") else nodeid.split("::", 1)[0]

    return FileScheduling(config, log)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restore the environment variables that a test, or a library that it imported, has set or removed."""
    os.environ.pop("PYTHONSAFEPATH", None)  # of a command that a fixture of the module ran in this process
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True, scope="module")
def _same_main_process() -> Iterator[None]:
    """Restore whether this process prints: a server of `sd3-light ui` in this process turns that off."""
    from sd3_light.runlog import console

    before = console._main_process
    yield
    console._main_process = before


@pytest.fixture(autouse=True)
def _same_signal_handlers() -> Iterator[None]:
    """Restore the handlers that a test has set: child processes of later tests would inherit an ignored signal."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start child processes, also those of the package, with the large libraries imported, once for all workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder, owner = tmp_path_factory.getbasetemp().parent / "warm", os.getppid()
        folder.mkdir(exist_ok=True)
    else:
        folder, owner = tmp_path_factory.mktemp("warm"), os.getpid()
    sys.executable = str(warm.install(folder, owner))
    yield
    sys.executable = warm.REAL_PYTHON


@pytest.fixture(scope="session")
def demo_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's text encoders and a smaller, untrained VAE, without a denoiser, on the tests' file system (so that
    hard links work)."""
    import torch
    from diffusers import AutoencoderKL

    from sd3_light.assets import DEMO

    target = tmp_path_factory.mktemp("parts") / "model"
    shutil.copytree(DEMO, target, ignore=shutil.ignore_patterns("transformer", "*.md"))
    config = {**AutoencoderKL.load_config(target / "vae"), "block_out_channels": [8] * 4, "norm_num_groups": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKL.from_config(config)
    vae.encoder.conv_out.bias.data[config["latent_channels"] :] = -6.0  # latents with little noise
    vae.save_pretrained(target / "vae")
    return target


@pytest.fixture(scope="session")
def raw_project(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Project:
    """The project before any stage ran. Read-only: tests use copies."""
    from sd3_light.world import write_dataset

    project = Project(tmp_path_factory.mktemp("raw") / "project", demo_parts)
    write_dataset(project.images, NUM_IMAGES, seed=1)
    project.train_toml.write_text(TRAIN_TOML.format(model=demo_parts), encoding="utf-8")
    project.data(DATA_TOML)
    return project


@pytest.fixture(scope="session")
def cached_project(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """The project with its cache. Read-only: tests use copies."""
    project = raw_project.copy(tmp_path_factory.mktemp("cached") / "project")
    project.build_cache()
    return project


@pytest.fixture
def project(tmp_path: Path, cached_project: Project) -> Project:
    """A writable copy of the project with its cache."""
    return cached_project.copy(tmp_path / "project")


@pytest.fixture
def fresh_project(tmp_path: Path, raw_project: Project) -> Project:
    """A writable copy of the project without a cache."""
    return raw_project.copy(tmp_path / "project")


@pytest.fixture
def unproven() -> Iterator[None]:
    """Skip the proofs of exports."""
    with without_proofs():
        yield
