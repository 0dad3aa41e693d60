"""CUDA graphs with a recorder that stands in for CUDA: fixed memory, fallbacks, same steps as without graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.engines import Launch, cuda_graphs
from sd3_light.engines.cuda_graphs import Numbers
from sd3_light.engines.torch import TorchEngine
from tests.unit.engines.test_torch import CPU, Line, config, equal, line_batch, snapshot


class Recording:
    """Runs the function again at every replay, and checks that no memory has moved since it was recorded."""

    def __init__(self, function: Callable[[], Numbers], addresses: Callable[[], list[int]]) -> None:
        self.function, self.addresses, self.recorded_at = function, addresses, addresses()
        self.outputs: Numbers | None = None
        self.replays = 0

    def replay(self) -> Numbers:
        assert self.addresses() == self.recorded_at, "a graph would write to other memory"
        self.replays += 1
        names, numbers = self.function()
        if self.outputs is None:
            self.outputs = names, numbers
        self.outputs[1].copy_(numbers)
        return self.outputs


class Recorder:
    """Records like CUDA: `record` computes nothing."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.recordings: list[Recording] = []
        self.warm_ups = 0
        self.problem: str | None = None
        self.error = 0.0  # of the numbers that replays return

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        self.warm_ups += 1
        yield

    def record(self, function: Callable[[], Numbers]) -> Recording:
        if self.problem is not None:
            raise RuntimeError(self.problem)

        def run() -> Numbers:
            names, numbers = function()
            return names, numbers + self.error

        self.recordings.append(Recording(run, self._addresses))
        return self.recordings[-1]

    def _addresses(self) -> list[int]:
        weights = list(self.engine.module.denoiser.parameters())
        return [tensor.data_ptr() for weight in weights for tensor in (weight, weight.grad)]


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], tuple[TorchEngine, Recorder]]:
    def graphed() -> tuple[TorchEngine, Recorder]:
        engine = TorchEngine(Line(), config(tmp_path), Launch(), CPU)
        recorder = Recorder(engine)
        engine.use_graphs(recorder)
        return engine, recorder

    return graphed


Make = Callable[[], tuple[TorchEngine, Recorder]]


def plain(folder: Path) -> TorchEngine:
    return TorchEngine(Line(), config(folder), Launch(), CPU)


def bad_batch() -> Batch:
    batch = line_batch(3)
    return batch.with_values({"target": batch["target"] * float("nan")})


def steps(first: int = 0, count: int = 6) -> list[list[Batch]]:
    """Return steps of two micro-batches of two shapes; some have masks that no loss reads."""
    batches = []
    for number in range(first, first + count):
        step = line_batch(number, 8 if number % 2 else 12).split(2)
        if number % 3 == 2:
            step = [batch.with_values({"mask": torch.ones(batch.size)}) for batch in step]
        batches.append(step)
    return batches


def train(engine: TorchEngine, first: int = 0, count: int = 6) -> list[Any]:
    return [engine.train_step(step, 1e-2).read() for step in steps(first, count)]


def test_steps_are_the_same_as_without_graphs(make: Make, tmp_path: Path) -> None:
    expected, (engine, recorder) = plain(tmp_path), make()
    assert train(engine) == train(expected)
    assert equal(snapshot(engine), snapshot(expected))
    assert engine.graphs.count == recorder.warm_ups == len(recorder.recordings) == 4  # two sizes, with and without mask
    # two micro-batches per step, and one replay to compare with the kernels
    assert sum(recording.replays for recording in recorder.recordings) == 2 * 6 + 4


