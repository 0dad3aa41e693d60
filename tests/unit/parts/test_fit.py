"""The loop of a part: resuming, when it ends, and what it refuses."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sd3_light.config.faults import Stopped
from sd3_light.parts import fit
from sd3_light.parts.fit import Fit, FitOptions, interrupt_between_layers, saved_identity
from sd3_light.randomness import stream
from tests.leftovers import leave
from tests.refusals import refused


class Line:
    """Fits a line; `scores` are the results of its evaluations, by default outputs of the model.

    ``before`` is called with the place in a step: forward, backward or evaluate.
    """

    score = "score"
    device = torch.device("cpu")

    def __init__(
        self,
        scores: Iterator[float] | None = None,
        factor: float = 1.0,
        before: Callable[[str], None] = lambda place: None,
    ) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        with torch.no_grad():
            for number, weight in enumerate(self.model.parameters()):
                weight.fill_(0.1 * (number + 1))
        self.scores, self.factor, self.before = scores, factor, before

    def loss(self, step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        self.before("forward")
        x = torch.from_numpy(stream(0, "line", 0, 0, step).standard_normal((8, 2))).float()
        output = self.model(x)
        output.register_hook(lambda _: self.before("backward"))
        loss = self.factor * (output[:, 0] - x[:, 0] + 2 * x[:, 1]).square().mean()
        return loss, {"twice": 2 * loss.detach()}

    def evaluate(self) -> dict[str, float]:
        self.before("evaluate")
        return {"score": next(self.scores) if self.scores else self.model(torch.ones(1, 2)).item()}


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


def start(folder: Path, task: Line | Slope | None = None, name: str = "a", **options: Any) -> Fit:
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


@pytest.mark.parametrize(("place", "time"), [("forward", 6), ("backward", 6), ("evaluate", 2), ("evaluate", 3)])
def test_an_interrupted_pass_is_repeated_after_resuming(tmp_path: Path, place: str, time: int) -> None:
    """The ``time``-th pass of that kind is abandoned; the weights are those of the last complete step."""
    whole = start(tmp_path / "whole")
    whole.run(lambda: None)
    passes: list[str] = []
    task = Line(before=passes.append)
    interrupt_between_layers(task.model, lambda: "SIGTERM" if passes.count(place) == time else None)
    saved = 5 * time if place == "evaluate" else time - 1
    with pytest.raises(Stopped, match=f"^SIGTERM; line is saved at step {saved}$"):
        start(tmp_path / "cut", task).run(lambda: None)
    resumed = start(tmp_path / "cut")
    assert resumed.progress.step == saved
    resumed.run(lambda: None)
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name])
    results = [(record["step"], record["score"]) for record in resumed.progress.history]
    assert results == [(record["step"], record["score"]) for record in whole.progress.history]


def test_a_run_interrupted_in_its_first_step_starts_again(tmp_path: Path) -> None:
    task = Line()
    interrupt_between_layers(task.model, lambda: "SIGINT")
    with pytest.raises(Stopped, match=r"^SIGINT; line has not finished a step$"):
        start(tmp_path, task).run(lambda: None)
    assert saved_identity(tmp_path) == {}
    assert start(tmp_path).run(lambda: None).step == 20
    assert saved_identity(tmp_path)["name"] == "a"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 40}, "40 steps take about 10 min; a usable model needs thousands"),
        ({"steps": None, "minutes": 1.5}, "1.5 minutes are about 6 steps; a usable model needs thousands"),
        ({"steps": 5000}, "5,000 steps take about 20 h 50 min"),
    ],
)
def test_the_first_step_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: Any, expected: str
) -> None:
    places: list[str] = []
    monkeypatch.setattr(fit.time, "monotonic", lambda: 15.0 * places.count("forward"))
    run = start(tmp_path, Line(before=places.append), **options)
    with pytest.raises(Stopped):
        run.run(lambda: "enough" if run.progress.step == 2 else None)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "on this CPU" in line]
    assert line.startswith(f"line: on this CPU a step takes about 15 s: {expected}")


def test_a_finished_training_is_not_continued(tmp_path: Path) -> None:
    start(tmp_path).run(lambda: None)
    for steps in (20, 30, 10):
        again = start(tmp_path, steps=steps)
        assert again.progress.is_done()
        assert again.run(lambda: None).step == 20


def test_other_options_and_a_damaged_state_are_refused(tmp_path: Path) -> None:
    stop_at(start(tmp_path), 3)
    refused("was started with name = 'a', now it is 'b'", start, tmp_path, name="b")
    refused(r"lr = 0\.05", start, tmp_path, lr=0.1)
    path = tmp_path / fit.STATE_FILE
    path.write_bytes(path.read_bytes()[:-10])
    refused("not a complete safetensors file", start, tmp_path)


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    refused("not finite at step 20", start(tmp_path, Line(factor=float("nan"))).run, lambda: None)


def test_what_a_killed_training_left_is_removed_and_the_last_step_evaluated(tmp_path: Path) -> None:
    leftover = leave(tmp_path / fit.STATE_FILE)
    state = start(tmp_path, steps=12, evaluate_every=5).run(lambda: None)
    assert not leftover.exists()
    assert [record["step"] for record in state.history] == [5, 10, 12]


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
    frozen = task.model[1].requires_grad_(False)
    before = frozen.weight.clone()
    run = start(tmp_path, task)
    run.run(lambda: None)
    assert list(run.weights) == ["0.weight", "0.bias"]
    assert torch.equal(frozen.weight, before)
    assert not any(".1." in name for name in load_file(tmp_path / fit.STATE_FILE))


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
    """The clock ticks a second whenever it is read: 60 s in all, with the time of both runs, 48 at the full rate."""
    clock = count()
    monkeypatch.setattr(fit.time, "monotonic", lambda: float(next(clock)))
    stop_at(start(tmp_path, steps=None, minutes=1, evaluate_every=1000), 8)
    assert next(clock) > 15
    run = start(tmp_path, steps=None, minutes=1, evaluate_every=1000)
    state = run.run(lambda: None)
    assert 8 < state.step == state.end
    assert run.rate(round(0.8 * state.step) - 1) == 0.05
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


@pytest.mark.parametrize(("steps", "end"), [(25, 25), (5, 11)])
def test_more_steps_continue_a_training_and_fewer_than_were_taken_end_it(tmp_path: Path, steps: int, end: int) -> None:
    stop_at(start(tmp_path), 11)
    again = start(tmp_path, steps=steps)
    assert (again.progress.end, again.progress.step) == (end, 11)
    assert again.run(lambda: None).step == end
