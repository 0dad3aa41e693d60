"""Training of parts on a CPU: steps that fit it, an estimate, and a stop inside a step or an evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config.faults import Stopped
from sd3_light.parts import fit
from sd3_light.parts.fit import Fit, FitOptions, interrupt_between_layers, saved_identity
from sd3_light.parts.images import Pool
from sd3_light.parts.sizes import VAE_SIZES, VaeSize
from sd3_light.parts.vae import VaeOptions, VaeTask, build_vae, default_batch
from sd3_light.randomness import stream

CPU = torch.device("cpu")


class Layers:
    """Two layers; ``before`` is called with the place in the step: forward, backward or evaluate."""

    score = "score"
    device = CPU

    def __init__(self, before: Callable[[str], None] = lambda place: None) -> None:
        self.before = before
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        with torch.no_grad():
            for number, weight in enumerate(self.model.parameters()):
                weight.fill_(0.1 * (number + 1))

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.before("forward")
        x = torch.from_numpy(stream(0, "layers", 0, 0, step).standard_normal((8, 2))).float()
        output = self.model(x)
        output.register_hook(lambda _: self.before("backward"))
        return (output[:, 0] - x[:, 0]).square().mean(), {}

    def evaluate(self) -> dict[str, float]:
        self.before("evaluate")
        return {"score": self.model(torch.ones(1, 2)).item()}


def start(folder: Path, task: Layers, **options: Any) -> Fit:
    defaults = {"steps": 12, "lr": 0.05, "evaluate_every": 4, "plateau": 0}
    return Fit("part", task, FitOptions(**{**defaults, **options}), folder, {"batch": 8})


@pytest.mark.parametrize(("place", "time"), [("forward", 6), ("backward", 6), ("evaluate", 2), ("evaluate", 3)])
def test_an_interrupted_pass_is_repeated_after_resuming(tmp_path: Path, place: str, time: int) -> None:
    """The ``time``-th pass of that kind is abandoned; the weights are those of the last complete step."""
    whole = start(tmp_path / "whole", Layers())
    whole.run(lambda: None)
    passes: list[str] = []
    task = Layers(passes.append)
    interrupt_between_layers(task.model, lambda: "SIGTERM" if passes.count(place) == time else None)
    saved = 4 * time if place == "evaluate" else time - 1
    with pytest.raises(Stopped, match=f"^SIGTERM; part is saved at step {saved}$"):
        start(tmp_path / "cut", task).run(lambda: None)
    resumed = start(tmp_path / "cut", Layers())
    assert resumed.progress.step == saved
    resumed.run(lambda: None)
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name])
    results = [(record["step"], record["score"]) for record in resumed.progress.history]
    assert results == [(record["step"], record["score"]) for record in whole.progress.history]


def test_a_run_interrupted_in_its_first_step_starts_again(tmp_path: Path) -> None:
    task = Layers()
    interrupt_between_layers(task.model, lambda: "SIGINT")
    with pytest.raises(Stopped, match=r"^SIGINT; part has not finished a step$"):
        start(tmp_path, task).run(lambda: None)
    assert saved_identity(tmp_path) == {}
    assert start(tmp_path, Layers()).run(lambda: None).step == 12
    assert saved_identity(tmp_path)["batch"] == 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 40}, "40 steps take about 10 min; a usable model needs thousands"),
        ({"steps": None, "minutes": 1.5}, "1.5 minutes are about 6 steps; a usable model needs thousands"),
        ({"steps": 5000}, "5,000 steps take about 20 h 50 min"),
    ],
)
def test_the_first_step_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    expected: str,
) -> None:
    clock = {"now": 0.0}

    def before(place: str) -> None:
        clock["now"] += 15.0 if place == "forward" else 0.0

    monkeypatch.setattr(fit.time, "monotonic", lambda: clock["now"])
    run = start(tmp_path, Layers(before), **options)
    with pytest.raises(Stopped):
        run.run(lambda: "enough" if run.progress.step == 2 else None)
    lines = [line for line in capsys.readouterr().err.splitlines() if "on this CPU" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"part: on this CPU a step takes about 15 s: {expected}")


def pool(side: int, count: int = 4) -> Pool:
    return Pool(torch.zeros(count, side, side, 3, dtype=torch.uint8), tuple(range(count)), ((),) * count, 1, "")


@pytest.mark.parametrize(
    ("size", "sides", "expected"),
    [("tiny", [64], 16), ("tiny", [128], 4), ("tiny", [16, 64], 16), ("small", [128], 2), ("medium", [512], 2)],
)
def test_the_batch_fits_the_cpu(size: str, sides: list[int], expected: int) -> None:
    vae, pools = build_vae(VAE_SIZES[size], 16, 0), [pool(side) for side in sides]
    assert default_batch(vae, pools, CPU) == expected
    assert default_batch(vae, pools, torch.device("cuda")) == 128, "that of GPUs is another choice"


def test_a_batch_of_the_options_is_used_as_it_is() -> None:
    vae = build_vae(VaeSize((8, 8), 1, 4), 16, 0)
    assert VaeTask(vae, [pool(32)], CPU, VaeOptions(batch=77)).batch == 77
    assert VaeTask(vae, [pool(32)], CPU, VaeOptions()).options.batch == 128
