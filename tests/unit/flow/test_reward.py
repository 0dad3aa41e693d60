"""The reward loss: relative rewards, its gradient, and a toy flow that it moves towards a score."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Observes, Prediction
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.flow.reward import Rewarded, diversity, relative_rewards

POINTS = 256


class Toy(nn.Module):
    """A flow of points in a plane, with the methods that an objective calls."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        self.others: dict[str, Toy] = {}

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(self.net(torch.cat([batch["noisy"], batch["t"][:, None]], dim=1)))

    @torch.no_grad()
    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return self.others["teacher"].predict(batch)

    infer = teach

    @torch.no_grad()
    def first(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return self.others["start"].predict(batch)

    @torch.no_grad()
    def draw(self, generator: torch.Generator, steps: int = 12) -> Tensor:
        points = torch.randn((POINTS, 2), generator=generator)
        for number in range(steps, 0, -1):
            t = torch.full((POINTS,), number / steps)
            points = points - self.predict(Batch(POINTS, {"noisy": points, "t": t})).velocity / steps
        return points


@cache
def pretrained() -> Toy:
    """A flow to points around (0, 0) with deviation 1/2."""
    generator = torch.Generator().manual_seed(2)
    model = Toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        clean = 0.5 * torch.randn((POINTS, 2), generator=generator)
        noise, t = torch.randn((POINTS, 2), generator=generator), torch.rand(POINTS, generator=generator)
        out = model.predict(Batch(POINTS, {"noisy": interpolate(clean, noise, t), "t": t}))
        (out.velocity - velocity(clean, noise)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def rewarded(scores: Callable[[Tensor, torch.Generator], Tensor], kl: float = 0.0) -> Tensor:
    """Train by 20 draws of which each is scored, and return points of the last teacher."""
    generator = torch.Generator().manual_seed(1)
    model, teacher, start = (deepcopy(pretrained()) for _ in range(3))
    model.others = {"teacher": teacher, "start": start}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        clean = teacher.draw(generator)
        reward = relative_rewards(scores(clean, generator).view(8, -1)).flatten()

        def drawn(observed: Observes, batch: Batch, clean: Tensor = clean, reward: Tensor = reward) -> Batch:
            noise, t = torch.randn((POINTS, 2), generator=generator), torch.rand(POINTS, generator=generator)
            values = {"noisy": interpolate(clean, noise, t), "t": t, "target": velocity(clean, noise)}
            return Batch(POINTS, {**values, "reward": reward})

        objective = Rewarded(kl=kl)
        objective.attach(drawn, {})
        for _ in range(10):
            batch = objective.draw(model, Batch(POINTS))
            each = objective.losses(model.predict(batch), batch)
            sum(objective.weights[name] * values.mean() for name, values in each.items()).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.5)
    return teacher.draw(generator)


def to_the_right(points: Tensor, generator: torch.Generator) -> Tensor:
    return points[:, 0]


def test_a_flow_moves_towards_its_score_and_not_by_shuffled_scores() -> None:
    def shuffled(points: Tensor, generator: torch.Generator) -> Tensor:
        return points[torch.randperm(POINTS, generator=generator), 0]

    moved = rewarded(to_the_right)
    assert moved[:, 0].mean() > 0.8
    assert abs(moved[:, 1].mean()) < 0.3, "only what is scored changes"
    assert abs(rewarded(shuffled)[:, 0].mean()) < 0.3
    assert rewarded(to_the_right, kl=3.0)[:, 0].mean() < 0.6 * moved[:, 0].mean(), "kl holds the start"


def test_rewards_are_relative_to_the_images_of_a_prompt() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.0], [5.0, 5.0, 5.0, 5.0], [10.0, 20.0, 30.0, 40.0]])
    rewards = torch.cat([relative_rewards(prompt[None]) for prompt in scores])
    assert rewards[1].tolist() == [0.5] * 4
    assert rewards[0].tolist() == pytest.approx([0.2113, 0.2113, 0.2113, 1.0], abs=1e-3)
    assert rewards[2].tolist() == pytest.approx([0.0, 0.2764, 0.7236, 1.0], abs=1e-3)
    torch.testing.assert_close(relative_rewards(scores[2:] * 100 + 7)[0], rewards[2])


def test_images_that_hardly_differ_get_no_reward_from_rounding() -> None:
    """Beside prompts whose images differ, and alone, in every scale of scores."""
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
    assert out.grad is not None
    assert out.grad.flatten().tolist() == [-1.0, 0.0, 1.0]
    assert each.tolist() == [1.0, 1.0, 1.0]


def test_diversity_is_the_distance_of_two_images() -> None:
    same = torch.randn(2, 1, 64).expand(2, 4, 64)
    assert diversity(same) == 0
    points = torch.tensor([[[0.0, 0.0], [2.0, 2.0]], [[1.0, 1.0], [2.0, 2.0]]])
    assert diversity(points) == pytest.approx(1.5)
