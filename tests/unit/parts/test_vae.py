"""The VAE: normalised latents, folding, what each option trains."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from sd3_light.parts import vae as vae_module
from sd3_light.parts.discriminator import Discriminator
from sd3_light.parts.fit import Fit, FitOptions
from sd3_light.parts.images import Pool, take
from sd3_light.parts.sizes import VAE_SIZES, VaeSize
from sd3_light.parts.vae import (
    Reconstruction,
    VaeOptions,
    VaeTask,
    build_vae,
    channel_statistics,
    decode,
    default_batch,
    encode,
    fold_into_decoder,
    fold_into_encoder,
    gradient_loss,
    open_vae,
    posed,
    write_grid,
)
from tests.refusals import refused

CPU = torch.device("cpu")
SIZE = VaeSize((8, 8, 8, 8), 1, 4)
Trained = tuple[VaeTask, Fit, Path]


def make_task(pools: list[Pool], vae: AutoencoderKL | None = None, grid: Path | None = None, **options: Any) -> VaeTask:
    return VaeTask(vae or build_vae(SIZE, 16, 0), pools, CPU, VaeOptions(batch=8, **options), grid)


def fit(task: VaeTask, folder: Path, steps: int) -> Fit:
    options = FitOptions(steps=steps, lr=5e-3, evaluate_every=steps, ema=0.9)
    run = Fit("vae", task, options, folder, {})
    run.run(lambda: None)
    return run


@pytest.fixture(scope="module")
def trained(pools: list[Pool], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("vae")
    task = make_task(pools, grid=folder / "grid.png")
    task.start_new()
    before = task.evaluate()["psnr"]
    run = fit(task, folder, 12)
    run.progress.history.insert(0, {"psnr": before})
    run.use_averages()
    return task, run, folder


def test_latents_have_mean_0_and_deviation_1(trained: Trained, pools: list[Pool]) -> None:
    assert (trained[2] / "grid.png").read_bytes().startswith(b"\x89PNG")
    vae = trained[0].finished()
    mean, std = channel_statistics(vae, pools, CPU)
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor
    assert (mean - shift).abs().max() < 1e-5
    assert (std * scale - 1).abs().max() < 1e-5
    assert (scale, shift) == (1.5305, 0.0609), "the constants that readers of single files assume"
    raw_mean, raw_std = channel_statistics(trained[0].vae, pools, CPU)
    assert raw_mean.abs().max() > 1e-2 or (raw_std - 1).abs().max() > 1e-2


@torch.no_grad()
def test_the_folded_vae_equals_the_normalised_one(trained: Trained, pools: list[Pool]) -> None:
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
def test_a_new_vae_starts_with_little_noise_and_keeps_its_scale(pools: list[Pool]) -> None:
    task = make_task(pools)
    task.start_new()
    mean, logvar = encode(task.vae, take(pools[0].pixels, np.arange(16), CPU))
    assert 1.5305 * mean.std().item() == pytest.approx(1, abs=0.2)
    assert 1.5305 * (0.5 * logvar).exp().mean().item() == pytest.approx(0.1, abs=0.02)
    before = task.vae.decoder.conv_in.weight.clone()
    task.start_new()
    assert torch.allclose(task.vae.decoder.conv_in.weight, 1.5305 * before)


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


def test_continuing_from_a_vae_starts_with_its_quality(trained: Trained, pools: list[Pool], tmp_path: Path) -> None:
    trained[0].finished().save_pretrained(tmp_path / "vae")
    task = make_task(pools, open_vae(tmp_path))
    task.start_from()
    psnr = trained[0].evaluate()["psnr"]
    assert task.evaluate()["psnr"] == pytest.approx(psnr, abs=0.01)


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


def test_the_adversary_is_clipped_and_updated_apart(pools: list[Pool], tmp_path: Path) -> None:
    """The VAE's first step is the same whether or not the adversary trains: its own loss starts after 1,000 steps."""
    torch.set_num_threads(1)
    weights = {}
    for adversarial in (0.0, 1.0):
        task = make_task(pools, adversarial=adversarial)
        task.start_new()
        before = {name: value.detach().clone() for name, value in task.model.named_parameters()}
        run = fit(task, tmp_path / str(adversarial), 3)
        weights[adversarial] = {name: value for name, value in run.weights.items() if name.startswith("vae.")}
    for name, value in weights[0.0].items():
        assert torch.equal(value, weights[1.0][name]), name
    moved = [name for name, value in run.weights.items() if not torch.equal(value, before[name])]
    assert any(name.startswith("discriminator.") for name in moved)
    assert [group["betas"] for group in run.optimizer.param_groups] == [(0.9, 0.99), (0.5, 0.9)]