def test_a_recording_needs_no_second_gradients(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all weights are gigabytes; only those of earlier micro-batches of a step are copied."""
    copies = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **keys: copies.append(tensor) or clone(tensor, **keys))
    engine, recorder = make()
    addresses = []
    for size, micro_batches in ((8, 1), (12, 1), (8, 2)):
        engine.train_step(line_batch(0, size).split(micro_batches), 1e-2)
        gradients = [weight.grad for weight in engine.module.denoiser.parameters()]
        addresses.append([gradient.data_ptr() for gradient in gradients])
        assert not any(tensor is gradient for tensor in copies for gradient in gradients)
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(recorder.recordings) == 3
    some = line_batch(0, 8).with_values({"mask": torch.ones(8)})
    engine.train_step([line_batch(0, 8), some], 1e-2)
    assert any(tensor is gradient for tensor in copies for gradient in gradients)


def test_steps_of_other_numbers_of_micro_batches_have_their_own_graphs(make: Make, tmp_path: Path) -> None:
    """A gradient is divided by the number, which is a constant of the graph."""
    expected, (engine, _) = plain(tmp_path), make()
    for count in (2, 1, 2, 3):
        step = [line_batch(seed, 4) for seed in range(count)]
        assert engine.train_step(step, 1e-2).read() == expected.train_step(step, 1e-2).read()
    assert equal(snapshot(engine), snapshot(expected))
    assert engine.graphs.count == 3


def test_tensors_of_another_dtype_have_their_own_graph(make: Make) -> None:
    """Copied into the inputs of another graph, their values would be rounded."""
    engine, _ = make()
    for mask in (torch.ones(8), torch.ones(8, dtype=torch.uint8), torch.ones(8)):
        engine.train_step([line_batch().with_values({"mask": mask})], 1e-2)
    assert engine.graphs.count == 2
    engine, _ = make()
    seen: list[tuple[int, ...]] = []
    forward = engine.module.forward

    def watched(batch: Batch) -> dict[str, Tensor]:
        seen.append(tuple(tensor.data_ptr() for tensor in batch.tensors()))
        return forward(batch)  # type: ignore[no-any-return]

    engine.module.forward = watched
    for number in range(3):
        engine.train_step([line_batch(number)], 1e-2)
    assert len(seen) == 6
    assert len(set(seen)) == 1


def test_what_cannot_be_recorded_runs_as_usual(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, (engine, recorder) = plain(tmp_path), make()
    recorder.problem = "operation not permitted when stream is capturing\nmore lines"
    assert train(engine) == train(expected)
    assert equal(snapshot(engine), snapshot(expected))
    assert recorder.warm_ups == 1  # no further shape is tried
    message = "recording failed, so kernels are launched one by one (operation not permitted when stream is capturing)"
    assert capsys.readouterr().err.count(message) == 1
    expected, (engine, recorder) = plain(tmp_path), make()
    recorder.error = 1e-6
    assert train(engine) == train(expected)
    assert equal(snapshot(engine), snapshot(expected))
    assert [recording.replays for recording in recorder.recordings] == [1]
    assert capsys.readouterr().err.count("a graph computes other numbers than its kernels") == 1


def test_lengths_are_not_recorded_shapes_limited(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, (engine, recorder) = plain(tmp_path), make()
    lengths = {"text.length": torch.ones(6)}
    first, second = steps(0, 1)[0]
    mixed = [replace(first, host=lengths), second]  # the first one makes the gradients
    for step in (mixed, mixed[::-1], *steps(1, 2)):
        assert engine.train_step(step, 1e-2).read() == expected.train_step(step, 1e-2).read()
    assert equal(snapshot(engine), snapshot(expected))
    assert len(recorder.recordings) == 3  # two sizes, and one with a mask
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    expected, (engine, recorder) = plain(tmp_path), make()
    for count in (4, 6, 8, 10, 6, 8):
        batch = line_batch(count, count)
        assert engine.train_step([batch], 1e-2).read() == expected.train_step([batch], 1e-2).read()
    assert len(recorder.recordings) == 2
    assert equal(snapshot(engine), snapshot(expected))


def test_a_step_that_is_not_finite_is_skipped_and_recorded(make: Make) -> None:
    engine, _ = make()
    for seed in range(2):  # the first one is recorded
        engine.train_step([line_batch(seed)], 1e-2)
    before = snapshot(engine)
    assert not engine.train_step([bad_batch()], 1e-2).read().taken
    assert equal(snapshot(engine), before)
    assert engine.train_step([line_batch(4)], 1e-2).read().taken
    engine, recorder = make()
    assert not engine.train_step([bad_batch()], 1e-2).read().taken
    assert engine.graphs.count == 1
    assert engine.train_step([line_batch(4)], 1e-2).read().taken
    assert len(recorder.recordings) == 1


def test_a_failed_comparison_keeps_gradients_of_earlier_batches(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    expected, (engine, recorder) = plain(tmp_path), make()
    record = recorder.record

    def recorded(function: Callable[[], Numbers]) -> Recording:
        recording = record(function)
        if len(recorder.recordings) == 2:  # that of the step's second micro-batch
            full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
            monkeypatch.setattr(recording, "replay", full)
        return recording

    monkeypatch.setattr(recorder, "record", recorded)
    first, second = steps()[0]
    second = second.with_values({"mask": torch.ones(second.size)})  # which makes it another shape
    results = [each.train_step([first, second], 1e-2).read() for each in (expected, engine)]
    assert len(recorder.recordings) == 2
    assert results[1] == results[0]
    assert equal(snapshot(engine), snapshot(expected))


def test_a_warm_up_without_memory_means_launches(make: Make, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    expected, (engine, recorder) = plain(tmp_path), make()

    @contextmanager
    def full() -> Iterator[None]:
        yield
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(recorder, "warming_up", full)
    assert train(engine) == train(expected)
    assert equal(snapshot(engine), snapshot(expected))
    assert not recorder.recordings
    assert "recording failed, so kernels are launched one by one (CUDA out of memory.)" in capsys.readouterr().err
