"""The learning rate as a pure function of the step. There is no scheduler object and nothing to save."""

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    step_size: int | None = None,
    step_gamma: float | None = None,
) -> float:
    """The rate of optimizer step ``step`` (the first is 0): a linear rise over the warm-up, then the schedule.

    `constant` stays at the peak, `linear` and `cosine` fall to 0 at ``total_steps``, `step` multiplies by
    ``step_gamma`` every ``step_size`` steps after the warm-up.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "step":
        assert step_size is not None
        assert step_gamma is not None
        return float(peak * step_gamma ** ((step - warmup_steps) // step_size))
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1 - done)
    assert schedule == "cosine", schedule
    return peak * 0.5 * (1 + math.cos(math.pi * done))