@torch.no_grad()
def test_the_equivariance_of_a_scaling_vae_is_perfect(pools: list[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """With means that are the shrunk image and a decoder that enlarges, poses of smooth images are decoded alike."""
    task = make_task(pools, equivariance=1.0, decoder_only=True)
    ramp = torch.linspace(-1, 1, 64)
    images = (ramp[:, None] * 0.5 + ramp * 0.25).expand(2, 3, 64, 64)
    latents = torch.nn.functional.interpolate(images, (8, 8), mode="bilinear", antialias=True)

    def enlarge(vae: Any, inputs: Tensor) -> Tensor:
        sides = [8 * side for side in inputs.shape[2:]]
        return torch.nn.functional.interpolate(inputs, sides, mode="bilinear")

    monkeypatch.setattr(vae_module, "decode", enlarge)
    losses = [task._equivariance(latents, images, step).item() for step in range(12)]
    assert max(losses) < 0.2
    unturned = latents.flip(3)
    wrong = [task._equivariance(unturned, images, step).item() for step in range(12)]
    assert all(other > loss for other, loss in zip(wrong, losses, strict=True))


def test_poses_are_functions_of_the_step_and_reach_the_encoder(pools: list[Pool]) -> None:
    task = make_task(pools, equivariance=0.5)
    plain = make_task(pools)
    first, again = task.loss(3)[0], task.loss(3)[0]
    assert first.item() == again.item()
    assert first.item() > plain.loss(3)[0].item()
    task._equivariance(encode(task.vae, torch.rand(2, 3, 32, 48))[0], torch.rand(2, 3, 32, 48), 1).backward()
    gradient = task.vae.encoder.conv_in.weight.grad
    assert gradient.abs().max() > 0


def test_a_vae_of_other_images_is_refused(tmp_path: Path) -> None:
    for channels in ({"in_channels": 1}, {"out_channels": 4}):
        AutoencoderKL.from_config({**build_vae(SIZE, 16, 0).config, **channels}).save_pretrained(tmp_path)
        refused("not a VAE of RGB images", open_vae, tmp_path)
    refused("cannot be read", open_vae, tmp_path / "missing")


def pool_of(pixels: Any, held_out: int = 0) -> Pool:
    """A pool of the images [N, H, W, 3] with the ids 0 to N - 1."""
    values = torch.as_tensor(np.asarray(pixels, np.uint8))
    return Pool(values, tuple(range(len(values))), (("",),) * len(values), held_out, "")


def grey(value: int, count: int, height: int = 1, width: int = 1) -> np.ndarray:
    return np.full((count, height, width, 3), value)


@pytest.mark.parametrize(
    ("size", "sides", "expected"),
    [("tiny", [64], 16), ("tiny", [128], 4), ("tiny", [16, 64], 16), ("small", [128], 2), ("medium", [512], 2)],
)
def test_the_batch_fits_the_cpu(size: str, sides: list[int], expected: int) -> None:
    vae, pools = build_vae(VAE_SIZES[size], 16, 0), [pool_of(grey(0, 4, side, side)) for side in sides]
    assert default_batch(vae, pools, CPU) == expected
    assert default_batch(vae, pools, torch.device("cuda")) == 128, "that of GPUs is another choice"


def test_a_batch_of_the_options_is_used_as_it_is() -> None:
    pools = [pool_of(grey(0, 4, 32, 32))]
    assert VaeTask(build_vae(SIZE, 16, 0), pools, CPU, VaeOptions(batch=77)).batch == 77
    assert VaeTask(build_vae(VaeSize((8, 8), 1, 4), 16, 0), pools, CPU, VaeOptions()).options.batch == 128


def plain_vae(encoder: Any, decoder: Any = None) -> Any:
    """The attributes of an AutoencoderKL that `encode` and `decode` use."""
    return SimpleNamespace(encoder=encoder, quant_conv=None, post_quant_conv=None, decoder=decoder or (lambda x: x))


class Given:
    """Stands in for `Reconstruction`: records what it gets, and returns ``output`` of the images."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, output: Any, logvar: float = 0.0) -> None:
        self.images: list[Tensor] = []
        self.noise: list[Tensor] = []

        def forward(module: Reconstruction, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.images.append(images)
            self.noise.append(noise)
            return output(images), torch.full_like(noise, 3.0), torch.full_like(noise, logvar)

        monkeypatch.setattr(Reconstruction, "forward", forward)


@pytest.mark.parametrize(("error", "decibels"), [(0.2, 20.0), (0.02, 40.0), (-5.0, 100.0)])
def test_psnr_of_a_known_error(monkeypatch: pytest.MonkeyPatch, error: float, decibels: float) -> None:
    """Images range from -1 to 1: an error of 0.2 is a tenth. Values below -1 count as -1; 100 dB is the limit."""
    monkeypatch.setattr(vae_module, "decode", lambda vae, latents: torch.full((len(latents), 3, 16, 16), error - 1))
    task = make_task([pool_of(grey(0, 6, 16, 16), held_out=2)])
    assert task.evaluate()["psnr"] == pytest.approx(decibels, abs=1e-3)


@torch.no_grad()
def test_psnr_is_that_of_all_held_out_images_under_stock_methods() -> None:
    rng = np.random.default_rng(0)
    small, wide = rng.integers(0, 256, (40, 16, 16, 3)), rng.integers(100, 150, (7, 16, 32, 3))
    task = make_task([pool_of(small, held_out=35), pool_of(wide, held_out=2)])
    task.vae.decoder.conv_out.weight *= 20  # beyond the range of pixels, too
    finished = task.finished()
    errors = []
    for pixels in (*small[:35], *wide[:2]):
        image = torch.from_numpy(pixels / 255.0).float().permute(2, 0, 1)[None]
        latents = finished.encode(2 * image - 1).latent_dist.mode()
        shown = (finished.decode(latents).sample / 2 + 0.5).clamp(0, 1)
        errors.append((shown - image).square().mean().item())
    assert task.evaluate()["psnr"] == pytest.approx(10 * math.log10(1 / np.mean(errors)), abs=1e-3)


def test_the_posterior_is_drawn_clamped_and_normalised() -> None:
    """Means 1, 3, 5 and 7 have mean 4 and deviation sqrt(20 / 3); the variance is 9."""
    mean = torch.tensor([1.0, 3.0, 5.0, 7.0]).reshape(2, 1, 1, 2)
    vae = plain_vae(lambda images: torch.cat([mean, torch.full_like(mean, math.log(9))], 1))
    noise = torch.tensor([0.0, 1.0, 2.0, -1.0]).reshape(2, 1, 1, 2)
    output, plain_mean, plain_logvar = Reconstruction(vae, normalise=False)(mean, noise)
    assert output.flatten().tolist() == pytest.approx([1, 6, 11, 4])
    assert torch.equal(plain_mean, mean)
    assert plain_logvar.flatten().tolist() == pytest.approx([math.log(9)] * 4)
    output, normal_mean, normal_logvar = Reconstruction(vae, normalise=True)(mean, noise)
    std = math.sqrt(20 / 3)
    assert normal_mean.flatten().tolist() == pytest.approx([-3 / std, -1 / std, 1 / std, 3 / std])
    assert normal_logvar.flatten().tolist() == pytest.approx([math.log(9 / std**2)] * 4)
    drawn = [-3 / std, (-1 + 3) / std, (1 + 6) / std, (3 - 3) / std]
    assert output.flatten().tolist() == pytest.approx([value / 1.5305 + 0.0609 for value in drawn])
    mean = torch.tensor([[[[2.0]], [[-10.0]]], [[[4.0]], [[30.0]]]])
    vae = plain_vae(lambda images: torch.cat([mean, torch.zeros_like(mean)], 1))
    _, normal, logvar = Reconstruction(vae, normalise=True)(mean, torch.zeros_like(mean))
    half = 1 / math.sqrt(2)
    assert normal.flatten().tolist() == pytest.approx([-half, -half, half, half])
    assert logvar[0].flatten().tolist() == pytest.approx([-math.log(2), -math.log(800)])
    moments = torch.tensor([1.0, 2.0, 3.0, -99.0, 99.0, 7.0]).reshape(1, 6, 1, 1)
    mean, logvar = encode(plain_vae(lambda images: moments), moments)
    assert mean.flatten().tolist() == [1, 2, 3]
    assert logvar.flatten().tolist() == [-30, 20, 7]


def identity_encoder(images: Tensor) -> Tensor:
    return torch.cat([images, torch.zeros_like(images)], 1)


def test_statistics_are_those_of_all_trained_images_by_pool() -> None:
    rng = np.random.default_rng(1)
    square, wide = rng.integers(0, 256, (150, 2, 2, 3)), rng.integers(0, 100, (9, 2, 4, 3))
    mean, std = channel_statistics(plain_vae(identity_encoder), [pool_of(square, 50), pool_of(wide, 3)], CPU)
    values = np.concatenate([square[50:].reshape(-1, 3), wide[3:].reshape(-1, 3)]) / 127.5 - 1
    assert mean.tolist() == pytest.approx(values.mean(0).tolist(), abs=1e-6)
    assert std.tolist() == pytest.approx(values.std(0).tolist(), abs=1e-6)
    # 3,000 images of -1 and 1,000 of 1: three quarters of the sample are -1.
    mean, std = channel_statistics(plain_vae(identity_encoder), [pool_of(grey(0, 3000)), pool_of(grey(255, 1000))], CPU)
    assert mean.tolist() == pytest.approx([-0.5] * 3)
    assert std.tolist() == pytest.approx([math.sqrt(0.75)] * 3)
    _, std = channel_statistics(plain_vae(identity_encoder), [pool_of(grey(77, 8))], CPU)
    assert std.tolist() == pytest.approx([1e-4] * 3)


def test_the_loss_is_the_weighted_sum_of_its_terms_and_counts_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reconstruction 0.5 too bright: l1 is 0.5, mse 0.25, no edge differs; latents of mean 3 and variance 4."""
    Given(monkeypatch, lambda images: images + 0.5, math.log(4))
    kl = 0.5 * (9 + 4 - 1 - math.log(4))
    pools = [pool_of(grey(100, 8, 16, 16))]
    loss, shown = make_task(pools, l1=3.0, mse=5.0, gradient=7.0, kl=0.01).loss(0)
    assert loss.item() == pytest.approx(3 * 0.5 + 5 * 0.25 + 0.01 * kl, rel=1e-5)
    assert shown["l1"].item() == pytest.approx(0.5)
    assert shown["kl"].item() == pytest.approx(kl)
    assert not shown["l1"].requires_grad
    decoder_only, _ = make_task(pools, l1=3.0, mse=5.0, gradient=7.0, kl=0.01, decoder_only=True).loss(0)
    assert decoder_only.item() == pytest.approx(3 * 0.5 + 5 * 0.25, rel=1e-5), "the encoder does not change"
    Given(monkeypatch, lambda images: images + torch.arange(16.0) / 100)
    loss, _ = make_task([pool_of(grey(100, 8, 16, 16))], l1=0.0, mse=0.0, gradient=2.0, kl=0.0).loss(0)
    # a ramp of 0.01 per pixel has that difference along one of two axes; 0.02 and 0.04 at the next scales
    assert loss.item() == pytest.approx(2 * (0.01 + 0.02 + 0.04) / 6, rel=1e-4)
    Given(monkeypatch, lambda images: images - 0.5)
    task = make_task([pool_of(grey(153, 8, 16, 16))], adversarial=0.5, l1=3.0, mse=0.0, gradient=0.0, kl=0.0)
    task.model["discriminator"] = Brightness()
    assert task.loss(0)[0].item() == pytest.approx(1.5 + 0.6 + 0.4, rel=1e-5)


@pytest.mark.parametrize("axis", [2, 3])
def test_gradient_loss_of_a_ramp(axis: int) -> None:
    ramp = torch.arange(8.0).reshape((1, 1, 8, 1) if axis == 2 else (1, 1, 1, 8)).expand(1, 3, 8, 8)
    assert gradient_loss(ramp, torch.zeros(1, 3, 8, 8), scales=1).item() == pytest.approx(0.5)
    assert gradient_loss(torch.zeros(1, 3, 8, 8), ramp).item() == pytest.approx((1 + 2 + 4) / 6)


def test_each_step_draws_its_images_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    pool = pool_of(rng.integers(0, 256, (5, 16, 16, 3)), held_out=2)
    given = Given(monkeypatch, lambda images: images)
    task = make_task([pool])
    for step in (0, 1, 2, 0):
        task.loss(step)
    trained = {image.tobytes() for image in pool.pixels[2:].numpy()}
    for step, images in enumerate(given.images[:3]):
        upright = images.flip(3) if step % 2 else images
        pixels = ((upright + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        assert {image.tobytes() for image in pixels} == trained, "as few images as here are one batch"
    assert torch.equal(given.images[0], given.images[3])
    pixels = np.arange(100)[:, None, None, None] * np.ones((1, 8, 8, 3))
    given = Given(monkeypatch, lambda images: images)
    tasks = [make_task([pool_of(pixels, held_out=10)], seed=seed) for seed in (0, 1)]
    for task, step in ((tasks[0], 0), (tasks[0], 2), (tasks[1], 0)):
        task.loss(step)
    drawn = [((images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist() for images in given.images]
    assert len({*map(tuple, drawn)}) == 3
    assert all(len(set(rows)) == 8 and min(rows) >= 10 for rows in drawn)
    given = Given(monkeypatch, lambda images: images)
    pools = [pool_of(grey(0, 40, 64, 32))]
    task = make_task(pools)
    for step in (0, 1, 7, 1):
        task.loss(step)
    make_task(pools, seed=1).loss(1)
    first, second, later, again, other = given.noise
    assert first.shape == (8, 16, 8, 4)
    assert torch.equal(second, again), "a resumed step sees the same noise"
    for left, right in itertools.combinations((first, second, later, other), 2):
        assert abs((left * right).mean().item()) < 0.1, "unrelated"
    assert first.mean().item() == pytest.approx(0, abs=0.1)
    assert first.std().item() == pytest.approx(1, abs=0.1)


class Brightness(nn.Module):
    """A discriminator whose score is ``factor`` times the mean of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.factor * images.mean((1, 2, 3))


@pytest.mark.parametrize(
    ("step", "weight"), [(0, 0.0), (1000, 0.0), (1250, 0.25), (1500, 0.5), (2000, 1.0), (9999, 1.0)]
)
def test_the_adversarial_term_grows_to_step_2000(monkeypatch: pytest.MonkeyPatch, step: int, weight: float) -> None:
    """Real images of 0.2 score 0.4, reconstructions of -0.3 score -0.6: hinge losses of 0.6 and 0.4."""
    made = torch.full((), -0.3, requires_grad=True)
    Given(monkeypatch, lambda images: made.expand_as(images))
    task = make_task([pool_of(grey(153, 8, 16, 16))], adversarial=0.5, l1=0.0, mse=0.0, gradient=0.0, kl=0.0)
    discriminator = Brightness()
    task.model["discriminator"] = discriminator
    loss, _ = task.loss(step)
    assert loss.item() == pytest.approx(0.6 + 0.4 + 0.5 * weight * 0.6, rel=1e-5)
    loss.backward()
    assert made.grad.item() == pytest.approx(-0.5 * weight * 2), "the VAE raises the score of its images"
    assert discriminator.factor.grad.item() == pytest.approx(-0.2 - 0.3), "the discriminator tells both apart"


def test_decoder_only_freezes_all_of_the_encoder(pools: list[Pool]) -> None:
    config = {**build_vae(SIZE, 16, 0).config, "use_quant_conv": True, "use_post_quant_conv": True}
    task = make_task(pools, AutoencoderKL.from_config(config), decoder_only=True)
    trained = {name.split(".")[1] for name, value in task.model.named_parameters() if value.requires_grad}
    assert trained == {"decoder", "post_quant_conv"}
    vae = build_vae(SIZE, 16, 0)
    vae.register_to_config(scaling_factor=0.18215, shift_factor=0.0)
    finished = make_task(pools, vae).finished()
    assert (finished.config.scaling_factor, finished.config.shift_factor) == (1.5305, 0.0609)
    assert vae.config.scaling_factor == 0.18215, "the VAE in training is not changed"


def test_weights_are_functions_of_the_seed() -> None:
    first, again, other = (build_vae(SIZE, 16, seed).encoder.conv_in.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    scores = [Discriminator(seed)(torch.ones(1, 3, 32, 32)) for seed in (1, 1, 2)]
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])
    discriminator = Discriminator(0)
    assert discriminator(torch.zeros(2, 3, 64, 32)).shape == (2, 1, 4, 2)
    activations = [layer for layer in discriminator if isinstance(layer, nn.LeakyReLU)]
    assert [layer.negative_slope for layer in activations] == [0.2] * 4
    images = torch.arange(12.0).view(1, 1, 3, 4)
    assert posed(images, (3, 4), 1).shape == (1, 1, 4, 3)
    assert torch.equal(posed(images, (3, 4), 2), images.flip(2, 3))
    assert posed(images, (6, 2), 0).shape == (1, 1, 6, 2)


def test_the_grid_shows_each_image_above_its_reconstruction(tmp_path: Path) -> None:
    colours = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 0.0, 1.0], [-1.0, 1.0, -1.0], [0.5, 0.5, -1.0]])
    left, left_made, right, right_made = (colour[:, None, None].expand(3, 8, 8) for colour in colours)
    write_grid([(left, left_made), (right, right_made)], tmp_path / "grid.png", "")
    pixels = np.asarray(Image.open(tmp_path / "grid.png").convert("RGB"))
    centres = []
    for colour in ((255, 0, 0), (0, 128, 255), (0, 255, 0), (191, 191, 0)):
        found = np.argwhere((pixels == colour).all(-1))
        assert len(found) == 64, colour
        centres.append(found.mean(0))
    (y0, x0), (y1, x1), (y2, x2), (y3, x3) = centres
    assert y0 == y2 < y1 == y3
    assert x0 == x1 < x2 == x3
