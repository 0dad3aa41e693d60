"""The learning rate as a pure function of progress: there is no scheduler object and no state to save."""

import math
from typing import Any


def learning_rate(done: int, total: int, peak: float, settings: Any) -> float:
    """Return the rate of the step after ``done``: a linear warm-up, the schedule, and a cool-down at the end.

    ``settings`` has the config's keys of the schedule. The first rate is above 0, the last of the warm-up is the peak.
    `constant` stays there, `linear` and `cosine` decay to 0 at ``total`` (which the last step does not reach), `step`
    multiplies by `lr_step_gamma` every `lr_step_size` after the warm-up. The last `cooldown_steps` (below 1: a share
    of ``total``) decay to 0 at ``total``: a run that ends there can branch off any checkpoint of a longer one.
    """
    assert done >= 0, done
    rate = _rate_before_cooldown(done, total, peak, settings)
    cooldown = settings.cooldown_steps
    cooldown = cooldown if cooldown >= 1 else round(cooldown * total)
    if not cooldown or total - done >= cooldown:
        return rate
    share = max(0, total - done) / cooldown
    return rate * (share if settings.cooldown_shape == "linear" else 1 - math.sqrt(1 - share))


def _rate_before_cooldown(done: int, total: int, peak: float, settings: Any) -> float:
    schedule: str = settings.lr_scheduler
    warmup: int = settings.warmup_steps
    if done < warmup:
        return peak * ((done + 1) / warmup)
    if schedule == "constant":
        return peak
    if schedule == "step":
        return float(peak * settings.lr_step_gamma ** ((done - warmup) // settings.lr_step_size))
    share = 1.0 if done >= total else (done - warmup) / (total - warmup)
    if schedule == "linear":
        return peak * (1 - share)
    assert schedule == "cosine", schedule
    return peak * 0.5 * (1 + math.cos(math.pi * share))
