"""The learning rate, a pure function of the step."""

import math
from itertools import pairwise

import pytest

from sd3_light.optim.schedules import learning_rate

PEAK = 1e-4


def curve(schedule: str, steps: int, warmup_steps: int = 0, total_steps: int = 100, **more: float) -> list[float]:
    return [
        learning_rate(step, peak=PEAK, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps, **more)  # type: ignore[arg-type]
        for step in range(steps)
    ]


def test_constant_is_constant_from_the_first_step() -> None:
    """torch's ConstantLR runs the first 5 steps at a third of the rate."""
    assert curve("constant", 300) == [PEAK] * 300


def test_constant_needs_no_end() -> None:
    assert learning_rate(10**9, peak=PEAK, schedule="constant", warmup_steps=0, total_steps=1) == PEAK


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "step"])
def test_warm_up_rises_in_equal_steps_and_never_stands_at_0(schedule: str) -> None:
    rates = curve(schedule, 11, warmup_steps=10, step_size=30, step_gamma=0.5)
    assert rates[:10] == pytest.approx([PEAK * number / 10 for number in range(1, 11)])
    assert rates[9:] == [PEAK, PEAK]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_falling_schedules_start_at_the_peak_and_end_at_0(schedule: str, warmup: int) -> None:
    rates = curve(schedule, 103, warmup_steps=warmup)
    assert rates[warmup] == PEAK
    assert rates[100:] == pytest.approx([0.0] * 3, abs=1e-20)
    falling = rates[warmup:101]
    assert all(after < before for before, after in pairwise(falling))
    assert rates[99] > 0, "the last step still learns"


def test_linear_and_cosine_in_the_middle() -> None:
    linear, cosine = curve("linear", 100, warmup_steps=20), curve("cosine", 100, warmup_steps=20)
    assert linear[60] == pytest.approx(PEAK / 2)
    assert linear[40] == pytest.approx(PEAK * 0.75)
    assert cosine[60] == pytest.approx(PEAK / 2)
    assert cosine[40] == pytest.approx(PEAK * 0.5 * (1 + math.cos(math.pi / 4)))


def test_step_falls_every_step_size_after_the_warm_up() -> None:
    rates = curve("step", 35, warmup_steps=5, step_size=10, step_gamma=0.1)
    assert rates[5:15] == [PEAK] * 10
    assert rates[15:25] == pytest.approx([PEAK * 0.1] * 10)
    assert rates[25:35] == pytest.approx([PEAK * 0.01] * 10)


def test_a_warm_up_as_long_as_the_run_divides_by_nothing() -> None:
    assert curve("cosine", 12, warmup_steps=10, total_steps=10)[9] == PEAK


def test_an_unknown_schedule_is_not_taken_for_another() -> None:
    with pytest.raises(AssertionError):
        curve("exponential", 1)
