"""The times of Flux's pipeline, which several others took over."""

from typing import Any


def resolution_shift(config: Any, tokens: int) -> float:
    """Return the logarithm of the shift of a scheduler's config, which grows with the tokens of an image."""
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    shift: float = tokens * slope + (config.base_shift - slope * config.base_image_seq_len)
    return shift


def set_shifted_times(scheduler: Any, steps: int, shift: float) -> None:
    """Set times from 1 to 1 / steps, which the scheduler shifts: by its own number, or by ``shift`` if that depends on
    the resolution."""
    import numpy as np

    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)
    scheduler.set_begin_index(0)
