"""The learning rate against closed forms."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sd3_light.optim.schedules import learning_rate

PEAK = 1e-4
ALL = ["constant", "linear", "cosine", "step"]
USUAL = {"warmup_steps": 0, "lr_step_size": 30, "lr_step_gamma": 0.5, "cooldown_steps": 0, "cooldown_shape": "linear"}


def rate(schedule: str, done: int, total: int = 100, **keys: Any) -> float:
    """One rate; by default `step` halves every 30."""
    settings = {**USUAL, "lr_scheduler": schedule, **keys}
    return learning_rate(done, total, PEAK, SimpleNamespace(**settings))


def curve(schedule: str, steps: int, **keys: float) -> list[float]:
    return [rate(schedule, step, **keys) for step in range(steps)]  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("warmup", [1, 10, 100])
def test_warm_up_rises_in_equal_steps_and_is_never_0(schedule: str, warmup: int) -> None:
    rates = curve(schedule, warmup, warmup_steps=warmup, total=100)
    assert rates == pytest.approx([PEAK * number / warmup for number in range(1, warmup + 1)], rel=1e-12)
    assert rates[-1] == PEAK
    if warmup < 100:
        assert rate(schedule, warmup, warmup_steps=warmup) == PEAK


@pytest.mark.parametrize("warmup", [0, 20])
def test_constant_is_constant_linear_a_line_and_cosine_half_a_wave(warmup: int) -> None:
    """torch's ConstantLR runs the first 5 steps at a third of the rate."""
    for done in range(warmup, 100):
        assert rate("constant", done, warmup_steps=warmup) == PEAK
        share = (done - warmup) / (100 - warmup)
        assert rate("linear", done, warmup_steps=warmup) == pytest.approx(PEAK * (1 - share), rel=1e-12)
        wave = PEAK * math.cos(math.pi * share / 2) ** 2
        assert rate("cosine", done, warmup_steps=warmup) == pytest.approx(wave, rel=1e-9)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_ends_at_the_peak(schedule: str) -> None:
    assert rate(schedule, 9, warmup_steps=10, total=10) == PEAK
    assert rate(schedule, 10, warmup_steps=10, total=10) == pytest.approx(0.0, abs=1e-20), "beyond the end"
    assert rate(schedule, 4, warmup_steps=10, total=5) == PEAK / 2, "a run that ends while it warms up"


def test_step_decays_every_step_size_after_the_warm_up() -> None:
    for done in (5, 14, 15, 24, 25, 99, 100, 250):
        expected = PEAK * 0.1 ** ((done - 5) // 10)
        actual = rate("step", done, warmup_steps=5, lr_step_size=10, lr_step_gamma=0.1)
        assert actual == pytest.approx(expected, rel=1e-12)
    with pytest.raises(AssertionError):
        rate("exponential", 1)


def test_a_cool_down_is_a_line_or_a_root_to_the_end_of_the_run() -> None:
    """The first of its steps is at the full rate, and 0 would follow the last."""
    rates = curve("constant", 100, cooldown_steps=20)
    assert rates[:80] == [PEAK] * 80
    assert rates[80:] == pytest.approx([PEAK * left / 20 for left in range(20, 0, -1)], rel=1e-12)
    assert rate("constant", 100, cooldown_steps=20) == rate("constant", 105, cooldown_steps=20) == 0
    for done in range(80, 100):
        expected = PEAK * (1 - math.sqrt((done - 80) / 20))
        assert rate("constant", done, cooldown_steps=20, cooldown_shape="sqrt") == pytest.approx(expected, rel=1e-12)


def test_a_branch_decays_from_where_the_long_run_was() -> None:
    """A run to step 1,000 and one that ends at 500 agree until the cool-down of the latter."""
    long = [rate("constant", done, warmup_steps=10, total=1000, cooldown_steps=50) for done in range(500)]
    branch = [rate("constant", done, warmup_steps=10, total=500, cooldown_steps=50) for done in range(500)]
    assert long[:451] == branch[:451]
    assert branch[451:] == pytest.approx([PEAK * left / 50 for left in range(49, 0, -1)], rel=1e-12)
    # a cool-down continues the steps and the warm-up
    assert rate("step", 95, cooldown_steps=10) == pytest.approx(PEAK * 0.5**3 * 5 / 10)
    assert rate("constant", 4, warmup_steps=10, total=10, cooldown_steps=10) == pytest.approx(PEAK * 5 / 10 * 6 / 10)


@pytest.mark.parametrize(("total", "steps"), [(14, 3), (12, 2), (13, 3), (100, 20)])
def test_a_share_of_the_steps_is_rounded(total: int, steps: int) -> None:
    assert curve("constant", 3, cooldown_steps=0.1) == [PEAK] * 3
    rates = [rate("constant", done, total=total, cooldown_steps=0.2) / PEAK for done in range(total)]
    expected = [1.0] * (total - steps) + [(steps - number) / steps for number in range(steps)]
    assert rates == pytest.approx(expected)
