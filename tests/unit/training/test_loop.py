"""The loop with an engine that only counts: what happens at which step, and in which order."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.checkpoint.state import Progress
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import Prepared, StepResult
from sd3_light.optim.ema import Ema
from sd3_light.training import loop
from sd3_light.training.loop import Duty, Run, every, train


class Counting:
    """Each step adds 1 to its one weight; steps named in ``bad`` are not finite."""

    rank, world = 0, 1

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad = set(bad)
        self.seen: list[tuple[Any, float]] = []
        self.weight = torch.zeros(1)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {"w": self.weight}

    def train_step(self, batches: Sequence[Prepared], lr: float) -> StepResult:
        number = batches[0][0][0]
        self.seen.append((number, lr))
        taken = number not in self.bad
        self.weight += taken
        return StepResult({"loss": 1.0 if taken else math.nan, "flow": 0.5}, 2.0, taken)

    def evaluate(self, batch: Prepared) -> dict[str, float]:
        return {}

    def optimizer_state(self) -> dict[str, Tensor]:
        return {}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        pass


def numbered(first: int) -> Iterator[Sequence[Prepared]]:
    """Step n's batch holds n."""
    while True:
        yield [((first,), (None,))]
        first += 1


def run(total: int, engine: Counting | None = None, **keys: Any) -> Run:
    defaults: dict[str, Any] = {"samples_in": lambda step: 4, "learning_rate": lambda step: step / 100}
    return Run(engine=engine or Counting(), steps=numbered, total_steps=total, **{**defaults, **keys})


def fired(due: Callable[[Progress, Progress], bool], total: int, samples: int = 4, first: int = 0) -> list[int]:
    """The steps after which a duty acts."""
    found: list[int] = []
    duty = Duty("watch", due, lambda progress: found.append(progress.step))
    start = Progress(step=first, samples=first * samples)
    train(run(total, duties=[duty], progress=start, samples_in=lambda step: samples))
    return found


# --- walking -----------------------------------------------------------------------------------


def test_it_trains_every_step_once_at_its_rate() -> None:
    engine = Counting()
    assert train(run(5, engine)) == Progress(step=5, samples=20, skipped=0)
    assert engine.seen == [(number, number / 100) for number in range(5)]


def test_it_resumes_at_its_progress() -> None:
    engine = Counting()
    assert train(run(5, engine, progress=Progress(3, 12, 1))) == Progress(5, 20, 1)
    assert [number for number, _ in engine.seen] == [3, 4]


def test_a_run_in_two_parts_is_the_run_in_one() -> None:
    whole, first, second = Counting(), Counting(), Counting()
    end = train(run(7, whole))
    assert train(run(7, second, progress=train(run(3, first)))) == end
    assert first.seen + second.seen == whole.seen


def test_a_finished_run_does_nothing() -> None:
    engine = Counting()
    assert train(run(5, engine, progress=Progress(5, 20, 0))) == Progress(5, 20, 0)
    assert engine.seen == []


def test_samples_are_counted_by_the_steps_own_batch() -> None:
    assert train(run(4, samples_in=lambda step: [1, 10, 100, 1000][step])).samples == 1111


def test_no_batch_is_taken_beyond_the_end() -> None:
    taken: list[int] = []

    def steps(first: int) -> Iterator[Sequence[Prepared]]:
        for batch in numbered(first):
            taken.append(batch[0][0][0])
            yield batch

    train(replace(run(3), steps=steps))
    assert taken == [0, 1, 2]


# --- duties ------------------------------------------------------------------------------------


def test_every_n_steps() -> None:
    assert fired(every(steps=3), 10) == [3, 6, 9]
    assert fired(every(steps=1), 3) == [1, 2, 3]
    assert fired(every(steps=20), 10) == []


def test_every_n_epochs_at_the_boundary_itself() -> None:
    assert fired(every(epochs=1, steps_per_epoch=4), 12) == [4, 8, 12]
    assert fired(every(epochs=2, steps_per_epoch=3), 13) == [6, 12]


def test_every_n_examples_when_their_number_is_passed() -> None:
    assert fired(every(examples=10), 10, samples=4) == [3, 5, 8, 10]
    assert fired(every(examples=4), 3, samples=4) == [1, 2, 3]
    assert fired(every(examples=3), 3, samples=10) == [1, 2, 3]  # several at once are one


