"""The loop with an engine that only counts steps: what happens at which step, and in which order."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.requests import RunRequests
from sd3_light.config import EmaConfig
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import MicroBatch, StepNumbers, StepStream
from sd3_light.optim.ema import Averages
from sd3_light.train.loop import Hook, Run, every, train
from sd3_light.train.meter import Meter

pytestmark = pytest.mark.usefixtures("one_thread")


class Result:
    """A step's numbers, ready at once or, if ``late``, only after waiting."""

    def __init__(self, numbers: StepNumbers, late: bool) -> None:
        self.numbers, self.ready, self.reads = numbers, not late, 0

    def seconds_since(self, earlier: "Result") -> None:
        return None

    def read(self) -> StepNumbers:
        self.reads += 1
        return self.numbers


class CountingEngine:
    """Each step adds 1 to its only weight; steps in ``bad`` are not finite."""

    rank, world_size, writers, updates_started = 0, 1, 1, 0

    def __init__(self, bad: Sequence[int] = (), late: bool = False) -> None:
        self.bad, self.late = set(bad), late
        self.results: list[Result] = []
        self.seen: list[tuple[Any, float]] = []
        self.weight = torch.zeros(1)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {"w": self.weight}

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> Any:
        number = batches[0][0][0]
        self.seen.append((number, lr))
        taken = number not in self.bad
        self.weight += taken
        losses = {"loss": float(number + 1) if taken else math.nan, "flow": 0.5}
        self.results.append(Result(StepNumbers(losses, 2.0, taken), self.late))
        return self.results[-1]

    def weight_norm(self) -> torch.Tensor:
        return torch.tensor(float(self.weight))


def numbered(first: int) -> StepStream:
    """Yield batches of which number n holds n."""
    while True:
        yield [((first,), (None,))]
        first += 1


def failing_after(count: int) -> Callable[[int], StepStream]:
    def steps(first: int) -> StepStream:
        yield from itertools.islice(numbered(first), count)
        raise UserError("a shard is damaged")

    return steps


def run(total: int, engine: CountingEngine | None = None, **keys: Any) -> Run:
    usual: dict[str, Any] = {"samples_in": lambda step: 4, "learning_rate": lambda step: step / 100, "steps": numbered}
    return Run(engine=engine or CountingEngine(), total_steps=total, **{**usual, **keys})


def fired(due: Callable[[Progress, Progress], bool], total: int, samples: int = 4, first: int = 0) -> list[int]:
    """Return the steps after which a hook acts."""
    steps: list[int] = []
    hook = Hook("record", due, lambda progress: steps.append(progress.step))
    start = Progress(step=first, samples=first * samples, position=first)
    train(run(total, hooks=[hook], progress=start, samples_in=lambda step: samples))
    return steps


@pytest.mark.parametrize(
    ("start", "end", "seen"),
    [
        (Progress(), Progress(5, 20, 0, 5), [(number, number / 100) for number in range(5)]),
        (Progress(3, 12, 1, 3), Progress(5, 20, 1, 5), [(3, 0.03), (4, 0.04)]),
        (Progress(3, 12, 0, 0), Progress(5, 20, 0, 2), [(0, 0.03), (1, 0.04)]),
        (Progress(5, 20, 0, 5), Progress(5, 20, 0, 5), []),
    ],
    ids=["whole", "resumed", "restarted data", "finished"],
)
def test_it_trains_every_step_once_at_its_rate(start: Progress, end: Progress, seen: list[Any]) -> None:
    engine = CountingEngine()
    assert train(run(5, engine, progress=start)) == end
    assert engine.seen == seen


def test_samples_are_counted_per_step() -> None:
    assert train(run(4, samples_in=lambda step: [1, 10, 100, 1000][step])).samples == 1111
    taken: list[int] = []

    def steps(first: int) -> StepStream:
        for batch in numbered(first):
            taken.append(batch[0][0][0])
            yield batch

    train(replace(run(3), steps=steps))
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("error", [None, UserError("no room")])
def test_the_data_stream_is_closed_at_the_end(error: UserError | None) -> None:
    """Its worker processes would keep the program from exiting."""
    streams: list[StepStream] = []

    def steps(first: int) -> StepStream:
        streams.append(numbered(first))
        return streams[0]

    def act(progress: Progress) -> None:
        if error is not None:
            raise error

    with pytest.raises(UserError) if error is not None else nullcontext():
        train(replace(run(3), steps=steps, hooks=[Hook("fail", every(steps=2), act)]))
    assert next(streams[0], None) is None


