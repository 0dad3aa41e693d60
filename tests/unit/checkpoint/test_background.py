"""Saving beside training: copies, the thread, and the keeper with one process."""

import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint import background, host_buffers
from sd3_light.checkpoint.background import BackgroundWorker, CheckpointFailed, CheckpointKeeper, CheckpointSaved
from sd3_light.checkpoint.host_buffers import HostBuffers
from sd3_light.checkpoint.store import checkpoint_name, open_checkpoint
from sd3_light.engines.protocol import TensorPiece

PATIENCE = 30  # seconds


def pieces(value: float, count: int = 6) -> list[TensorPiece]:
    values = torch.full((count,), float(value))
    return [TensorPiece("param/w", values, 0, (count,)), TensorPiece("step/w", values[:1].clone(), 0, ())]


# --- copies ------------------------------------------------------------------------------------


def test_copies_do_not_follow_the_live_memory() -> None:
    live = torch.arange(12.0).view(3, 4)
    (copy,) = HostBuffers().take([TensorPiece("param/w", live.view(-1)[4:], 4, (3, 4))])
    live.zero_()
    assert (copy.name, copy.start, copy.shape) == ("param/w", 4, (3, 4))
    assert copy.values.tolist() == list(range(4, 12))


def test_replicas_that_another_rank_writes_are_not_copied() -> None:
    given = [
        TensorPiece("param/w", torch.ones(3), 0, (3,), writes=False),
        TensorPiece("param/v", torch.ones(3), 0, (3,)),
    ]
    assert [copy.name for copy in HostBuffers().take(iter(given))] == ["param/v"]


def test_copies_of_all_dtypes_fill_blocks_without_treading_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that does not fit into what is left of a block goes on in the next."""
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", 256)
    dtypes = (torch.uint8, torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
    live = [torch.arange(n).to(dtype) for n, dtype in zip((3, 150, 33, 32, 0, 700), dtypes, strict=True)]
    copies = HostBuffers().take(TensorPiece(str(n), one, 0, tuple(one.shape)) for n, one in enumerate(live))
    assert len(copies) > 10
    for number, one in enumerate(live):
        parts = [copy for copy in copies if copy.name == str(number)]
        assert [part.start for part in parts] == [sum(len(p.values) for p in parts[:n]) for n in range(len(parts))]
        assert torch.equal(torch.cat([part.values for part in parts]), one)
        assert {part.values.dtype for part in parts} == {one.dtype}


@pytest.mark.parametrize("uses_gpu", [False, True])
def test_blocks_are_pinned_where_the_process_uses_a_gpu(uses_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes first: a count on the host shares its block with weights of the GPU."""
    asked: list[bool] = []
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_gpu)
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **keys: (asked.append(pin_memory), empty(*size, **keys))[1]
    )
    HostBuffers().take([TensorPiece("step/w", torch.tensor([3.0]), 0, ())])
    assert asked == [uses_gpu]


def test_memory_is_used_again_and_what_is_too_much_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", 256)
    copies = HostBuffers()
    first = [copy.values.data_ptr() for copy in copies.take(pieces(1, count=300))]
    again = [copy.values.data_ptr() for copy in copies.take(pieces(2, count=300))]
    assert first == again
    assert len(copies._blocks) == 5
    copies.take(pieces(3, count=8))
    assert len(copies._blocks) == 1


# --- the thread --------------------------------------------------------------------------------


def test_jobs_are_done_in_order_beside_the_caller() -> None:
    work, gate, seen = BackgroundWorker(), threading.Event(), list[Any]()
    work.submit("first", lambda: (gate.wait(PATIENCE), seen.append(1), threading.current_thread().name)[-1])
    work.submit("second", lambda: seen.append(2))
    assert (work.poll(), work.has_news(), seen) == ([], False, [])
    gate.set()
    first, second = work.wait()
    assert seen == [1, 2]
    assert (first.name, first.result, second.name) == ("first", "background", "second")
    assert first.seconds >= second.seconds >= 0
    assert work.wait() == work.poll() == []


