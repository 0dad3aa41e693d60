"""The sampler's schedule of times, as training shifted them."""

from diffusers import FlowMatchEulerDiscreteScheduler


def flow_scheduler(shift: float | None, flux_shift: bool) -> FlowMatchEulerDiscreteScheduler:
    """Stock Euler steps with the trained shift: 1.0 where there was none, dynamic with `flux_shift`."""
    return FlowMatchEulerDiscreteScheduler(shift=shift or 1.0, use_dynamic_shifting=flux_shift)
