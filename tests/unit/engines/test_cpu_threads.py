"""The CPU threads of a run: by cores, processes and work, unless the environment sets them."""

from collections.abc import Iterator

import pytest
import torch

from sd3_light.engines import cpu_threads
from sd3_light.engines.cpu_threads import FLOPS_PER_THREAD, limit_threads, use_training_threads

MUCH = 1000 * FLOPS_PER_THREAD


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
