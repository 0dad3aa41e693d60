"""The loop of a part: resuming, when it ends, and what it refuses."""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
import torch
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


def start(folder: Path, task: Line | None = None, name: str = "a", **options: float) -> Fit:
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
    again = start(tmp_path)
    assert again.progress.is_done()
    assert again.run(lambda: None).step == 20


def test_other_options_are_refused(tmp_path: Path) -> None:
    stop_at(start(tmp_path), 3)
    with pytest.raises(UserError, match="was started with name = 'a', now it is 'b'"):
        start(tmp_path, name="b")
    with pytest.raises(UserError, match=r"lr = 0\.05"):
        start(tmp_path, lr=0.1)


def test_the_rate_warms_up_and_decays_over_the_last_fifth(tmp_path: Path) -> None:
    run = start(tmp_path, steps=100, lr=1.0, warmup=4)
    assert [run.rate(step) for step in (0, 1, 3, 4, 50, 79)] == [0.25, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert run.rate(90) == pytest.approx(0.5)
    assert 0 < run.rate(99) < 0.1


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


def test_averages_replace_the_weights(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(lambda: None)
    raw = {name: weight.clone() for name, weight in run.weights.items()}
    run.use_averages()
    assert any(not torch.equal(weight, raw[name]) for name, weight in run.weights.items())


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
