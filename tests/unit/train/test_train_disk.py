"""A disk that is too small for a run: a warning before the first step, and an end after the first failed save."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.check import verb as check
from sd3_light.checkpoint.store import write_part
from sd3_light.cli.process import run_guarded
from sd3_light.train import verb as train
from sd3_light.train.verb import Resume
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")

STEPS = ("max_steps=12", "checkpoint_every_n_steps=2")


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets checkpoints fail from a step on."""

    def fill(first: int) -> None:
        def write(folder: Path, *args: Any) -> int:
            if int(folder.name.removeprefix(".step-").partition(".")[0]) >= first:
                raise OSError(28, "No space left on device")
            return write_part(folder, *args)

        monkeypatch.setattr("sd3_light.checkpoint.background.write_part", write)

    return fill


def run(project: Project, *keys: str, resume: Resume | None = None) -> int:
    return run_guarded(lambda: train.run(project.load(*STEPS, *keys), resume=resume))


def test_a_run_warns_with_the_figures_of_check(project: Project, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    loaded = project.load("max_steps=2")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=60 << 10))
    verdict = dict(check.conclude(loaded.train, check.run(loaded), check.Target(on_cpu=True)))["disk, run"]
    assert verdict.startswith("does not fit: ")
    capfd.readouterr()
    train.run(loaded)
    lines = capfd.readouterr().err.splitlines()
    assert f"warning: disk, run: {verdict}" in lines, "and the run trains: the estimate is one"
    begun = next(number for number, line in enumerate(lines) if line.startswith("train: random weights"))
    assert lines[begun + 1].startswith("warning: disk, run: "), "before the first step"


def test_a_run_that_may_continue_trains_to_the_end(project: Project, fill_disk: Any, capfd: Any) -> None:
    fill_disk(0)
    assert run(project, "stop_if_first_save_fails=false") == 2
    text = capfd.readouterr().err
    assert "no checkpoint was ever saved" in text
    assert "intact" not in text
    assert max(project.losses()) == 12


def test_a_run_with_a_checkpoint_continues_after_a_failed_save(project: Project, fill_disk: Any, capfd: Any) -> None:
    fill_disk(4)
    assert run(project) == 2
    text = capfd.readouterr().err
    assert "; earlier checkpoints are intact; free disk space or fix the disk, then resume" in text
    assert "ever saved" not in text
    assert max(project.losses()) == 12
    assert run(project, resume=Resume()) == 2, "the checkpoint of the run that it resumes counts"
    assert "earlier checkpoints are intact" in capfd.readouterr().err
    fill_disk(100)
    assert run(project, resume=Resume()) == 0
    assert "disk" not in capfd.readouterr().err, "a run that fits has no warning"
