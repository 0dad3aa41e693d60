"""The loop of a part: resuming, when it ends, and what it refuses."""

import math
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sd3_light.config.faults import Stopped, UserError
from sd3_light.parts import fit
from sd3_light.parts.fit import Fit, FitOptions
from sd3_light.randomness import stream
from tests.leftovers import leave


class Line:
    """Fits a line; `scores` are the results of its evaluations."""

    score = "score"
    device = torch.device("cpu")

    def __init__(self, scores: Iterator[float] | None = None, factor: float = 1.0) -> None:
        self.model = nn.Linear(2, 1)
        with torch.no_grad():
            self.model.weight.fill_(0.1)
            self.model.bias.zero_()
        self.scores, self.factor = scores or iter(float, 1), factor

    def loss(self, step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = torch.from_numpy(stream(0, "line", 0, 0, step).standard_normal((8, 2))).float()
        loss = self.factor * (self.model(x)[:, 0] - x[:, 0] + 2 * x[:, 1]).square().mean()
        return loss, {"twice": 2 * loss.detach()}

    def evaluate(self) -> dict[str, float]:
        return {"score": next(self.scores)}


class Slope:
    """One weight that starts at 0.5; the gradient of a step is given. `seen` are the weights of evaluations."""

    score = "score"
    device = torch.device("cpu")

    def __init__(self, *gradients: float) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.model.weight.data.fill_(0.5)
        self.gradients, self.seen = gradients, list[float]()

    def loss(self, step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.gradients[step] * self.model.weight.sum(), {}

    def evaluate(self) -> dict[str, float]:
        self.seen.append(self.model.weight.item())
        return {"score": 0.0}


def start(folder: Path, task: Line | Slope | None = None, name: str = "a", **options: float) -> Fit:
    defaults = {"steps": 20, "lr": 0.05, "evaluate_every": 5, "plateau": 0}
    return Fit("line", task or Line(), FitOptions(**{**defaults, **options}), folder, {"name": name})


def stop_at(run: Fit, step: int) -> None:
    with pytest.raises(Stopped, match=f"saved at step {step}"):
        run.run(lambda: "asked to" if run.progress.step == step else None)


def test_resumed_training_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole")
    whole.run(lambda: None)
    stop_at(start(tmp_path / "cut"), 3)
    stop_at(start(tmp_path / "cut"), 11)
    resumed = start(tmp_path / "cut")
    resumed.run(lambda: None)
    assert resumed.progress.step == 20
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name])
        assert torch.equal(whole.averages.tracks["ema"].shadow[name], resumed.averages.tracks["ema"].shadow[name])
    assert [record["step"] for record in resumed.progress.history] == [5, 10, 15, 20]


def test_a_finished_training_is_not_continued(tmp_path: Path) -> None:
    start(tmp_path).run(lambda: None)
    for steps in (20, 30, 10):
        again = start(tmp_path, steps=steps)
        assert again.progress.is_done()
        assert again.run(lambda: None).step == 20


def test_other_options_are_refused(tmp_path: Path) -> None:
    stop_at(start(tmp_path), 3)
    with pytest.raises(UserError, match="was started with name = 'a', now it is 'b'"):
        start(tmp_path, name="b")
    with pytest.raises(UserError, match=r"lr = 0\.05"):
        start(tmp_path, lr=0.1)


def test_time_decides_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(fit.time, "monotonic", lambda: float(next(clock)))
    run = start(tmp_path, steps=None, minutes=1, evaluate_every=1000)
    state = run.run(lambda: None)
    assert state.end == state.step
    # 48 of 60 seconds at the full rate; the clock ticks several times per step
    assert 60 * 0.9 < state.seconds < 60 * 1.2
    assert run.rate(round(0.8 * state.step) - 1) == 0.05


def test_a_plateau_ends_the_training(tmp_path: Path) -> None:
    scores = iter([1.0, 2.0, 3.0, 3.01, 3.02, 3.0, *[9.0] * 50])
    state = start(tmp_path, Line(scores), steps=None, plateau=3, min_gain=0.05).run(lambda: None)
    assert state.end == state.step == 38  # 30 steps, and a fifth of the whole to decay


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not finite at step 20"):
        start(tmp_path, Line(factor=float("nan"))).run(lambda: None)


def test_a_damaged_state_is_reported(tmp_path: Path) -> None:
    stop_at(start(tmp_path), 3)
    path = tmp_path / fit.STATE_FILE
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a complete safetensors file"):
        start(tmp_path)


def test_what_a_killed_training_left_is_removed(tmp_path: Path) -> None:
    leftover = leave(tmp_path / fit.STATE_FILE)
    start(tmp_path).run(lambda: None)
    assert not leftover.exists()


# --- hand-computed values ----------------------------------------------------------------------


