"""Two processes save and stop after the same step, whichever of them gets the request."""

import os
import re
import signal

import pytest

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.cli import RESUMABLE
from sd3_light.train.verb import Resume
from tests.checkpoints import read_checkpoint
from tests.e2e.live import TORCHRUN, TrainProcess, descendants, leftovers, ranks
from tests.project import Project
from tests.waiting import is_running

ENDLESS = {"max_steps": 1_000_000, "checkpoint_every_n_steps": 1_000_000, "micro_batch_size_per_gpu": 2}


def assert_saved_by_both(project: Project, step: int) -> None:
    folder = project.run / "checkpoints" / checkpoint_name(step)
    tensors, facts = read_checkpoint(folder)  # verifies every hash and that all parts exist
    assert facts["progress"]["step"] == step
    assert len(tensors) > 200
    assert len(list(folder.glob("rank-*.safetensors"))) == 2
    assert leftovers(project.run) == []


def test_a_signal_to_one_rank_stops_both_after_the_same_step(project: Project) -> None:
    """First the file `save`: one checkpoint, and training continues. Then SIGTERM to the rank without a log."""
    with TrainProcess(project, launcher=TORCHRUN, **ENDLESS) as live:
        live.wait_for_step(1)
        (live.run / "save").touch()
        saved_at = live.wait_for_event("checkpoint")["step"]
        live.wait_for_step(saved_at + 2)
        processes = ranks(live)
        os.kill(processes[1], signal.SIGTERM)
        assert live.end() != 0, "torchrun reports a non-zero exit code"
    last = live.log.read("step")[-1]["step"]
    (stop,) = live.log.read("stop")
    assert (stop["step"], stop["reason"]) == (last, "another process was asked to stop")
    assert [event["step"] for event in live.log.read("checkpoint")] == [saved_at, last]
    for step in (saved_at, last):
        assert_saved_by_both(project, step)
    assert not (live.run / "save").exists()
    assert f"exitcode  : {RESUMABLE}" in live.output
    assert sorted(processes) == [0, 1]
    assert [process for process in processes.values() if is_running(process)] == []


@pytest.mark.slow
def test_a_killed_worker_of_one_rank_stops_both_and_saves(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does when memory is short. Its rank prepares the batches itself until both have saved."""
    monkeypatch.setenv("TORCH_TEST_COLD", "1")  # the ranks themselves, not their stand-ins: see tests/warm
    with TrainProcess(project, launcher=TORCHRUN, **ENDLESS, num_dataloader_workers=2) as live:
        live.wait_for_step(2)
        processes = ranks(live)
        (worker, *_) = descendants(processes[1])
        os.kill(worker, signal.SIGKILL)
        assert live.end() != 0
    last = live.log.read("step")[-1]["step"]
    (stop,) = live.log.read("stop")
    cause = rf"rank 1: DataLoader worker \(pid {worker}\) was killed by SIGKILL: out of memory, .*, then resume"
    assert re.fullmatch(rf"{cause} \(step {last} is saved: --resume continues from there\)", stop["reason"])
    assert live.output.count(f"error: {stop['reason']}") == 2, live.output
    assert "exitcode  : 2" in live.output
    assert_saved_by_both(project, last)
    assert [process for process in (*processes.values(), worker) if is_running(process)] == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        assert project.train(f"max_steps={last + 2}", resume=Resume()).step == last + 2
    assert [event["step"] for event in project.events("step")] == list(range(1, last + 3))


def test_both_ranks_stop_if_the_first_save_fails(project: Project) -> None:
    """Rank 0 cannot make the folder. Both exit with 2 and the same line."""
    with TrainProcess(project, launcher=TORCHRUN, **ENDLESS) as live:
        live.wait_for_step(1)
        processes = ranks(live)
        (live.run / "checkpoints").touch()
        (live.run / "save").touch()
        assert live.end() != 0
    (stop,) = live.log.read("stop")
    assert "no checkpoint was ever saved: fix the cause, then start again" in stop["reason"]
    assert live.output.count(f"error: {stop['reason']}") == 2, live.output
    assert "exitcode  : 2" in live.output
    assert leftovers(project.run) == []
    assert [process for process in processes.values() if is_running(process)] == []
