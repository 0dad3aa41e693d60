"""The reward loss: its terms and gradient, relative rewards, and the diversity of drawn images."""

from collections.abc import Sequence

import pytest
import torch

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Prediction
from sd3_light.flow.reward import Rewarded, diversity, relative_rewards


class Constant:
    """A model whose predictions are 3, and those of its teacher and of its start 2 and 1."""

    step = 0

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(torch.full_like(batch["target"], 3.0))

    infer = predict

    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(torch.full_like(batch["target"], 2.0))

    def first(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(torch.full_like(batch["target"], 1.0))


@pytest.mark.parametrize("kl", [0.0, 0.25])
def test_the_loss_is_that_of_drawn_images_and_holds_the_start(kl: float) -> None:
    """With a target of 0.5: 0.9 (2 + b - 0.5)^2 + 0.1 (2 - b - 0.5)^2 for a share b of 0.5, and (3 - 1)^2."""
    drawn = Batch(2, {"target": torch.full((2, 1, 2, 2), 0.5), "reward": torch.full((2,), 0.9)})
    state = {"latents": torch.zeros(1)}
    model = Constant()
    objective = Rewarded(beta=0.5, kl=kl)
    objective.attach(lambda observed, batch: drawn, state)
    batch = objective.draw(model, Batch(2, {}))
    losses = objective.losses(model.predict(batch), batch)
    assert losses["reward"].tolist() == pytest.approx([0.9 * 4 + 0.1 * 1] * 2)
    others = {name: values.tolist() for name, values in losses.items() if name != "reward"}
    assert others == ({"kl": [4.0, 4.0]} if kl else {})
    assert objective.weights == ({"reward": 1.0, "kl": kl} if kl else {"reward": 1.0})
    assert objective.keeps_start == bool(kl)
    assert objective.state is state
    assert objective.evaluate(model, drawn).tolist() == pytest.approx([6.25] * 2), "the flow loss of its own images"


def test_rewards_are_relative_to_the_images_of_a_prompt() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.0], [5.0, 5.0, 5.0, 5.0], [10.0, 20.0, 30.0, 40.0]])
    rewards = torch.cat([relative_rewards(prompt[None]) for prompt in scores])
    assert rewards[1].tolist() == [0.5] * 4
    assert rewards[0].tolist() == pytest.approx([0.2113, 0.2113, 0.2113, 1.0], abs=1e-3)
    assert rewards[2].tolist() == pytest.approx([0.0, 0.2764, 0.7236, 1.0], abs=1e-3)
    torch.testing.assert_close(relative_rewards(scores[2:] * 100 + 7)[0], rewards[2])
    # beside prompts whose images differ, and alone, in every scale of scores.
    nearly = [0.7, 0.7 + 1e-7, 0.7, 0.7 - 1e-7]
    beside = relative_rewards(torch.tensor([[0.0, 0.0, 0.0, 1.0], nearly], dtype=torch.float64))
    assert (beside[1] - 0.5).abs().max() < 1e-5
    assert beside[0, 3] == 1.0
    for scale in (1e-3, 1.0, 1e4):
        alone = relative_rewards(scale * torch.tensor([nearly], dtype=torch.float64))
        assert (alone - 0.5).abs().max() < 2e-3
    assert relative_rewards(torch.zeros(2, 3)).unique().tolist() == [0.5]
    little = relative_rewards(torch.tensor([[0.0, 1.0], [0.5, 0.6]]))
    assert 0.5 < little[1, 1] < 0.6, "the deviation is that of all prompts"


def test_the_gradient_pulls_to_good_images_and_away_from_bad_ones() -> None:
    taught, target = torch.zeros(3, 1, 1, 1), torch.ones(3, 1, 1, 1)
    batch = Batch(3, {"taught": taught, "target": target, "reward": torch.tensor([1.0, 0.5, 0.0])})
    out = torch.zeros(3, 1, 1, 1, requires_grad=True)
    each = Rewarded(beta=0.5).losses(Prediction(out), batch)["reward"]
    each.sum().backward()
    assert out.grad.flatten().tolist() == [-1.0, 0.0, 1.0]
    assert each.tolist() == [1.0, 1.0, 1.0]
    same = torch.randn(2, 1, 64).expand(2, 4, 64)
    assert diversity(same) == 0
    points = torch.tensor([[[0.0, 0.0], [2.0, 2.0]], [[1.0, 1.0], [2.0, 2.0]]])
    assert diversity(points) == pytest.approx(1.5)
