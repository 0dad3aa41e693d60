"""Runs that several tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.browser import Browser, start_browser
from tests.project import Project, without_proofs

PROMPT = "a small red circle to the left of a large blue square"
SECRET = "0123456789abcdef-a-secret-key"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = start_browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def open_page(browser: Browser, page: Path) -> Callable[..., Browser]:
    """Return a function that opens the module's page in a window of a width."""

    def show(width: int = 1280) -> Browser:
        browser.open(page, width)
        return browser

    return show


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """A project with a finished run: 4 steps with evaluation, sample grids, a secret, and one proven export."""
    project = cached_project.copy(tmp_path_factory.mktemp("finished") / "project")
    project.hold_out(8)
    text = project.train_toml.read_text().replace(
        'dataset = "data.toml"',
        'dataset = "data.toml"\neval_datasets = [{ name = "held_out", config = "eval.toml" }]\n'
        "eval_every_n_steps = 2\neval_before_first_step = true",
    )
    sampling = f'\n[sampling]\nprompts = ["{PROMPT}"]\nseeds = [1, 2]\nevery_n_steps = 2\nsteps = 2\nguidance = 2.0\n'
    project.train_toml.write_text(f'{text}{sampling}\n[monitoring]\nwandb_api_key = "{SECRET}"\n')
    project.train()
    return project


@pytest.fixture(scope="session")
def export_folder(finished: Project) -> Path:
    """The proven export of the finished run. Read-only."""
    return Path(finished.run / "exports" / "step-00000004")


WHOLE_STEPS = 15  # one epoch has 11


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """A project with an uninterrupted run of 15 steps and a checkpoint after each."""
    project = cached_project.copy(tmp_path_factory.mktemp("whole") / "project")
    with without_proofs():
        project.train(f"max_steps={WHOLE_STEPS}", "checkpoint_every_n_steps=1")
    return project
