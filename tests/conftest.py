"""What every test stands on: no network, one thread a process, and the mark of the folder it lies in."""

import os
import shutil

# Set before torch or a hub client is imported; child processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from collections.abc import Iterable
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


# --- a tiny project: pictures of the demo world, its frozen parts, two TOML files ----------------

PICTURES = 40
TRAIN_TOML = """
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
seed = 3
max_steps = 4
micro_batch_size_per_gpu = 4
checkpoint_every_n_steps = 2
keep_last_n_checkpoints = 0
save_dtype = "float32"
caching_batch_size = 4
caching_num_workers = 1
num_dataloader_workers = 0
sd3_shard_size = 8

[model]
train_type = "sd3_light_pretrain"
diffusers_path = "{model}"
init = "random"
size = "tiny2"
t5_max_length = 16
dtype = "float32"
uncond_text = "empty"
enable_uncond_text_dropout = true

[optimizer]
lr = 1e-3

[ema]
enable = true
decay = 0.9
update_every = 1
"""
DATA_TOML = """
size_buckets = [[64, 64], [80, 48], [48, 80]]

[[directory]]
path = "pictures"
"""


class Project:
    """A folder of a user: `train.toml`, `data.toml`, `pictures/` and what runs write beside them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.train_toml, self.data_toml = folder / "train.toml", folder / "data.toml"
        self.pictures, self.cache, self.run = folder / "pictures", folder / "cache", folder / "run"

    def load(self, *overrides: str) -> Any:
        """The config, with `key=VALUE` overrides."""
        from sd3_light.config import load_config

        return load_config(self.train_toml, overrides)

    def data(self, text: str) -> None:
        """Another dataset TOML."""
        self.data_toml.write_text(text, encoding="utf-8")

    def build_cache(self, *overrides: str, **flags: bool) -> Any:
        """Run the cache stage in this process; its report."""
        from sd3_light.stages import cache

        return cache.run(self.load(*overrides), wishes=cache.Wishes(**flags))

    def train(self, *overrides: str, resume: Any = None) -> Any:
        """Cache what is missing and train in this process; returns the progress."""
        from sd3_light.engines import Launch
        from sd3_light.journeys import cache_then_train

        return cache_then_train(self.load(*overrides), Launch(), resume=resume)

    def events(self, kind: str, run: str = "run") -> list[dict[str, Any]]:
        """The events of one kind in a run's log."""
        from sd3_light.runlog import read_log

        return [event for event in read_log(self.folder / run / "log.jsonl") if event["event"] == kind]

    def losses(self, run: str = "run") -> dict[int, float]:
        """step -> loss."""
        return {event["step"]: event["loss"] for event in self.events("step", run)}

    def copy(self, target: Path, without: Iterable[str] = ()) -> "Project":
        """The same project elsewhere; frozen parts stay where they are."""
        shutil.copytree(self.folder, target, ignore=shutil.ignore_patterns(*without))
        return Project(target, self.model)


@pytest.fixture(scope="session")
def demo_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's frozen parts without its denoiser, on the disk where tests write (so that they can be linked)."""
    from sd3_light.assets import DEMO

    return Path(
        shutil.copytree(
            DEMO, tmp_path_factory.mktemp("parts") / "model", ignore=shutil.ignore_patterns("transformer", "*.md")
        )
    )


@pytest.fixture(scope="session")
def raw_project(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Project:
    """The project before anything ran. Read only: tests take copies."""
    from sd3_light.world import write_dataset

    project = Project(tmp_path_factory.mktemp("raw") / "project", demo_parts)
    write_dataset(project.pictures, PICTURES, seed=1)
    project.train_toml.write_text(TRAIN_TOML.format(model=demo_parts), encoding="utf-8")
    project.data(DATA_TOML)
    return project


@pytest.fixture(scope="session")
def cached_project(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """The project with its cache. Read only: tests take copies."""
    project = raw_project.copy(tmp_path_factory.mktemp("cached") / "project")
    project.build_cache()
    return project


@pytest.fixture
def project(tmp_path: Path, cached_project: Project) -> Project:
    """A cached project of the test's own."""
    return cached_project.copy(tmp_path / "project")


@pytest.fixture
def fresh_project(tmp_path: Path, raw_project: Project) -> Project:
    """A project without a cache, of the test's own."""
    return raw_project.copy(tmp_path / "project")