def test_after_an_error_all_complete_steps_are_counted() -> None:
    """A checkpoint that is saved then holds their means and the number of skipped steps."""
    engine = CountingEngine(bad=[1], late=True)

    steps = replace(run(9, engine, logging_steps=100), steps=failing_after(4))
    with pytest.raises(UserError, match="damaged"):
        train(steps)
    assert (steps.progress.step, steps.progress.skipped, steps.meter.window.steps) == (4, 1, 3)
    engine = CountingEngine(late=True)
    engine.world_size = 2  # type: ignore[misc]

    steps = replace(run(9, engine, logging_steps=2), steps=failing_after(2))
    with pytest.raises(UserError, match="damaged"):
        train(steps)
    assert [result.reads for result in engine.results] == [0, 0]


def test_the_last_step_is_logged_before_an_error_of_the_data() -> None:
    logged, done = list[int](), list[int]()
    hook = Hook("note", every(steps=3), lambda progress: done.append(progress.step))
    for hooks in ([], [hook]):
        logged.clear()
        broken = replace(run(6), steps=failing_after(3), hooks=hooks, logging_steps=1)
        broken.log = lambda event, **fields: logged.append(fields["step"])
        with pytest.raises(UserError, match="damaged"):
            train(broken)
        assert logged == [1, 2, 3]
    assert done == [3]


@pytest.mark.parametrize(
    ("due", "total", "samples", "steps"),
    [
        ({"steps": 3}, 10, 4, [3, 6, 9]),
        ({"steps": 1}, 3, 4, [1, 2, 3]),
        ({"steps": 20}, 10, 4, []),
        ({"epochs": 1, "steps_per_epoch": 4}, 12, 4, [4, 8, 12]),  # at the boundary itself
        ({"epochs": 2, "steps_per_epoch": 3}, 13, 4, [6, 12]),
        ({"examples": 10}, 10, 4, [3, 5, 8, 10]),  # when a multiple is passed
        ({"examples": 4}, 3, 4, [1, 2, 3]),
        ({"examples": 3}, 3, 10, [1, 2, 3]),  # several multiples in one step act once
        ({"steps": 4, "epochs": 1, "steps_per_epoch": 6}, 12, 4, [4, 6, 8, 12]),
        ({}, 20, 4, []),
    ],
)
def test_hooks_act_at_their_intervals(due: dict[str, int], total: int, samples: int, steps: list[int]) -> None:
    """Also in a resumed run, and at an epoch's boundary, where off-by-one errors hide."""
    for first in range(total):
        assert fired(every(**due), total, samples, first) == [step for step in steps if step > first]


def test_hooks_act_after_the_step_in_order() -> None:
    engine = CountingEngine()
    acts: list[str] = []
    hooks = [
        Hook("one", every(steps=2), lambda progress: acts.append(f"one@{progress.step}:{int(engine.weight)}")),
        Hook("two", every(steps=2), lambda progress: acts.append(f"two@{progress.step}:{progress.samples}")),
    ]
    train(run(4, engine, hooks=hooks))
    assert acts == ["one@2:2", "two@2:8", "one@4:4", "two@4:16"]
    engine = CountingEngine()
    acted: list[int] = []
    requests = QuitAfter(after=3)
    hook = Hook("checkpoint", lambda a, b: requests.save, lambda progress: acted.append(progress.step))
    assert train(run(10, engine, requests=requests, hooks=[hook])).step == 3
    assert acted == [3]


def test_skipped_steps_are_counted_and_too_many_in_a_row_stop_the_run() -> None:
    engine = CountingEngine(bad=[1, 3])
    assert train(run(5, engine)) == Progress(step=5, samples=20, skipped=2, position=5)
    assert [number for number, _ in engine.seen] == [0, 1, 2, 3, 4]
    assert int(engine.weight) == 3
    engine = CountingEngine(bad=[0, 1, 3, 4, 6, 7])
    assert train(run(9, engine, max_nonfinite_steps=2)).skipped == 6
    engine = CountingEngine(bad=range(3, 100))
    acted: list[int] = []
    hook = Hook("checkpoint", every(steps=1), lambda progress: acted.append(progress.step))
    with pytest.raises(UserError, match=r"not finite in 3 steps in a row \(at step 6\)"):
        train(run(100, engine, max_nonfinite_steps=2, hooks=[hook]))
    assert len(engine.seen) == 6
    assert acted == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="1 steps in a row"):
        train(run(9, CountingEngine(bad=[4]), max_nonfinite_steps=0))


def test_late_results_are_counted() -> None:
    """The device runs asynchronously: numbers are read at the record, in order, and the count is right then."""
    engine = CountingEngine(bad=[1, 3], late=True)
    lines = logged(6, engine, logging_steps=3)
    assert [line["step"] for line in lines if line["event"] == "skip"] == [2, 4]
    assert [line["skipped"] for line in lines if line["event"] == "step"] == [1, 2]
    with pytest.raises(UserError, match=r"3 steps in a row \(at step 3\)"):
        train(run(9, CountingEngine(bad=range(9), late=True), max_nonfinite_steps=2, logging_steps=9))