def test_two_steps_of_the_optimizer(tmp_path: Path) -> None:
    """AdamW with betas 0.9 and 0.99, a gradient of 10 clipped to 1 and one of 0.5, and a weight decay of 0.2.

    Warm-up and decay of two steps are one step each, which both begin at the full rate.
    """
    task = Slope(10.0, 0.5)
    run = start(tmp_path, task, steps=2, lr=0.1, weight_decay=0.2, evaluate_every=1, ema=0.15)
    run.run(lambda: None)
    first = 0.5 * (1 - 0.1 * 0.2) - 0.1
    momentum = (0.9 * 0.1 * 1 + 0.1 * 0.5) / (1 - 0.9**2)
    variance = (0.99 * 0.01 * 1 + 0.01 * 0.25) / (1 - 0.99**2)
    second = first * (1 - 0.1 * 0.2) - 0.1 * momentum / math.sqrt(variance)
    assert task.model.weight.item() == pytest.approx(second, rel=1e-5)
    # averages ramp up from a decay of 1 / 10, then 2 / 11, of which 0.15 is the limit
    averages = [0.1 * 0.5 + 0.9 * first]
    averages.append(0.15 * averages[0] + 0.85 * second)
    assert task.seen == pytest.approx(averages, rel=1e-5), "evaluations see the averaged weights"
    run.use_averages()
    assert task.model.weight.item() == pytest.approx(averages[1], rel=1e-5)


def test_frozen_weights_are_neither_trained_nor_saved(tmp_path: Path) -> None:
    task = Line()
    task.model.bias.requires_grad_(False)
    run = start(tmp_path, task)
    run.run(lambda: None)
    assert list(run.weights) == ["weight"]
    assert task.model.bias.item() == 0
    assert not any("bias" in name for name in load_file(tmp_path / fit.STATE_FILE))


def test_the_last_step_is_evaluated(tmp_path: Path) -> None:
    state = start(tmp_path, steps=12, evaluate_every=5).run(lambda: None)
    assert [record["step"] for record in state.history] == [5, 10, 12]


@pytest.mark.parametrize(
    ("scores", "end"),
    [
        # the best of the last three is compared with the best of all before
        ([1, 2, 3, 4, 2.5, 2.5], None),
        ([1, 2, 3, 4, 2.5, 2.5, 2.5], 44),
        ([1, 2, 3, 3.2, 2.5, 2.5], None),
        ([5, 1, 1, 5.04], 25),
        ([5, 1, 1, 5.06], None),
        ([5, 1, 5.06, 1], None),
        ([1, 1, 1], None),
    ],
)
def test_a_plateau_is_three_evaluations_without_gain(tmp_path: Path, scores: list[float], end: int | None) -> None:
    run = start(tmp_path, Line(iter(scores)), steps=None, plateau=3, min_gain=0.05)
    stop_at(run, 5 * len(scores))
    assert run.progress.end == end


@pytest.mark.parametrize(
    ("total", "warmup", "rates"),
    [
        (100, 4, {0: 0.25, 1: 0.5, 3: 1, 4: 1, 50: 1, 79: 1, 90: 0.5}),
        (30, 200, {0: 1 / 3, 1: 2 / 3, 2: 1, 3: 1}),  # a tenth of few steps
        (None, 200, {0: 1 / 200, 99: 1 / 2, 199: 1, 10**6: 1}),
        (14, 0, {10: 1, 11: 1, 12: 2 / 3, 13: 1 / 3}),  # a fifth, rounded to steps
    ],
)
def test_the_rate_warms_up_and_decays_at_last(tmp_path: Path, total: Any, warmup: int, rates: dict[int, float]) -> None:
    run = start(tmp_path, steps=total, lr=1.0, warmup=warmup)
    assert {step: run.rate(step) for step in rates} == pytest.approx(rates)


def test_minutes_count_over_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks a second whenever it is read: 60 s in all, with the time of both runs."""
    clock = count()
    monkeypatch.setattr(fit.time, "monotonic", lambda: float(next(clock)))
    stop_at(start(tmp_path, steps=None, minutes=1, evaluate_every=1000), 8)
    assert next(clock) > 15
    state = start(tmp_path, steps=None, minutes=1, evaluate_every=1000).run(lambda: None)
    assert state.step > 8
    assert 60 * 0.9 < state.seconds < 60 * 1.2
    assert next(clock) < 60 * 1.5, "not twice the time"


def test_the_state_is_saved_every_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = count(step=25)
    monkeypatch.setattr(fit.time, "monotonic", lambda: float(next(now)))
    times = []

    def watch() -> None:
        times.append((tmp_path / fit.STATE_FILE).is_file())

    start(tmp_path, steps=8).run(watch)
    assert times[0] is False
    assert times[-1] is True, "before the last step"


def test_fewer_steps_than_were_taken_end_the_training(tmp_path: Path) -> None:
    stop_at(start(tmp_path), 11)
    shorter = start(tmp_path, steps=5)
    assert (shorter.progress.end, shorter.progress.step) == (11, 11)
    assert shorter.run(lambda: None).step == 11


def test_more_steps_continue_a_training(tmp_path: Path) -> None:
    stop_at(start(tmp_path), 11)
    assert start(tmp_path, steps=25).run(lambda: None).step == 25
