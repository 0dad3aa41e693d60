"""A fixed slice of the fuzz job: the same few cases in every run."""

import os
from pathlib import Path

import pytest

from tests.fuzz.run import Case, run_case
from tests.fuzz.targets import TARGETS
from tests.fuzz.world import World
from tests.hostile import Outcome, changes, run_cli, snapshot
from tests.project import Project

NEED_A_RUN = ("checkpoint_index", "log", "log_pages")
CASES = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> World:
    world = World(tmp_path_factory.mktemp("fuzz") / "world")
    world.root.mkdir()
    world.cached = cached_project
    for part in ("project", "single_file", "lora"):
        getattr(world, part)
    return world


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in NEED_A_RUN])
def test_a_few_inputs_end_with_0_or_2(world: World, tmp_path: Path, target: str) -> None:
    for number in range(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = run_case(world, Case(target, 0, number), folder)
        assert not result.violation, (result.violation, result.command, result.outcome.err[-500:])


def test_the_runner_sees_hangs_memory_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the job can fail."""

    def run(work: object) -> Outcome:
        monkeypatch.setattr("sd3_light.cli.app", work)
        return run_cli("check", seconds=0.5, memory=1 << 28)

    os.mkfifo(tmp_path / "pipe")
    assert run(lambda: open(tmp_path / "pipe", "rb").close()).code == 124
    assert run(lambda: bytearray(1 << 30)).code == 1
    before = snapshot(tmp_path)
    (tmp_path / "new").touch()
    assert changes(before, snapshot(tmp_path)) == [str(tmp_path / "new")]
    assert changes(before, snapshot(tmp_path, [tmp_path / "new"])) == []
