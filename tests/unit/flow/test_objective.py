"""The flow losses against explicit computations in float64, 50-digit decimals and plain loops."""

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.flow.objective import alignment_loss, flow_loss, interpolate, text_reconstruction_loss, velocity

B, C, H, W = 6, 4, 5, 7


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return normal(B, C, H, W, seed=1), normal(B, C, H, W, seed=2)


def mask() -> Tensor:
    drawn = (normal(B, H, W, seed=3) > 0.3).float()
    drawn[:, 0, 0] = 1.0
    return drawn


def wide(tensor: Tensor) -> Any:
    return tensor.double().numpy()


def test_the_path_and_its_velocity() -> None:
    clean, noise, t = normal(B, C, H, W, seed=1), normal(B, C, H, W, seed=2), torch.linspace(0, 1, B)
    at = t.double().numpy()[:, None, None, None]
    np.testing.assert_allclose(interpolate(clean, noise, t), (1 - at) * wide(clean) + at * wide(noise), atol=1e-6)
    assert torch.equal(interpolate(clean, noise, t)[0], clean[0])
    assert torch.equal(interpolate(clean, noise, t)[-1], noise[-1])
    np.testing.assert_allclose(velocity(clean, noise), wide(noise) - wide(clean), atol=1e-6)


def test_errors_of_each_sample_respect_the_mask_in_float32(pair: tuple[Tensor, Tensor]) -> None:
    predicted, target = pair
    expected = ((wide(predicted) - wide(target)) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(flow_loss(predicted, target), expected, rtol=1e-5)
    torch.testing.assert_close(flow_loss(predicted, target, torch.ones(B, H, W)), flow_loss(predicted, target))
    where = mask()
    torch.testing.assert_close(flow_loss(predicted, target, 0.25 * where), flow_loss(predicted, target, where))
    constant = target + 2.0  # the same error everywhere: any mask must give the same loss
    torch.testing.assert_close(flow_loss(constant, target, where), torch.full((B,), 4.0))
    weight = torch.rand(B, H, W, generator=torch.Generator().manual_seed(5))
    for b, loss in enumerate(flow_loss(predicted, target, weight).tolist()):
        total = share = 0.0
        for c in range(C):
            for y in range(H):
                for x in range(W):
                    total += float(weight[b, y, x]) * (float(predicted[b, c, y, x]) - float(target[b, c, y, x])) ** 2
                    share += float(weight[b, y, x])
        assert loss == pytest.approx(total / share, rel=1e-5)
    where = mask()
    error = np.sqrt((wide(predicted) - wide(target)) ** 2 + 0.25) - 0.5
    expected = [error[b][:, where[b].numpy() > 0].mean() for b in range(B)]
    np.testing.assert_allclose(flow_loss(predicted, target, where, 0.5), expected, rtol=1e-5)
    predicted, target = (tensor.bfloat16() for tensor in pair)
    assert flow_loss(predicted, target).dtype == torch.float32
    expected = ((wide(predicted.float()) - wide(target.float())) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(flow_loss(predicted, target), expected, rtol=1e-5)


def test_a_mask_times_a_constant_is_the_same_mask(pair: tuple[Tensor, Tensor]) -> None:
    predicted, target = pair[0].requires_grad_(), pair[1]
    drawn = mask() * torch.rand(B, H, W, generator=torch.Generator().manual_seed(5))

    def loss_and_gradient(weight: Tensor) -> tuple[Tensor, Tensor]:
        loss = flow_loss(predicted, target, weight)
        return loss.detach(), torch.autograd.grad(loss.sum(), predicted)[0]

    for factor in (1e-4, 1 / 255, 7.0, 1e5):
        torch.testing.assert_close(loss_and_gradient(factor * drawn), loss_and_gradient(drawn), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("c", [1e-3, 0.1, 1.0, 30.0])
def test_pseudo_huber_is_exact(c: float) -> None:
    """Even for errors far smaller than c, where evaluating sqrt(e^2 + c^2) - c directly would round to 0."""
    errors = torch.logspace(-5, 4, 64)
    losses = flow_loss(errors.view(-1, 1, 1, 1), torch.zeros(64, 1, 1, 1), pseudo_huber_c=c)
    with localcontext() as digits:
        digits.prec = 50
        exact = [(Decimal(e) ** 2 + Decimal(c) ** 2).sqrt() - Decimal(c) for e in errors.tolist()]
    np.testing.assert_allclose(losses, [float(value) for value in exact], rtol=1e-6)


def test_text_reconstruction_has_gradients_for_the_text_only() -> None:
    text, target = normal(3, 4, 8, seed=1).requires_grad_(), normal(3, 4, 8, seed=2).requires_grad_()
    loss = text_reconstruction_loss(text, target)
    expected = ((wide(text.detach()) - wide(target.detach())) ** 2).mean(axis=(1, 2))
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-5)
    loss.sum().backward()
    assert text.grad is not None
    assert target.grad is None
    lengths = torch.tensor([4, 1, 3])
    text, target = normal(3, 4, 8, seed=1).requires_grad_(), normal(3, 4, 8, seed=2)
    padding = torch.arange(4) >= lengths[:, None]
    expected = text_reconstruction_loss(text, target, lengths)
    expected.sum().backward()
    assert not text.grad[padding].any()
    assert text.grad[~padding].all()
    dirty = [tensor.detach().masked_fill(padding[..., None], float("inf")) for tensor in (text, target)]
    assert torch.equal(text_reconstruction_loss(*dirty, lengths), expected.detach())
    each = (wide(text.detach()) - wide(target)) ** 2
    plain = [each[b, :count].mean() for b, count in enumerate(lengths.tolist())]
    np.testing.assert_allclose(expected.detach(), plain, rtol=1e-5)


def test_alignment_equals_a_plain_loop_and_its_derivative() -> None:
    generator = torch.Generator().manual_seed(5)
    early, late = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    early.requires_grad_()
    late.requires_grad_()
    losses = alignment_loss(early, late)
    losses.sum().backward()
    assert late.grad is None, "the later block is a constant"
    assert early.grad is not None
    for at in range(2):
        cosines = []
        for token in range(3):
            a, b = early[at, token].detach(), late[at, token].detach()
            cosine = float(a @ b / (a.norm() * b.norm()))
            cosines.append(cosine)
            # d/da of -cos(a, b), averaged over 3 tokens
            expected = (cosine * a / a.norm() - b / b.norm()) / a.norm() / 3
            torch.testing.assert_close(early.grad[at, token], expected, rtol=1e-5, atol=1e-7)
        assert float(losses[at].detach()) == pytest.approx(1 - sum(cosines) / 3, rel=1e-6)
    tokens = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(6))
    assert float(alignment_loss(tokens, 7 * tokens).abs().max()) < 1e-6
    torch.testing.assert_close(alignment_loss(tokens, -tokens), torch.full((2,), 2.0))
