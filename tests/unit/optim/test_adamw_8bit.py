"""Moments in 8 bits: what codes keep of a value, and moments that follow gradients whose size changes."""

import pytest
import torch
from torch import Tensor, nn

from sd3_light.optim.adamw_8bit import BLOCK, AdamW8bit, compress, create_8bit_state, expand


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values_over_decades(dtype: torch.dtype, decades: float) -> Tensor:
    values = 10 ** (-decades * torch.rand(8, BLOCK, generator=generator(1)))
    signs = torch.rand(8, BLOCK, generator=generator(2)).sub(0.5).sign() if dtype == torch.int8 else 1.0
    return values * signs


@pytest.mark.parametrize(("dtype", "decades"), [(torch.int8, 3.0), (torch.uint8, 8.0)])
def test_codes_keep_the_relative_size_of_small_values(dtype: torch.dtype, decades: float) -> None:
    values = values_over_decades(dtype, decades)
    restored = expand(*compress(values, dtype))
    assert ((restored - values).abs() / values.abs()).max() < 0.2
    assert torch.equal(restored.sign(), values.sign())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_largest_value_of_a_block_and_zeros_are_exact(dtype: torch.dtype) -> None:
    values = values_over_decades(dtype, 2.0)
    values[:, ::7] = 0
    values[3] = 0
    for draw in (None, generator()):
        codes, scales = compress(values, dtype, draw)
        restored = expand(codes, scales)
        assert torch.equal(restored.abs().amax(1), values.abs().amax(1))
        assert (restored[values == 0] == 0).all()


def test_codes_that_are_rounded_at_random_are_right_on_average_and_never_0() -> None:
    values = values_over_decades(torch.uint8, 6.0)
    draw = generator()
    codes = torch.stack([compress(values, torch.uint8, draw)[0].float() for _ in range(2000)])
    scales = values.amax(1, keepdim=True)
    exact = 255 * (values / scales) ** 0.125
    assert (codes.mean(0) - exact).abs().max() < 5 * 0.5 / 2000**0.5  # five standard deviations
    tiny = torch.full((1, BLOCK), 1e-30)
    tiny[0, 0] = 1.0
    assert compress(tiny, torch.uint8, draw)[0].min() == 1


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_second_moments_follow_gradients_of_another_size(factor: float) -> None:
    """A step changes them by less than the distance of two codes, and only some values of a block change."""
    weight = nn.Parameter(torch.zeros(64, BLOCK))
    draw = generator()
    optimizer = AdamW8bit([{"params": [weight], "weight_decay": 0.0}], lambda _: draw, 1e-3, (0.9, 0.999), 1e-8)
    create_8bit_state(optimizer, weight)
    exact = torch.zeros_like(weight)
    sizes = torch.ones(BLOCK)
    for step in range(800):
        sizes[: BLOCK // 2] = 1.0 if step < 100 else factor
        weight.grad = sizes * torch.randn(weight.shape, generator=draw)
        exact = 0.999 * exact + 0.001 * weight.grad.square()
        optimizer.step()
    state = optimizer.state[weight]
    stored = expand(state["exp_avg_sq"].view(-1, BLOCK), state["exp_avg_sq_scale"])
    assert (stored / exact).log().mean().abs() < 0.02
    assert (stored / exact).log().std() < 0.2
