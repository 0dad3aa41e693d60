"""Draws of an update: functions of seed, step and name; stochastic rounding is exact where it can be, and unbiased."""

import torch

from sd3_light.optim.draws import StepDraws, round_stochastically

CPU = torch.device("cpu")


def numbers(draws: StepDraws, step: int, name: str, purpose: str = "rounding") -> list[float]:
    draws.step = step
    return torch.rand(4, generator=draws.generator(purpose, name, CPU)).tolist()


def test_draws_are_functions_of_seed_step_purpose_and_name() -> None:
    draws, again, other = StepDraws(1), StepDraws(1), StepDraws(2)
    first = numbers(draws, 5, "a")
    variants = [
        first,
        numbers(draws, 6, "a"),
        numbers(draws, 5, "b"),
        numbers(draws, 5, "a", "second moment"),
        numbers(other, 5, "a"),
    ]
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
