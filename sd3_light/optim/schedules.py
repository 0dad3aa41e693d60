"""The learning rate as a pure function of how far training is. There is no scheduler object and nothing to save."""

import math


def learning_rate(
    done: int,
    *,
    peak: float,
    schedule: str,
    warmup: int,
    total: int,
    stride: int = 1,
    step_size: int | None = None,
    step_gamma: float | None = None,
) -> float:
    """The rate of the step that follows ``done``: a linear rise over the warm-up, then the schedule.

    ``done``, ``warmup``, ``total`` and ``step_size`` are counted in one unit, optimizer steps or samples; ``stride``
    is what one step adds. The first step has a rate above 0, the last of the warm-up the peak. `constant` stays there,
    `linear` and `cosine` fall to 0 at ``total`` (which the last step does not reach) and stay there, `step` multiplies
    by ``step_gamma`` every ``step_size`` after the warm-up.
    """
    assert done >= 0, done
    if done < warmup:
        return peak * min(1.0, (done + stride) / warmup)
    if schedule == "constant":
        return peak
    if schedule == "step":
        assert step_size is not None
        assert step_gamma is not None
        return float(peak * step_gamma ** ((done - warmup) // step_size))
    share = 1.0 if done >= total else (done - warmup) / (total - warmup)
    if schedule == "linear":
        return peak * (1 - share)
    assert schedule == "cosine", schedule
    return peak * 0.5 * (1 + math.cos(math.pi * share))
