"""Ranks, world size and CPU threads under every launcher and without one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.engines import Launch, cpu_threads
from sd3_light.engines.cpu_threads import FLOPS_PER_THREAD, limit_threads, use_training_threads

MUCH = 1000 * FLOPS_PER_THREAD


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_launchers_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Launch.detect() == Launch(rank=0, local_rank=0, world_size=1)
    with pytest.raises(UserError, match="--local_rank"):
        Launch.detect(local_rank=0)
    set_variables(monkeypatch, TORCHELASTIC_RUN_ID="none", RANK="11", LOCAL_RANK="3", WORLD_SIZE="16")
    assert Launch.detect() == Launch(rank=11, local_rank=3, world_size=16)
    assert not Launch.detect().is_main


def test_the_deepspeed_launcher_is_detected_by_its_argument_and_leftovers_ignored(monkeypatch: Any) -> None:
    for left_over in ({"WORLD_SIZE": "8"}, {"RANK": "nonsense"}, {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}):
        set_variables(monkeypatch, **left_over)
        assert Launch.detect() == Launch()
        assert Launch.detect(local_rank=-1) == Launch()  # the default of --local_rank in launchers' own examples
    assert Launch.detect(local_rank=3) == Launch(rank=11, local_rank=3, world_size=16)
    set_variables(monkeypatch, RANK="8", LOCAL_RANK="0")
    assert Launch.detect(local_rank=0) == Launch(rank=8, local_rank=0, world_size=16)


def test_each_launcher_sets_the_number_of_processes_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        with monkeypatch.context() as patch:
            patch.delenv("LOCAL_WORLD_SIZE", raising=False)
            patch.setenv(name, "4")
            assert Launch(rank=5, local_rank=1, world_size=8).local_world_size == 4
            assert Launch().local_world_size == 1, "leftover shell variables are ignored"
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert Launch(rank=5, local_rank=1, world_size=8).local_world_size == 8


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=''"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE=''"),
        ({"RANK": "one", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK='2'"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
    ],
)
def test_an_invalid_environment_names_the_variable(monkeypatch: Any, variables: dict[str, str], named: str) -> None:
    set_variables(monkeypatch, TORCHELASTIC_RUN_ID="none", **variables)
    with pytest.raises(UserError, match=named):
        Launch.detect()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Launch().device() == Launch().device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="no GPU"):
        Launch().device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Launch(5, 1, 8).device() == torch.device("cuda", 1)
    assert Launch(5, 3, 8).device("cuda") == torch.device("cuda", 1)  # more processes than GPUs share them
    assert Launch(5, 1, 8).device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("world", "stages", "idle"), [(2, 1, []), (2, 2, []), (4, 4, [1, 2]), (6, 3, [2, 3])])
def test_only_the_first_and_last_stage_read_data(world: int, stages: int, idle: list[int]) -> None:
    assert [rank for rank in range(world) if not Launch(rank, rank, world).reads_data(stages)] == idle


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with 8 cores, of which torch takes 3 threads, and no variable set."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def test_training_uses_the_threads_that_its_work_is_worth_within_the_cores_of_a_process() -> None:
    limit_threads(1)
    assert torch.get_num_threads() == 3, "never raised"
    limit_threads(4)
    assert torch.get_num_threads() == 2
    limit_threads(100)
    assert torch.get_num_threads() == 1
    few = int(2.9 * FLOPS_PER_THREAD)  # not enough work for more
    for flops, processes, threads in ((MUCH, 1, 8), (MUCH, 2, 4), (MUCH, 16, 1), (few, 1, 2), (1, 1, 1)):
        assert use_training_threads(flops, processes) == threads == torch.get_num_threads()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_environment_takes_precedence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user sets it, or torchrun for several processes."""
    monkeypatch.setenv(name, "3")
    limit_threads(8)
    assert use_training_threads(MUCH, 1) is None
    assert torch.get_num_threads() == 3