def test_nothing_waits_for_the_device_between_records() -> None:
    engine = CountingEngine(late=True)
    reads: list[int] = []
    steps = run(4, engine, logging_steps=4)
    real = engine.train_step

    def train_step(batches: Sequence[MicroBatch], lr: float) -> Any:
        reads.append(sum(result.reads for result in engine.results))
        return real(batches, lr)

    engine.train_step = train_step  # type: ignore[method-assign]
    train(steps)
    assert reads == [0, 0, 0, 0]
    assert [result.reads for result in engine.results] == [1, 1, 1, 1]
    # hooks wait for the numbers of their step: a checkpoint holds the skipped steps and the open window
    seen: list[tuple[int, int, int]] = []
    hook = Hook("save", every(steps=3), lambda progress: seen.append((progress.step, progress.skipped, window())))
    steps = run(6, CountingEngine(bad=[1], late=True), logging_steps=6, hooks=[hook])

    def window() -> int:
        return steps.meter.window.steps

    train(steps)
    assert seen == [(3, 1, 2), (6, 1, 0)]


def test_the_average_is_updated_even_if_its_step_was_skipped() -> None:
    engine = CountingEngine(bad=[3])  # the fourth step, at which the average is updated
    averages = Averages(engine.weights, EmaConfig(enable=True, decay=0.5, update_every=2))
    train(run(6, engine, averages=averages))
    average = 0.0
    for decay, weight in ((0.1, 2), (2 / 11, 3), (3 / 12, 5)):  # step 4 was not taken: the weight is 3
        average = decay * average + (1 - decay) * weight
    assert averages.tracks["ema"].shadow["w"].tolist() == pytest.approx([average])


def logged(total: int, engine: CountingEngine | None = None, **keys: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    train(run(total, engine, log=lambda event, **fields: lines.append({"event": event, **fields}), **keys))
    return lines


def test_a_step_record_has_all_fields() -> None:
    averages = Averages({"w": torch.zeros(1)}, EmaConfig(enable=True, decay=0.5, update_every=1))
    line = logged(3, averages=averages, steps_per_epoch=4, flops_in=lambda batches: 10**12)[1]
    expected = {"event": "step", "step": 2, "samples": 8, "skipped": 0, "epoch": 0.5, "loss": 2.0, "flow": 0.5}
    expected |= {"steps": 1, "lr": 0.01, "grad_norm": 2.0, "param_norm": 2.0, "ema_decay": {"ema": 2 / 11}}
    assert {key: line[key] for key in expected} == expected
    assert line["samples_per_second"] > 0
    assert line["tflops_per_gpu"] > 0
    assert line["host_memory_gib"] > 0.01
    assert 0 <= line["data_wait"] <= 1


def test_a_record_is_the_mean_of_its_steps() -> None:
    lines = logged(10, CountingEngine(bad=[4]), logging_steps=4)
    records = [line for line in lines if line["event"] == "step"]
    assert [(line["step"], line["steps"]) for line in records] == [(4, 4), (8, 3), (10, 2)]
    assert [line["loss"] for line in records] == [2.5, 7.0, 9.5]  # the fifth step was not taken
    assert [line["step"] for line in lines if line["event"] == "skip"] == [5]
    # a resumed run logs the same means: checkpoints hold the open window of the log
    whole = [line["loss"] for line in logged(8, logging_steps=4)]
    first = run(8, logging_steps=4, requests=QuitAfter(after=6), hooks=[Hook("all", every(steps=1), lambda p: None)])
    progress = train(first)
    assert progress.step == 6
    window = asdict(first.meter.window)
    second = logged(8, progress=progress, meter=Meter(window=window), logging_steps=4)
    assert [line["loss"] for line in second] == whole[1:]


class QuitAfter(RunRequests):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def poll(self) -> None:
        self.after -= 1
        self.quit = self.save = self.after == 0


@pytest.mark.parametrize(
    ("keys", "printed"),
    [
        ({"steps_per_print": 1}, [0, 1, 2, 3, 4, 5, 6, 7, 7]),
        ({"steps_per_print": 3}, [0, 3, 6, 7, 7]),
        ({"steps_per_print": 3, "logging_steps": 2}, [0, 4, 6, 7, 7]),
        ({}, [0, 7]),
    ],
)
def test_a_file_gets_a_line_every_steps_per_print(capsys: Any, keys: dict[str, Any], printed: list[int]) -> None:
    """However fast the steps are; without it, lines come by time. The first and the last line are always printed."""
    train(run(7, **keys))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train ")]
    assert [int(line.split()[1].split("/")[0]) for line in lines] == printed
    assert all("loss" in line for line in lines[1:])
