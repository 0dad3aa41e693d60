"""Each sampler uses the model's shift, fixed or by size; what diffusers does not support is refused."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from sd3_light.config.faults import UserError
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.flow.scheduler import SAMPLERS, flow_scheduler, use_sampler
from sd3_light.flow.timesteps import resolution_shift
from sd3_light.sample.generate import ImageRequest, generate

POLICY = TextPolicy(12, "empty", "padded")


def scheduler(name: str, original: Any) -> Any:
    holder: Any = SimpleNamespace(scheduler=original)  # a pipeline with only a scheduler
    use_sampler(holder, name)
    return holder.scheduler


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_every_sampler_reaches_the_end_of_the_flow(name: str, shift: float) -> None:
    """For a dataset of one image the velocity is known."""
    sampler, goal = scheduler(name, flow_scheduler(shift, False)), torch.tensor([[1.0, -2.0, 0.5]])
    state = torch.tensor([[0.3, 0.7, -1.1]])
    sampler.set_timesteps(6)
    for time in sampler.timesteps:
        state = sampler.step((state - goal) / (time / 1000), time, state, return_dict=False)[0]
    assert torch.allclose(state, goal, atol=0.01)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_fixed_shift_is_kept(shift: float) -> None:
    euler = flow_scheduler(shift, False)
    heun, dpm = scheduler("heun", euler), scheduler("dpm++", euler)
    for sampler in (euler, heun, dpm):
        sampler.set_timesteps(10)
    assert np.allclose(np.unique(heun.sigmas), np.unique(euler.sigmas))
    times = np.linspace(0.999, 0, 11)
    assert np.allclose(dpm.sigmas, shift * times / (1 + (shift - 1) * times), atol=1e-3)


def test_dpm_shifts_by_size_as_training_did(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of different sizes in parallel each have their own shift."""
    monkeypatch.setattr(pipe, "scheduler", flow_scheduler(None, True))
    use_sampler(pipe, "dpm++")
    seen = {}
    step = type(pipe.scheduler).set_timesteps

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        seen[round(kwargs["mu"], 6)] = float(self.sigmas[1])

    sizes = [(32, 32), (96, 96)]
    monkeypatch.setattr(type(pipe.scheduler), "set_timesteps", spy)
    generate(pipe, [ImageRequest("a", 1, *size) for size in sizes], POLICY, (2, 4.0), exact=True)
    for width, height in sizes:
        shift = resolution_shift(width * height // 64)
        assert seen[round(math.log(shift), 6)] == pytest.approx(shift * 0.4995 / (1 + (shift - 1) * 0.4995), abs=1e-4)


def test_what_diffusers_does_not_support_is_refused() -> None:
    with pytest.raises(UserError, match=r"--sampler ddim: .* choose one of euler, heun, dpm\+\+"):
        scheduler("ddim", flow_scheduler(1.0, False))
    with pytest.raises(UserError, match=r"heun: .*flux_shift.*use euler or dpm\+\+"):
        scheduler("heun", flow_scheduler(None, True))
    linear = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear")
    with pytest.raises(UserError, match="does not support its linear time shift"):
        scheduler("dpm++", linear)
    for name in ("heun", "dpm++"):
        with pytest.raises(UserError, match="use_karras_sigmas, which only euler supports"):
            scheduler(name, FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True))
    heun = scheduler("heun", flow_scheduler(1.0, False))
    with pytest.raises(UserError, match=r"--sampler dpm\+\+: .* a FlowMatchHeunDiscreteScheduler; leave the option"):
        scheduler("dpm++", heun)
    assert scheduler("euler", heun) is heun, "the model's own"
    keys = {"base_shift": 0.4, "max_shift": 1.3, "base_image_seq_len": 64, "max_image_seq_len": 1024}
    dpm = scheduler("dpm++", FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **keys))
    assert {key: dpm.config[key] for key in keys} == keys
