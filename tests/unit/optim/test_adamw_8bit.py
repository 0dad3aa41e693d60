"""Moments in 8 bits and their draws: what codes keep of a value, moments that follow gradients, and the kernel."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sd3_light.optim import adamw_8bit
from sd3_light.optim.adamw_8bit import BLOCK, AdamW8bit, Rates, WeightSlice, compress, create_8bit_state, expand
from sd3_light.optim.draws import StepDraws, round_stochastically
from tests.modules import emulated_kernel

CPU = torch.device("cpu")


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
    for draws in (None, torch.rand(values.shape, generator=generator())):
        codes, scales = compress(values, dtype, draws)
        restored = expand(codes, scales)
        assert torch.equal(restored.abs().amax(1), values.abs().amax(1))
        assert (restored[values == 0] == 0).all()


def test_codes_that_are_rounded_at_random_are_right_on_average_and_never_0() -> None:
    values = values_over_decades(torch.uint8, 6.0)
    draw = generator()
    draws = [torch.rand(values.shape, generator=draw) for _ in range(2000)]
    codes = torch.stack([compress(values, torch.uint8, numbers)[0].float() for numbers in draws])
    scales = values.amax(1, keepdim=True)
    exact = 255 * (values / scales) ** 0.125
    assert (codes.mean(0) - exact).abs().max() < 5 * 0.5 / 2000**0.5  # five standard deviations
    tiny = torch.full((1, BLOCK), 1e-30)
    tiny[0, 0] = 1.0
    assert compress(tiny, torch.uint8, draws[0][:1])[0].min() == 1


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_second_moments_follow_gradients_of_another_size(factor: float) -> None:
    """A step changes them by less than the distance of two codes, and only some values of a block change."""
    weight = nn.Parameter(torch.zeros(64, BLOCK))
    draw = generator()
    optimizer = AdamW8bit([{"params": [weight], "weight_decay": 0.0}], lambda *_: draw, 1e-3, (0.9, 0.999), 1e-8)
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


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with emulated_kernel(Path(adamw_8bit.__file__).with_name("adamw_8bit_kernel.py")) as module:
        yield module


def copy(piece: WeightSlice) -> WeightSlice:
    return WeightSlice(**{name: None if value is None else value.clone() for name, value in vars(piece).items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [BLOCK, 5 * BLOCK + 40])
def test_the_kernel_advances_as_its_reference(kernel: ModuleType, dtype: torch.dtype, count: int) -> None:
    sample = adamw_8bit._sample_slice(dtype, CPU)
    piece = WeightSlice(**{name: None if value is None else value[:count] for name, value in vars(sample).items()})
    blocks = -(-count // BLOCK)
    piece = replace(piece, **{name: getattr(piece, name)[:blocks] for name in ("first_scale", "second_scale", "draws")})
    rates = Rates(1e-2, 0.1, (0.9, 0.99), 1e-8, torch.tensor([0.1, 0.01]), torch.zeros(()))
    actual, expected = copy(piece), copy(piece)
    kernel.advance(actual, rates)
    adamw_8bit.advance(expected, rates)
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7
    assert torch.allclose(actual.values.float(), expected.values.float(), rtol=tolerance, atol=1e-5)
    assert (actual.values == expected.values).float().mean() > (0.3 if dtype == torch.float32 else 0.99)
    for name in ("first", "second", "first_scale", "second_scale"):
        assert torch.allclose(getattr(actual, name).float(), getattr(expected, name).float(), rtol=1e-5, atol=1), name
        assert not torch.equal(getattr(actual, name), getattr(piece, name)), name
    skipped = copy(piece)
    kernel.advance(skipped, replace(rates, skip=torch.ones(())))
    for name in ("values", "first", "first_scale", "second", "second_scale"):
        assert torch.equal(getattr(skipped, name), getattr(piece, name)), name


def test_a_kernel_that_computes_something_else_is_not_used(kernel: ModuleType, monkeypatch: Any, capfd: Any) -> None:
    errors = ModuleType("triton.errors")
    errors.TritonError = type("TritonError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.errors", errors)
    monkeypatch.setitem(sys.modules, "sd3_light.optim.adamw_8bit_kernel", kernel)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    checked = adamw_8bit.checked_kernel.__wrapped__
    assert checked(CPU) is kernel.advance
    right = kernel.advance
    monkeypatch.setattr(kernel, "advance", lambda piece, rates: right(piece, replace(rates, lr=2 * rates.lr)))
    assert checked(CPU) is None
    assert "it computes something else" in capfd.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert checked(CPU) is None


class _Operations(TorchDispatchMode):
    """Counts the operations that write a tensor, without those that only view one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        is_view = any(argument.alias_info is not None for argument in func._schema.returns)
        self.count += not is_view or func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def test_beside_the_kernel_a_weight_needs_its_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch per weight and kind of draw; steps and corrections are computed for all weights together."""
    monkeypatch.setattr(adamw_8bit, "advance", lambda piece, rates: None)
    counts = []
    for number in (2, 12):
        weights = [nn.Parameter(torch.ones(16, BLOCK, dtype=torch.bfloat16)) for _ in range(number)]
        draw = generator()
        groups = [{"params": weights, "weight_decay": 0.1}]
        optimizer = AdamW8bit(groups, lambda *_, draw=draw: draw, 1e-3, (0.9, 0.999), 1e-8)
        for weight in weights:
            create_8bit_state(optimizer, weight)
            weight.grad = torch.ones_like(weight)
        with _Operations() as operations:
            optimizer.step()
        counts.append(operations.count)
    assert counts[1] - counts[0] <= 10 * 4  # rand, its memory, random_, its memory
    assert counts[0] < 20


def numbers(draws: StepDraws, step: int, name: str, purpose: str = "rounding") -> list[float]:
    draws.step = step
    return torch.rand(4, generator=draws.generator(purpose, name, CPU)).tolist()


def test_draws_are_functions_of_seed_step_purpose_and_name() -> None:
    draws, again, other = StepDraws(1), StepDraws(1), StepDraws(2)
    first = numbers(draws, 5, "a")
    variants = [first, numbers(draws, 6, "a"), numbers(draws, 5, "b"), numbers(other, 5, "a")]
    variants.append(numbers(draws, 5, "a", "second moment"))
    assert len({tuple(values) for values in variants}) == len(variants)
    assert numbers(again, 5, "a") == first, "whatever was drawn before"


def test_values_of_bfloat16_stay_exact_and_others_become_a_neighbour() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    special = torch.tensor([0.0, -0.0, 1.0, -256.0, 2.0**-126, 3e38, float("inf"), -float("inf")]).bfloat16()
    exact = torch.cat([values, special])
    for seed in range(3):
        rounded = round_stochastically(exact.float(), torch.Generator().manual_seed(seed))
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded.view(torch.int16), exact.view(torch.int16))
    # others become one of their neighbours
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    rounded = round_stochastically(values, torch.Generator().manual_seed(1)).float()
    towards_zero = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    away = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    assert ((rounded == towards_zero) | (rounded == away)).all()
    assert (rounded == towards_zero).any()
    assert (rounded == away).any()


def test_rounding_is_right_on_average() -> None:
    values = torch.tensor([1.001, -1.0005, 0.3, 1e-5, -123.456, 1.0 + 2**-16])
    count = 200_000
    generator = torch.Generator().manual_seed(0)
    mean = round_stochastically(values.expand(count, -1).contiguous(), generator).double().mean(0)
    spacing = 2.0 ** (values.abs().log2().floor() - 7)
    assert ((mean - values).abs() < 5 * 0.5 * spacing / count**0.5).all()  # five standard deviations