def test_a_fault_belongs_to_its_job_and_the_next_is_done() -> None:
    work = BackgroundWorker()
    work.submit("bad", lambda: 1 // 0)
    work.submit("good", lambda: 7)
    bad, good = work.wait()
    assert isinstance(bad.error, ZeroDivisionError)
    assert (good.result, good.error) == (7, None)


def test_idle_means_that_the_last_job_has_ended() -> None:
    gate, work = threading.Event(), BackgroundWorker()
    assert work.is_idle()
    work.submit("held", gate.wait)
    assert not work.is_idle(0.01)
    gate.set()
    assert work.is_idle(60)
    assert [done.name for done in work.poll()] == ["held"]


def test_closing_waits_and_what_ended_is_still_told() -> None:
    work = BackgroundWorker("closing")
    gate = threading.Event()
    work.submit("slow", lambda: gate.wait(PATIENCE))
    threading.Timer(0.05, gate.set).start()
    work.close()
    work.close()  # as often as one likes
    assert [done.result for done in work.poll()] == [True]
    assert "closing" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(AssertionError):
        work.submit("late", lambda: None)


# --- the keeper --------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_of_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while the thread writes."""
    gate, write = threading.Event(), background.write_part
    monkeypatch.setattr(background, "write_part", lambda *given: (gate.wait(PATIENCE), write(*given))[1])
    keeper = CheckpointKeeper(tmp_path / "anywhere", 0)
    live, facts = pieces(1), {"progress": {"step": 1}}
    stall = keeper.save(1, live, facts)
    live[0].values.fill_(9)
    facts["progress"]["step"] = 9
    assert (keeper.poll(), keeper.has_news()) == ([], False)
    gate.set()
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.facts, saved.warning) == (1, {"progress": {"step": 1}}, "")
    assert (saved.path, saved.stall_seconds) == (tmp_path / "anywhere" / checkpoint_name(1), stall)
    assert saved.bytes == (saved.path / "rank-00000.safetensors").stat().st_size
    found = open_checkpoint(saved.path)
    assert found.facts == {"progress": {"step": 1}}
    assert found.tensor("param/w").tolist() == [1] * 6


def test_a_second_save_waits_for_the_first_and_both_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies share memory, so the second may not begin before the first is written."""
    gate, seen = threading.Event(), list[str]()
    write, take = background.write_part, HostBuffers.take

    def slow_write(*given: Any) -> int:
        gate.wait(PATIENCE)
        seen.append("write")
        return write(*given)

    monkeypatch.setattr(background, "write_part", slow_write)
    monkeypatch.setattr(HostBuffers, "take", lambda *given: (seen.append("copy"), take(*given))[1])
    keeper = CheckpointKeeper(tmp_path, 0)
    keeper.save(1, pieces(1), {})
    threading.Timer(0.1, gate.set).start()
    keeper.save(2, pieces(2), {})
    assert seen[:3] == ["copy", "write", "copy"]
    assert keeper.has_news()
    assert [one.step for one in keeper.wait()] == [1, 2]
    values = [open_checkpoint(tmp_path / checkpoint_name(step)).tensor("step/w").item() for step in (1, 2)]
    assert values == [1, 2]
    keeper.close()


def test_only_the_newest_stay(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 0, keep_last=2)
    for step in range(1, 5):
        keeper.save(step, pieces(step), {})
    keeper.close()
    assert [one.step for one in keeper.poll()] == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(3), checkpoint_name(4)]


@pytest.fixture
def longest_file() -> Iterator[Callable[[int], None]]:
    """Sets how long a file may grow, which is to a writer what a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_is_told_and_the_next_one_works(tmp_path: Path, longest_file: Callable[[int], None]) -> None:
    keeper = CheckpointKeeper(tmp_path, 0)
    keeper.save(1, pieces(1), {})
    keeper.wait()
    longest_file(32)
    keeper.save(2, pieces(2), {"step": 2})
    (failed,) = keeper.wait()
    longest_file(1 << 30)
    assert isinstance(failed, CheckpointFailed)
    assert (failed.step, failed.facts) == (2, {"step": 2})
    file = tmp_path / ".step-00000002.tmp" / "rank-00000.safetensors"
    assert failed.reason == f"File too large: {file}; earlier checkpoints are intact"
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1)]
    keeper.save(2, pieces(2), {})
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    assert open_checkpoint(saved.path).tensor("step/w") == 2


def test_old_ones_that_cannot_be_deleted_do_not_spoil_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = CheckpointKeeper(tmp_path, 0, keep_last=1)

    def stuck(*_: Any) -> None:
        raise OSError(16, "Device or resource busy", "step-00000001")

    monkeypatch.setattr(background, "keep_newest", stuck)
    keeper.save(1, pieces(1), {})
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    assert saved.warning == f"older checkpoints in {tmp_path} cannot be deleted: Device or resource busy: step-00000001"


def test_a_fault_of_ours_is_raised_where_people_see_it(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 0)
    keeper.save(1, [*pieces(1), *pieces(1)], {})
    with pytest.raises(AssertionError, match="param/w@0 is written twice"):
        keeper.wait()


def test_facts_must_be_json_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        CheckpointKeeper(tmp_path, 0).save(1, pieces(1), {"path": tmp_path})


def test_a_rank_that_takes_no_part_does_nothing(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path / "here", 1)
    assert keeper.save(1, pieces(1), {}) == 0
    assert keeper.wait() == []
    assert not os.path.exists(tmp_path / "here")
