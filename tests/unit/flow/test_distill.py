"""What a distilled model is trained towards: the teacher's guided velocity, and where its path arrives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Prediction
from sd3_light.flow.distill import GuidanceDistillation, StepDistillation
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.randomness import occurrence_words

SHAPE = (4, 2, 4, 4)


@dataclass
class Linear:
    """A teacher whose velocity is ``rate`` times the latents, plus the text; it counts its passes."""

    rate: float
    step: int = 0
    passes: int = 0

    def infer(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        raise NotImplementedError

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(torch.zeros_like(batch["noisy"]))

    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        assert "guidance" not in batch.values, "the teacher runs with its own guidance number"
        self.passes += 1
        return Prediction(self.rate * batch["noisy"] + batch["text"].view(-1, 1, 1, 1))

    def without_text(self, batch: Batch) -> Batch:
        return batch.with_values({"text": torch.zeros_like(batch["text"])})


def batch(epoch: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(epoch)
    clean, noise = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    t = torch.tensor([0.2, 0.4, 0.6, 0.8])
    words = torch.from_numpy(occurrence_words(epoch, 0, np.arange(4))).view(torch.int32)
    values = {"noisy": interpolate(clean, noise, t), "t": t, "target": velocity(clean, noise), "words": words}
    return Batch(4, {**values, "text": torch.tensor([1.0, 2, 3, 4]), "clean": clean, "noise": noise})


def test_guidance_is_learnt_at_the_batch_s_own_times() -> None:
    given = batch()
    drawn = GuidanceDistillation(3.0).draw(Linear(1.0), given)
    expected = given["noisy"] + 3 * given["text"].view(-1, 1, 1, 1)
    torch.testing.assert_close(drawn["taught"], expected)
    assert torch.equal(drawn["t"], given["t"])
    assert drawn["guidance"].tolist() == [3.0] * 4
    loss = GuidanceDistillation(3.0).evaluate(Linear(1.0), given)
    torch.testing.assert_close(loss, expected.square().flatten(1).mean(1))
    for objective in (GuidanceDistillation(1.0), StepDistillation(lambda _: torch.tensor([1.0, 0]), 2, guidance=1.0)):
        teacher = Linear(1.0)
        drawn = objective.draw(teacher, batch())
        assert "guidance" not in drawn.values
        assert teacher.passes == (2 if isinstance(objective, StepDistillation) else 1)
    teacher = Linear(1.0)
    GuidanceDistillation(1.5).draw(teacher, batch())
    assert teacher.passes == 2
    zero = GuidanceDistillation(0.5, is_guided=lambda scale: scale > 0)
    zero.draw(teacher, batch())
    assert teacher.passes == 4


@pytest.mark.parametrize(
    "objective", [GuidanceDistillation(3.0), StepDistillation(lambda _: torch.tensor([1.0, 0]), 2)]
)
def test_what_a_mask_excludes_is_not_taught(objective: GuidanceDistillation) -> None:
    mask = torch.ones(4, 4, 4)
    mask[:, 1:] = 0
    drawn = objective.draw(Linear(1.0), batch().with_values({"mask": mask}))
    hidden = drawn["taught"].clone()
    hidden[:, :, 1:] += 100
    out = Prediction(torch.zeros(SHAPE))
    losses = [
        objective.losses(out, drawn.with_values({"taught": taught}))["distill"] for taught in (drawn["taught"], hidden)
    ]
    assert torch.equal(*losses)
    torch.testing.assert_close(losses[0], drawn["taught"][:, :, 0].square().flatten(1).mean(1))


def test_each_sample_draws_its_own_scale() -> None:
    objective = GuidanceDistillation(2.0, 6.0, seed=1)
    given = batch()
    drawn = objective.draw(Linear(0.0), given)
    scales = drawn["guidance"]
    assert len(set(scales.tolist())) == 4
    assert 2 <= scales.min() <= scales.max() < 6
    torch.testing.assert_close(drawn["taught"][:, 0, 0, 0], scales * given["text"])
    halves = [objective.draw(Linear(0.0), half)["guidance"] for half in given.split(2)]
    assert torch.equal(torch.cat(halves), scales), "a draw belongs to its sample"
    assert not torch.equal(objective.draw(Linear(0.0), batch(1))["guidance"], scales), "and to its epoch"


def times(batch: Batch) -> Tensor:
    return torch.tensor([1.0, 0.5, 0.0])


def test_a_call_arrives_where_the_teacher_does() -> None:
    given = batch()
    drawn = StepDistillation(times, 2000, guidance=1.0).draw(Linear(1.0), given.with_values({"text": torch.zeros(4)}))
    assert set(drawn["t"].tolist()) <= {1.0, 0.5}
    start = interpolate(given["clean"], given["noise"], drawn["t"])
    torch.testing.assert_close(drawn["noisy"], start)
    # dx/dt = x: half of the way back to 0 takes exp(-1/2)
    torch.testing.assert_close(start - 0.5 * drawn["taught"], start * np.exp(-0.5), atol=1e-3, rtol=1e-3)
    objective = StepDistillation(times, 2, guidance=1.0)
    drawn = [objective.draw(Linear(1.0), batch(epoch))["t"] for epoch in range(100)]
    share = (torch.cat(drawn) == 1.0).float().mean()
    assert share == pytest.approx(0.5, abs=0.1)
    for teacher_steps, passes in ((2, 2), (8, 8), (7, 8)):  # the teacher's share of the steps, with two passes each
        teacher = Linear(1.0)
        StepDistillation(times, teacher_steps, guidance=2.0).draw(teacher, batch())
        assert teacher.passes == passes
