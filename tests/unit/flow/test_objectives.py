"""The terms of [objective]: preferences equal the loss of tasks, and start at log 2."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.config.schema_objective import DpoTerm
from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objectives, Prediction
from sd3_light.flow.losses import FlowMatchDPOLoss
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.flow.objectives import FlowMatching, Preference, configured_term

SHAPE = (3, 2, 4, 4)


class Scaled:
    """A model that predicts multiples of its input; its teacher predicts another multiple."""

    step = 0

    def __init__(self, factor: float, taught: float) -> None:
        self.factor = torch.tensor(factor, requires_grad=True)
        self.taught = taught
        self.passes = 0

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        self.passes += 1
        return Prediction(self.factor * batch["noisy"])

    infer = predict

    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(self.taught * batch["noisy"])


def pair() -> tuple[dict[str, Tensor], Batch]:
    """Return the inputs of the tasks' loss, and the batch with the same images, noise and times."""
    random = torch.Generator().manual_seed(0)
    clean, rejected, noise = (torch.randn(SHAPE, generator=random) for _ in range(3))
    t = torch.tensor([0.2, 0.5, 0.9])
    values = {"noisy": interpolate(clean, noise, t), "t": t, "target": velocity(clean, noise)}
    values |= {"noisy.rejected": interpolate(rejected, noise, t), "target.rejected": velocity(rejected, noise)}
    return {"latents": clean, "rejected": rejected, "noise": noise, "quantile": t.double()}, Batch(3, values)


def test_preferences_have_the_loss_of_tasks() -> None:
    inputs, batch = pair()
    model = Scaled(0.7, 0.6)

    def multiple(factor: Any) -> Any:
        return lambda noisy, t, values: factor * noisy

    loss = FlowMatchDPOLoss(timestep_sample_method="uniform", beta=5.0)
    expected = loss(multiple(model.factor), inputs, multiple(model.taught))
    objective = configured_term(DpoTerm(beta=5.0, weight=0.5), TrainConfig.model_construct(), 0)
    each = objective(model, objective.draw(model, batch))["dpo"]
    torch.testing.assert_close(each, expected)
    assert objective.weights == {"dpo": 0.5}
    assert objective.reads == ("moments.rejected",)
    _, batch = pair()
    model = Scaled(0.7, 0.7)
    objective = Objectives([FlowMatching(), Preference()])
    assert objective.teacher == "start"
    drawn = objective.draw(model, batch)
    losses = objective(model, drawn)
    assert losses["dpo"].tolist() == pytest.approx([math.log(2)] * 3)
    assert model.passes == 2, "flow matching shares the pass of the preferred image"
    losses["dpo"].sum().backward()
    assert model.factor.grad is not None
    assert model.factor.grad != 0
    assert torch.equal(objective.evaluate(model, batch), losses["flow"]), "evaluation needs no pairs"
