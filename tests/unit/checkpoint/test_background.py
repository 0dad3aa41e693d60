"""Background saving: copies, the worker thread, and the keeper with one process."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sd3_light.checkpoint import background, host_buffers
from sd3_light.checkpoint.background import BackgroundWorker, CheckpointFailed, CheckpointKeeper, CheckpointSaved
from sd3_light.checkpoint.host_buffers import HostBuffers
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.engines.protocol import TensorPiece
from tests.waiting import HANG_SECONDS


def pieces(value: float, count: int = 6) -> list[TensorPiece]:
    values = torch.full((count,), float(value))
    return [TensorPiece("param/w", values, 0, (count,)), TensorPiece("step/w", values[:1].clone(), 0, ())]


def test_copies_do_not_change_with_the_live_memory_and_leave_out_replicas() -> None:
    live = torch.arange(12.0).view(3, 4)
    (copy,) = HostBuffers().copy([TensorPiece("param/w", live.view(-1)[4:], 4, (3, 4))])
    live.zero_()
    assert (copy.name, copy.start, copy.shape) == ("param/w", 4, (3, 4))
    assert copy.values.tolist() == list(range(4, 12))
    replica = TensorPiece("param/w", torch.ones(3), 0, (3,), writes=False)
    replicas = [replica, replace(replica, name="param/v", writes=True)]
    assert [copy.name for copy in HostBuffers().copy(iter(replicas))] == ["param/v"]


def test_copies_of_all_dtypes_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that does not fit in the rest of a block continues in the next."""
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", 256)
    dtypes = (torch.uint8, torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
    live = [torch.arange(n).to(dtype) for n, dtype in zip((3, 150, 33, 32, 0, 700), dtypes, strict=True)]
    copies = HostBuffers().copy(TensorPiece(str(n), tensor, 0, tuple(tensor.shape)) for n, tensor in enumerate(live))
    assert len(copies) > 10
    for number, tensor in enumerate(live):
        parts = [copy for copy in copies if copy.name == str(number)]
        assert [part.start for part in parts] == [sum(len(p.values) for p in parts[:n]) for n in range(len(parts))]
        assert torch.equal(torch.cat([part.values for part in parts]), tensor)
        assert {part.values.dtype for part in parts} == {tensor.dtype}


def test_blocks_are_pinned_if_the_process_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the first piece is on the host: a counter shares its block with GPU weights."""
    pinned: list[bool] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **options: (pinned.append(pin_memory), empty(*size, **options))[1]
    )
    for uses_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda uses_gpu=uses_gpu: uses_gpu)
        HostBuffers().copy([TensorPiece("step/w", torch.tensor([3.0]), 0, ())])
    assert pinned == [False, True]


def test_blocks_are_reused_and_surplus_blocks_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", 256)
    copies = HostBuffers()
    first = [copy.values.data_ptr() for copy in copies.copy(pieces(1, count=300))]
    second = [copy.values.data_ptr() for copy in copies.copy(pieces(2, count=300))]
    assert first == second
    assert len(copies._blocks) == 5
    copies.copy(pieces(3, count=8))
    assert len(copies._blocks) == 1


def test_jobs_run_in_order_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, gate, calls, now = BackgroundWorker(), threading.Event(), list[Any](), [10.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work() -> str:
        gate.wait(HANG_SECONDS)
        calls.append(1)
        now[0] += 2.5
        return threading.current_thread().name

    worker.submit("first", work)
    worker.submit("second", lambda: calls.append(2))
    assert (worker.poll(), worker.is_idle(), calls) == ([], False, [])
    gate.set()
    first, second = worker.wait()
    assert calls == [1, 2]
    assert (first.name, first.result, second.name) == ("first", "background", "second")
    assert (first.seconds, second.seconds) == (2.5, 0)
    assert worker.wait() == worker.poll() == []


def test_an_error_belongs_to_its_job_and_idle_and_close_wait_for_all() -> None:
    worker = BackgroundWorker()
    worker.submit("bad", lambda: 1 // 0)
    worker.submit("good", lambda: 7)
    bad, good = worker.wait()
    assert isinstance(bad.error, ZeroDivisionError)
    assert (good.result, good.error) == (7, None)
    gate = threading.Event()
    assert worker.is_idle()
    worker.submit("held", gate.wait)
    assert not worker.is_idle(0.01)
    gate.set()
    assert worker.is_idle(HANG_SECONDS)
    assert [job.name for job in worker.poll()] == ["held"]
    worker = BackgroundWorker("closing")
    gate = threading.Event()
    worker.submit("slow", lambda: gate.wait(HANG_SECONDS))
    threading.Timer(0.05, gate.set).start()
    worker.close()
    worker.close()  # a second close does nothing
    assert [job.result for job in worker.poll()] == [True]
    assert "closing" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(AssertionError):
        worker.submit("late", lambda: None)


def test_a_save_captures_the_state_at_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues while the thread writes."""
    gate, write = threading.Event(), background.write_part
    monkeypatch.setattr(background, "write_part", lambda *args: (gate.wait(HANG_SECONDS), write(*args))[1])
    keeper = CheckpointKeeper(tmp_path / "new-folder", 0)
    live, facts = pieces(1), {"progress": {"step": 1}}
    stall = keeper.save(1, live, facts)
    live[0].values.fill_(9)
    facts["progress"]["step"] = 9
    assert (keeper.poll(), keeper.is_idle()) == ([], False)
    gate.set()
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.facts, saved.warning) == (1, {"progress": {"step": 1}}, "")
    assert (saved.path, saved.stall_seconds) == (tmp_path / "new-folder" / checkpoint_name(1), stall)
    assert saved.bytes == (saved.path / "rank-00000.safetensors").stat().st_size
    checkpoint = open_checkpoint(saved.path)
    assert checkpoint.facts == {"progress": {"step": 1}}
    assert checkpoint.tensor("param/w").tolist() == [1] * 6


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies share memory, so the second must not start before the first is written."""
    gate, calls = threading.Event(), list[str]()
    write, copy = background.write_part, HostBuffers.copy

    def slow_write(*args: Any) -> int:
        gate.wait(HANG_SECONDS)
        calls.append("write")
        return write(*args)

    monkeypatch.setattr(background, "write_part", slow_write)
    monkeypatch.setattr(HostBuffers, "copy", lambda *args: (calls.append("copy"), copy(*args))[1])
    keeper = CheckpointKeeper(tmp_path, 0)
    keeper.save(1, pieces(1), {})
    threading.Timer(0.1, gate.set).start()
    keeper.save(2, pieces(2), {})
    assert calls[:3] == ["copy", "write", "copy"]
    first = keeper.poll()
    assert first
    assert [result.step for result in (*first, *keeper.wait())] == [1, 2]
    values = [open_checkpoint(tmp_path / checkpoint_name(step)).tensor("step/w").item() for step in (1, 2)]
    assert values == [1, 2]
    keeper.close()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = CheckpointKeeper(tmp_path, 0, keep_last=2)
    for step in range(1, 5):
        keeper.save(step, pieces(step), {})
    assert [result.step for result in keeper.wait()] == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(3), checkpoint_name(4)]
    # a failed deletion does not fail the save
    busy = Mock(side_effect=OSError(16, "Device or resource busy", "step-00000001"))
    monkeypatch.setattr(background, "keep_newest", busy)
    keeper.save(5, pieces(1), {})
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    assert saved.warning == f"older checkpoints in {tmp_path} cannot be deleted: Device or resource busy: step-00000001"


def test_a_failed_save_is_reported_and_the_next_works(tmp_path: Path, limit_file_size: Any) -> None:
    keeper = CheckpointKeeper(tmp_path, 0)
    keeper.save(1, pieces(1), {})
    keeper.wait()
    limit_file_size(32)
    keeper.save(2, pieces(2), {"step": 2})
    (failed,) = keeper.wait()
    limit_file_size(1 << 30)
    assert isinstance(failed, CheckpointFailed)
    assert failed.step == 2
    file = tmp_path / ".step-00000002.tmp" / "rank-00000.safetensors"
    assert failed.reason == f"File too large: {file}; earlier checkpoints are intact"
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1)]
    keeper.save(2, pieces(2), {})
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    assert open_checkpoint(saved.path).tensor("step/w") == 2


def test_a_bug_is_raised_in_the_callers_thread(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, 0)
    keeper.save(1, [*pieces(1), *pieces(1)], {})
    with pytest.raises(AssertionError, match="param/w@0 is written twice"):
        keeper.wait()
    with pytest.raises(TypeError):
        keeper.save(2, pieces(1), {"path": tmp_path})
    outside = CheckpointKeeper(tmp_path / "unused", 1)
    assert outside.save(1, pieces(1), {}) == 0
    assert outside.wait() == []
    assert not (tmp_path / "unused").exists()
