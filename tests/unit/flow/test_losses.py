"""The losses of tasks: flow matching, sample weights, and preferences."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.flow.losses import FlowMatchDPOLoss, FlowMatchSFTLoss
from sd3_light.flow.timesteps import resolution_shift, shift_time

SHAPE = (3, 2, 4, 4)


def batch(**more: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(SHAPE, generator=random) for name in ("latents", "rejected", "noise")}
    return {**tensors, "quantile": torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64), **more}


def perfect(inputs: dict[str, Any], key: str, off: float = 0.0) -> Any:
    """A denoiser with the right answer for one image, up to a constant error."""

    def denoise(noisy: Tensor, t: Tensor, values: Any) -> Tensor:
        return inputs["noise"] - inputs[key] + off

    return denoise


def test_the_loss_is_the_velocity_error_at_the_drawn_time() -> None:
    inputs, seen = batch(), []

    def denoise(noisy: Tensor, t: Tensor, values: Any) -> Tensor:
        seen.append((noisy, t))
        return torch.zeros_like(noisy)

    each = FlowMatchSFTLoss(timestep_sample_method="uniform", shift=3.0)(denoise, inputs)
    ((noisy, t),) = seen
    u = inputs["quantile"].float()
    assert torch.allclose(t, 3 * u / (1 + 2 * u))
    weight = t.view(-1, 1, 1, 1)
    assert torch.allclose(noisy, (1 - weight) * inputs["latents"] + weight * inputs["noise"])
    assert torch.allclose(each, (inputs["noise"] - inputs["latents"]).square().flatten(1).mean(1))
    assert FlowMatchSFTLoss()(perfect(inputs, "latents"), inputs).abs().max() < 1e-10


def test_masks_and_weights_count_in_the_loss() -> None:
    mask = torch.zeros(3, 4, 4)
    mask[:, :, :2] = 1
    inputs = batch(mask=mask)
    error = torch.tensor([1.0, 1, 3, 3]).expand(SHAPE)

    def denoise(noisy: Tensor, t: Tensor, values: Any) -> Tensor:
        return inputs["noise"] - inputs["latents"] + error

    assert FlowMatchSFTLoss()(denoise, inputs).tolist() == pytest.approx([1.0] * 3)
    outside = FlowMatchSFTLoss(outside_mask_weight=0.25)(denoise, inputs)
    assert outside.tolist() == pytest.approx([(1 + 0.25 * 9) / 1.25] * 3)
    with pytest.raises(UserError, match=r"a mask of \(2, 2\) does not fit latents of \(4, 4\); .* vae_factor"):
        FlowMatchSFTLoss()(denoise, batch(mask=torch.ones(3, 2, 2)))
    with pytest.raises(UserError, match="outside_mask_weight"):
        FlowMatchSFTLoss(outside_mask_weight=1.5)
    # prior preservation: class images count by their weight.
    weights = torch.tensor([1.0, 0.5, 0.0])
    loss = FlowMatchSFTLoss()
    plain, weighted = (loss(lambda noisy, *_: noisy, values) for values in (batch(), batch(loss_weight=weights)))
    assert torch.allclose(weighted, plain * weights)


@pytest.mark.parametrize(
    ("shape", "patch_size", "tokens"),
    [
        ((2, 16, 64, 48), 2, 32 * 24),
        ((2, 16, 64, 48), 1, 64 * 48),
        ((2, 16, 5, 32, 48), 2, 5 * 16 * 24),
        ((2, 16, 8, 32, 48), (2, 4, 4), 4 * 8 * 12),
    ],
    ids=["image", "patches of one", "frames", "patches of frames"],
)
def test_flux_shift_counts_the_tokens_of_images_and_videos(shape: Any, patch_size: Any, tokens: int) -> None:
    loss = FlowMatchSFTLoss(timestep_sample_method="uniform", flux_shift=True, patch_size=patch_size)
    times = loss.times(torch.tensor([0.2, 0.5]), torch.zeros(shape))
    expected = [shift_time(u, resolution_shift(tokens)) for u in (0.2, 0.5)]
    assert times.tolist() == pytest.approx(expected, rel=1e-6)
    for wrong in (0, "2", (2, 0), (), 2.0):
        with pytest.raises(UserError, match=r"patch_size is .*; give a number of latent pixels, or one per axis"):
            FlowMatchSFTLoss(patch_size=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"shift": 3.0},
        {"flux_shift": True},
        {"sqrt_shift": True},
        {"logit_mean": 1.0, "uniform_share": 0.3},
        {"timestep_sample_method": "logit_normal", "sigmoid_scale": 2.0},
    ],
    ids=str,
)
def test_fixed_times_are_the_quantiles_themselves(settings: dict[str, Any]) -> None:
    loss, quantiles = FlowMatchSFTLoss(**settings, pseudo_huber_c=0.1, patch_size=1), torch.tensor([0.1, 0.5, 0.9])
    clean = torch.zeros(3, 16, 64, 96)
    fixed = loss.at_fixed_times()
    assert fixed.times(quantiles, clean).tolist() == pytest.approx([0.1, 0.5, 0.9])
    assert loss.times(quantiles, clean).tolist() != pytest.approx([0.1, 0.5, 0.9])
    assert (fixed.pseudo_huber_c, fixed.patch_size) == (0.1, 1), "the error itself is measured as in training"


def test_preferences_are_learned_against_the_reference() -> None:
    inputs, loss = batch(), FlowMatchDPOLoss(beta=2.0)
    same = perfect(inputs, "latents", 0.5)
    assert torch.allclose(loss(same, inputs, same), torch.full((3,), 0.6931472), atol=1e-6), "log 2 without a change"
    better = loss(perfect(inputs, "latents", 0.1), inputs, same)
    worse = loss(perfect(inputs, "rejected", 0.1), inputs, same)
    assert (better < 0.6931).all()
    assert (worse > 0.6932).all()
    now, before = (
        FlowMatchSFTLoss().error(perfect(inputs, "latents", off), inputs, inputs["latents"])
        - FlowMatchSFTLoss().error(perfect(inputs, "latents", off), inputs, inputs["rejected"])
        for off in (0.1, 0.5)
    )
    assert torch.allclose(better, torch.log1p(torch.exp(now - before)), atol=1e-6)
    with pytest.raises(AssertionError, match="compares with the model before training"):
        loss(same, inputs)


class Scheduler:
    timesteps = torch.linspace(1000.0, 1.0, 10)

    def add_noise(self, clean: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        return clean + noise * timestep / 1000

    def training_target(self, clean: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        return noise - clean

    def training_weight(self, timestep: Tensor) -> Tensor:
        return timestep[0] / 100


class Pipe:
    scheduler, in_iteration_models, torch_dtype, device, dit = Scheduler(), ("dit",), torch.float32, "cpu", 3.0

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, float]] = []

    def model_fn(self, dit: float, latents: Tensor, timestep: Tensor, **inputs: Any) -> Tensor:
        self.seen.append((latents, float(timestep)))
        return dit * latents


def test_the_loss_of_a_pipeline_is_a_function_call() -> None:
    """With DiffSynth's scheduler interface, and the draws in its order: the timestep, then the noise."""
    pipe, clean = Pipe(), torch.randn(1, 2, 3, 4, 4)
    torch.manual_seed(1)
    loss: Any = FlowMatchSFTLoss(pipe, input_latents=clean, noise_scale=0.5)  # type: ignore[arg-type, call-arg]
    torch.manual_seed(1)
    timestep = Scheduler.timesteps[torch.randint(0, 10, (1,))]
    noise = 0.5 * torch.randn_like(clean)
    noisy = clean + noise * timestep / 1000
    assert torch.allclose(loss, (3 * noisy - noise + clean).square().mean() * timestep[0] / 100)
    torch.manual_seed(1)
    first = torch.ones(1, 2, 1, 4, 4)
    frames: Any = FlowMatchSFTLoss(pipe=pipe, input_latents=clean, noise_scale=0.5, first_frame_latents=first)  # type: ignore[call-arg]
    assert torch.equal(pipe.seen[-1][0], torch.cat([first, noisy[:, :, 1:]], 2))
    assert torch.allclose(frames, (3 * noisy - noise + clean)[:, :, 1:].square().mean() * timestep[0] / 100)
    for _ in range(20):
        FlowMatchSFTLoss(pipe, input_latents=clean, min_timestep_boundary=0.3, max_timestep_boundary=0.6)  # type: ignore[arg-type, call-arg]
    assert {at for _, at in pipe.seen[2:]} == set(Scheduler.timesteps[3:6].tolist())


@pytest.mark.parametrize(
    ("pipe", "inputs", "message"),
    [
        (5, {}, "the pipe is a int without 'scheduler'"),
        (Pipe(), {}, "no tensor 'input_latents'"),
        (Pipe(), {"input_latents": torch.ones(1), "max_timestep_boundary": 0.01}, "no timestep lies between"),
    ],
)
def test_a_wrong_pipeline_is_one_line(pipe: Any, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FlowMatchSFTLoss(pipe, **inputs)