@pytest.mark.parametrize("due", [{"steps": 3}, {"epochs": 1, "steps_per_epoch": 4}, {"examples": 10}])
def test_a_resumed_run_keeps_the_beat(due: dict[str, int]) -> None:
    """Also at an epoch's boundary, where the earlier program was off by one."""
    whole = fired(every(**due), 12)
    for first in range(12):
        assert fired(every(**due), 12, first=first) == [step for step in whole if step > first]


def test_several_intervals_fire_together_once() -> None:
    assert fired(every(steps=4, epochs=1, steps_per_epoch=6), 12) == [4, 6, 8, 12]


def test_no_interval_never_fires() -> None:
    assert fired(every(), 20) == []


def test_every_n_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    due = every(minutes=2)
    found = []
    for step in range(10):
        clock[0] += 45
        if due(Progress(step), Progress(step + 1)):
            found.append(step + 1)
    assert found == [3, 6, 9]


def test_duties_act_after_the_step_in_their_order() -> None:
    engine = Counting()
    acts: list[str] = []
    duties = [
        Duty("one", every(steps=2), lambda progress: acts.append(f"one@{progress.step}:{int(engine.weight)}")),
        Duty("two", every(steps=2), lambda progress: acts.append(f"two@{progress.step}:{progress.samples}")),
    ]
    train(run(4, engine, duties=duties))
    assert acts == ["one@2:2", "two@2:8", "one@4:4", "two@4:16"]


# --- steps that were not taken -----------------------------------------------------------------


def test_a_skipped_step_is_counted_and_the_order_goes_on() -> None:
    engine = Counting(bad=[1, 3])
    assert train(run(5, engine)) == Progress(step=5, samples=20, skipped=2)
    assert [number for number, _ in engine.seen] == [0, 1, 2, 3, 4]
    assert int(engine.weight) == 3


def test_it_stops_after_too_many_in_a_row() -> None:
    engine = Counting(bad=range(3, 100))
    acted: list[int] = []
    duty = Duty("checkpoint", every(steps=1), lambda progress: acted.append(progress.step))
    with pytest.raises(UserError, match=r"not finite in 3 steps in a row \(at step 6\)"):
        train(run(100, engine, max_nonfinite_steps=2, duties=[duty]))
    assert len(engine.seen) == 6
    assert acted == [1, 2, 3, 4, 5]


def test_a_good_step_between_starts_the_count_anew() -> None:
    engine = Counting(bad=[0, 1, 3, 4, 6, 7])
    assert train(run(9, engine, max_nonfinite_steps=2)).skipped == 6


def test_none_allowed_stops_at_the_first() -> None:
    with pytest.raises(UserError, match="1 steps in a row"):
        train(run(9, Counting(bad=[4]), max_nonfinite_steps=0))


# --- the average and the log -------------------------------------------------------------------


def test_the_average_follows_taken_steps_at_its_turn() -> None:
    engine = Counting(bad=[3])  # the fourth step, a turn of the average
    ema = Ema(engine.weights, decay=0.5, update_every=2)
    train(run(6, engine, ema=ema))
    # after step 2 the weight is 2: 1.0; step 4 was not taken; after step 6 it is 5: 3.0
    assert ema.shadow["w"].tolist() == [3.0]


def logged(total: int, engine: Counting | None = None, **keys: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    train(run(total, engine, log=lambda event, **fields: lines.append({"event": event, **fields}), **keys))
    return lines


def test_every_line_says_what_was_never_logged() -> None:
    line = logged(3)[1]
    assert {key: line[key] for key in ("event", "step", "samples", "skipped", "loss", "flow", "lr", "taken")} == {
        "event": "step",
        "step": 2,
        "samples": 8,
        "skipped": 0,
        "loss": 1.0,
        "flow": 0.5,
        "lr": 0.01,
        "taken": True,
    }
    assert line["grad_norm"] == 2.0
    assert line["samples_per_second"] > 0
    assert 0 <= line["data_wait"] <= 1


def test_throughput_and_data_wait_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0])  # started, got its batch, done
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    (line,) = logged(1)
    assert line["samples_per_second"] == pytest.approx(1.0)
    assert line["data_wait"] == pytest.approx(0.25)


def test_logging_steps_and_what_is_always_logged() -> None:
    steps = [line["step"] for line in logged(10, Counting(bad=[4]), logging_steps=3)]
    assert steps == [3, 5, 6, 9, 10]  # its turns, the skipped one, the last one
