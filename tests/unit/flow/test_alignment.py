"""The loss of [objective.alignment]: which tokens are compared with which features, and when."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config.schema_objective import AlignmentTerm
from sd3_light.core.batch import Batch
from sd3_light.core.columns import TEACHER
from sd3_light.core.objective import Prediction
from sd3_light.flow.alignment import FeatureAlignment, SelfAlignment, make_projector
from sd3_light.flow.objective import interpolate
from sd3_light.randomness import occurrence_words

SIZE, WIDTH, ROWS, COLUMNS = 2, 5, 2, 3


def aligned(**options: Any) -> FeatureAlignment:
    objective = FeatureAlignment(WIDTH, WIDTH, 1, AlignmentTerm(**options))
    objective.heads = {"alignment": nn.Identity()}
    return objective


def features() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-127, 128, (SIZE, WIDTH, ROWS, COLUMNS), generator=generator).to(torch.int8)


def tokens_of(values: Tensor) -> Tensor:
    """Row by row, as denoisers order their tokens."""
    rows = [values[:, :, row, column] for row in range(ROWS) for column in range(COLUMNS)]
    return torch.stack(rows, 1).float()


def loss(objective: FeatureAlignment, tokens: Tensor, **values: Tensor) -> Tensor:
    out = Prediction(torch.zeros(SIZE), {1: tokens})
    return objective.losses(out, Batch(SIZE, values))["alignment"]


def test_tokens_are_compared_with_the_features_of_their_place_if_they_count() -> None:
    values = features()
    assert loss(aligned(), 3 * tokens_of(values), teacher=values).abs().max() < 1e-6
    turned = loss(aligned(), tokens_of(values.flip(3)), teacher=values)
    assert turned.min() > 0.3
    assert loss(aligned(), -tokens_of(values), teacher=values).tolist() == pytest.approx([2.0, 2.0])
    tokens = torch.cat([tokens_of(values), torch.randn(SIZE, 4, WIDTH)], 1)
    assert loss(aligned(), tokens, teacher=values).abs().max() < 1e-6
    kept = torch.tensor([[0, 3, 5], [1, 2, 4]], dtype=torch.int32)
    tokens = tokens_of(values).take_along_dim(kept.long()[:, :, None], 1)
    assert loss(aligned(), tokens, teacher=values, kept=kept).abs().max() < 1e-6
    others = torch.tensor([[1, 3, 5], [1, 2, 4]], dtype=torch.int32)
    first, second = loss(aligned(), tokens, teacher=values, kept=others).tolist()
    assert first > 0.1
    assert second < 1e-6
    tokens = tokens_of(values)
    tokens[:, 5] *= -1
    mask = torch.ones(SIZE, 2 * ROWS, 2 * COLUMNS)  # four latent pixels per token
    mask[0, 2:, 4:] = 0
    mask[1, 2, 4:] = 0
    losses = loss(aligned(), tokens, teacher=values, mask=mask)
    assert losses.tolist() == pytest.approx([0.0, 2 * 0.5 / 5.5], abs=1e-6)
    kept = torch.tensor([[5], [5]], dtype=torch.int32)
    tokens = -tokens_of(values)[:, 5:]
    mask = torch.ones(SIZE, 2 * ROWS, 2 * COLUMNS)
    mask[0, 2:, 4:] = 0
    assert loss(aligned(), tokens, teacher=values, kept=kept, mask=mask).tolist() == pytest.approx([0.0, 2.0])
    kept = torch.tensor([[0], [1]], dtype=torch.int32)
    tokens = tokens_of(values)
    tokens[:, 5] *= -1
    assert loss(aligned(), tokens, teacher=values, kept=kept).tolist() == pytest.approx([2 / 6] * SIZE)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_projectors_map_the_grid(kind: Any) -> None:
    projector = make_projector(kind, 7, 3)
    assert projector(torch.zeros(2, 7, 4, 5)).shape == (2, 3, 4, 5)
    assert isinstance(projector, nn.Conv2d) is (kind == "conv")


def test_the_gradient_reaches_tokens_and_projector_until_the_term_ends() -> None:
    objective = FeatureAlignment(WIDTH, WIDTH, 1, AlignmentTerm())
    tokens = tokens_of(features()).requires_grad_()
    loss(objective, tokens, teacher=features()).mean().backward()
    assert tokens.grad.abs().sum() > 0
    assert all(weight.grad is not None for weight in objective.heads["alignment"].parameters())
    # the term ends at its share, with gradients of 0
    objective = FeatureAlignment(WIDTH, WIDTH, 1, AlignmentTerm(until=0.25))
    assert objective.draws
    assert not FeatureAlignment(WIDTH, WIDTH, 1, AlignmentTerm()).draws
    batch = Batch(SIZE, {TEACHER: features(), "t": torch.rand(SIZE)})
    kept = [TEACHER in objective.draw(observed(step), batch).values for step in range(4, 12, 2)]
    assert kept == [True, True, True, False]
    assert TEACHER in objective.draw(SimpleNamespace(step=99, steps=None), batch).values, "a length is not known"
    tokens = tokens_of(features()).requires_grad_()
    ended = loss(objective, tokens)
    assert ended.tolist() == [0.0, 0.0]
    ended.mean().backward()
    for weight in (tokens, *objective.heads["alignment"].parameters()):
        assert not weight.grad.any()
    objective = SelfAlignment(WIDTH, 1, 3, AlignmentTerm(until=0.5))
    model = Teaches(step=20)
    batch = Batch(1, {})
    assert objective.draw(model, batch) is batch  # type: ignore[arg-type]
    assert not model.seen


def observed(step: int, steps: int = 40) -> Any:
    return SimpleNamespace(step=step, steps=steps)


class Teaches:
    """A model whose teacher returns the latents as tokens, and keeps what it was shown."""

    steps: int | None = 40

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.seen: list[Batch] = []

    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        assert tuple(taps) == (3,)
        self.seen.append(batch)
        return Prediction(batch["noisy"], {3: batch["noisy"][:, :, ::2, ::2].flatten(2).transpose(1, 2)})


def test_the_average_sees_the_same_image_with_less_of_the_same_noise() -> None:
    clean, noise = torch.randn(2, 64, WIDTH, 2 * ROWS, 2 * COLUMNS)
    t = torch.rand(64)
    words = torch.from_numpy(occurrence_words(0, 0, range(64))).view(torch.int32)
    values = {"noisy": interpolate(clean, noise, t), "t": t, "target": noise - clean, "words": words}
    objective = SelfAlignment(WIDTH, 1, 3, AlignmentTerm(until=0.5))
    model = Teaches()
    drawn = objective.draw(model, Batch(64, values))  # type: ignore[arg-type]
    (seen,) = model.seen
    earlier = seen["t"]
    assert bool((earlier <= t).all())
    assert 0.4 < (earlier / t).mean() < 0.6
    torch.testing.assert_close(seen["noisy"], interpolate(clean, noise, earlier), rtol=1e-4, atol=1e-5)
    assert torch.equal(drawn["noisy"], values["noisy"])
    assert torch.equal(drawn[TEACHER], seen["noisy"][:, :, ::2, ::2])
    again = objective.draw(Teaches(), Batch(64, values))  # type: ignore[arg-type]
    assert torch.equal(again[TEACHER], drawn[TEACHER])
