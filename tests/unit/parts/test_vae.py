"""The VAE: normalised latents, folding, what each option trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from sd3_light.config.faults import UserError
from sd3_light.parts.fit import Fit, FitOptions
from sd3_light.parts.images import Pool, take
from sd3_light.parts.sizes import VaeSize
from sd3_light.parts.vae import (
    Reconstruction,
    VaeOptions,
    VaeTask,
    build_vae,
    channel_statistics,
    decode,
    encode,
    fold_into_decoder,
    fold_into_encoder,
    gradient_loss,
    open_vae,
)

CPU = torch.device("cpu")
SIZE = VaeSize((8, 8, 8, 8), 1, 4)


def make_task(pools: list[Pool], vae: AutoencoderKL | None = None, grid: Path | None = None, **options: Any) -> VaeTask:
    return VaeTask(vae or build_vae(SIZE, 16, 0), pools, CPU, VaeOptions(batch=8, **options), grid)


def fit(task: VaeTask, folder: Path, steps: int) -> Fit:
    options = FitOptions(steps=steps, lr=2e-3, evaluate_every=steps // 2, ema=0.9)
    run = Fit("vae", task, options, folder, {})
    run.run(lambda: None)
    return run


@pytest.fixture(scope="module")
def trained(pools: list[Pool], tmp_path_factory: pytest.TempPathFactory) -> tuple[VaeTask, Fit, Path]:
    folder = tmp_path_factory.mktemp("vae")
    task = make_task(pools, grid=folder / "grid.png")
    task.start_new()
    before = task.evaluate()["psnr"]
    run = fit(task, folder, 60)
    run.progress.history.insert(0, {"psnr": before})
    run.use_averages()
    return task, run, folder


def test_psnr_rises(trained: tuple[VaeTask, Fit, Path]) -> None:
    first, *later = (record["psnr"] for record in trained[1].progress.history)
    assert len(later) == 2
    assert min(later) > first + 2


def test_a_grid_shows_the_reconstructions(trained: tuple[VaeTask, Fit, Path]) -> None:
    assert (trained[2] / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_latents_have_mean_0_and_deviation_1(trained: tuple[VaeTask, Fit, Path], pools: list[Pool]) -> None:
    vae = trained[0].finished()
    mean, std = channel_statistics(vae, pools, CPU)
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor
    assert (mean - shift).abs().max() < 1e-5
    assert (std * scale - 1).abs().max() < 1e-5
    assert (scale, shift) == (1.5305, 0.0609), "the constants that readers of single files assume"
    raw_mean, raw_std = channel_statistics(trained[0].vae, pools, CPU)
    assert raw_mean.abs().max() > 1e-2 or (raw_std - 1).abs().max() > 1e-2


@torch.no_grad()
def test_the_folded_vae_equals_the_normalised_one(trained: tuple[VaeTask, Fit, Path], pools: list[Pool]) -> None:
    task = trained[0]
    images = take(pools[0].pixels, np.arange(8), CPU)
    mean, std = (value.float()[:, None, None] for value in channel_statistics(task.vae, pools, CPU))
    raw, raw_logvar = encode(task.vae, images)
    expected = (raw - mean) / std / 1.5305 + 0.0609
    expected_logvar = raw_logvar - 2 * (1.5305 * std).log()
    folded = task.finished()
    latents, logvar = encode(folded, images)
    assert torch.allclose(latents, expected, atol=1e-5)
    assert torch.allclose(logvar, expected_logvar, atol=1e-5)
    assert torch.allclose(decode(folded, latents), decode(task.vae, expected), atol=1e-5)
    # stock methods see the same
    posterior = folded.encode(images).latent_dist
    assert torch.equal(posterior.mean, latents)
    assert torch.equal(folded.decode(latents).sample, decode(folded, latents))


@torch.no_grad()
def test_a_new_vae_starts_with_little_noise(pools: list[Pool]) -> None:
    task = make_task(pools)
    task.start_new()
    mean, logvar = encode(task.vae, take(pools[0].pixels, np.arange(16), CPU))
    assert 1.5305 * mean.std().item() == pytest.approx(1, abs=0.2)
    assert 1.5305 * (0.5 * logvar).exp().mean().item() == pytest.approx(0.1, abs=0.02)


@torch.no_grad()
def test_training_normalises_the_batch(pools: list[Pool]) -> None:
    images = take(pools[0].pixels, np.arange(16), CPU)
    noise = torch.zeros(16, 16, 4, 4)
    _, mean, _ = Reconstruction(build_vae(SIZE, 16, 0), normalise=True)(images, noise)
    std, shift = torch.std_mean(mean, dim=(0, 2, 3))
    assert torch.allclose(shift, torch.zeros(16), atol=1e-4)
    assert torch.allclose(std, torch.ones(16), atol=1e-4)


@torch.no_grad()
def test_training_decodes_what_the_finished_vae_decodes(pools: list[Pool]) -> None:
    """With all images in the batch its statistics are those of the dataset."""
    pool = pools[0]
    images = take(pool.pixels, np.arange(pool.held_out, len(pool.ids)), CPU)
    task = make_task([pool])
    noise = torch.zeros(len(images), 16, images.shape[2] // 8, images.shape[3] // 8)
    output, _, _ = Reconstruction(task.vae, normalise=True)(images, noise)
    finished = task.finished()
    latents = encode(finished, images)[0]
    assert (output - decode(finished, latents)).abs().mean() < 1e-3
    assert (output - decode(finished, 1.5305 * (latents - 0.0609))).abs().mean() > 1e-2, "the decoder knows the scale"


@torch.no_grad()
@pytest.mark.parametrize("with_1x1", [False, True])
def test_folding_into_both_sides_keeps_the_images(pools: list[Pool], with_1x1: bool) -> None:
    config = dict(build_vae(SIZE, 16, 0).config)
    vae = AutoencoderKL.from_config({**config, "use_quant_conv": with_1x1, "use_post_quant_conv": with_1x1}).eval()
    images = take(pools[0].pixels, np.arange(4), CPU)
    before = decode(vae, encode(vae, images)[0])
    mean, std = torch.linspace(-0.1, 0.1, 16), torch.linspace(0.5, 2, 16)
    fold_into_encoder(vae, mean, std)
    fold_into_decoder(vae, mean, std)
    difference = (decode(vae, encode(vae, images)[0]) - before).abs()
    if with_1x1:
        assert difference.max() < 1e-4
    else:  # zero padding sees another value at the borders, and norms spread it
        assert difference.mean() < 0.1


def test_continuing_from_a_vae_starts_with_its_quality(
    trained: tuple[VaeTask, Fit, Path], pools: list[Pool], tmp_path: Path
) -> None:
    trained[0].finished().save_pretrained(tmp_path / "vae")
    task = make_task(pools, open_vae(tmp_path))
    task.start_from()
    psnr = trained[0].evaluate()["psnr"]
    assert task.evaluate()["psnr"] == pytest.approx(psnr, abs=0.01)
    assert fit(task, tmp_path / "state", 20).progress.history[-1]["psnr"] > psnr


def test_decoder_only_keeps_encoder_and_scale(pools: list[Pool], tmp_path: Path) -> None:
    vae = build_vae(SIZE, 16, 0)
    vae.register_to_config(scaling_factor=1.5, shift_factor=0.1)
    encoder = {name: value.clone() for name, value in vae.encoder.state_dict().items()}
    decoder = vae.decoder.conv_in.weight.clone()
    task = make_task(pools, vae, decoder_only=True)
    task.start_from()
    fit(task, tmp_path, 4).use_averages()
    finished = task.finished()
    assert all(torch.equal(value, encoder[name]) for name, value in finished.encoder.state_dict().items())
    assert not torch.equal(finished.decoder.conv_in.weight, decoder)
    assert (finished.config.scaling_factor, finished.config.shift_factor) == (1.5, 0.1)


def test_the_adversary_and_the_vae_train_each_on_its_own_loss(pools: list[Pool]) -> None:
    task = make_task(pools, adversarial=1.0)
    images = torch.rand(2, 3, 32, 32)
    output = torch.rand(2, 3, 32, 32, requires_grad=True)
    before = task._adversarial(output, images, 0)
    before.backward()
    assert output.grad is not None
    assert output.grad.abs().max() == 0  # the term starts later
    gradients = [value.grad.clone() for value in task.model["discriminator"].parameters()]
    task.model["discriminator"].zero_grad()
    task._adversarial(output, images, 10_000).backward()
    assert output.grad.abs().max() > 0
    after = [value.grad for value in task.model["discriminator"].parameters()]
    assert all(torch.equal(left, right) for left, right in zip(gradients, after, strict=True))


def test_gradient_loss_sees_edges_and_not_brightness() -> None:
    flat, edge = torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 16)
    edge[..., 8:] = 1
    assert gradient_loss(flat, flat + 0.5) == 0
    assert gradient_loss(flat, edge) > 0


def test_a_vae_of_other_images_is_refused(tmp_path: Path) -> None:
    AutoencoderKL.from_config({**build_vae(SIZE, 16, 0).config, "in_channels": 1}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not a VAE of RGB images"):
        open_vae(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        open_vae(tmp_path / "missing")
