"""The learning rate as a pure function of progress: there is no scheduler object and no state to save."""

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
    """Return the rate of the step after ``done``: a linear warm-up, then the schedule.

    ``done``, ``warmup``, ``total`` and ``step_size`` share one unit, optimizer steps or samples; ``stride`` is the
    progress per step. The first rate is above 0, the last of the warm-up is the peak. `constant` stays there, `linear`
    and `cosine` decay to 0 at ``total`` (which the last step does not reach), `step` multiplies by ``step_gamma`` every
    ``step_size`` after the warm-up.
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
