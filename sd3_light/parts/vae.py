"""Training of a VAE (AutoencoderKL) on the images of a dataset.

Latents have mean 0 and standard deviation 1 per channel under the scale and shift of Stability's VAEs: during training
the batch is normalised, at the end the statistics of the dataset are folded into the encoder's last convolution.
Nothing is padded after that convolution, so the folded VAE equals the normalised one up to rounding.
"""

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.core.compiling import why_not_compiled
from sd3_light.encoding.vae import SD3_LATENTS, tf32_convolutions
from sd3_light.model.loading import load_diffusers_model
from sd3_light.model.part_configs import read_config
from sd3_light.parts.discriminator import Discriminator, frozen_call
from sd3_light.parts.images import Pool, draw_rows, take
from sd3_light.parts.sizes import VaeSize
from sd3_light.randomness import stream
from sd3_light.runlog import info
from sd3_light.sample.grid import make_grid
from sd3_light.sample.png import save_png

_STATISTICS_IMAGES = 2048
_EVALUATED = 512
_ON_CPU = 256  # images that statistics and evaluations use there at most, where each takes a noticeable time
_GPU_BATCH = 128
_CPU_VALUES = 1 << 21  # of an activation of the first level in a step on a CPU: 16 images of 64 px for `tiny`
_SHOWN = 12
_MIN_STD = 1e-4
_FIRST_NOISE = 0.1  # deviation of the noise in the latents of a new VAE, relative to theirs
_LARGEST_SHRINK = 4  # of a pose
_ADVERSARY_STEPS = (1000, 2000)  # the adversarial term grows from 0 to its weight between these steps


@dataclass(frozen=True)
class VaeOptions:
    """Batch and weights of the loss. ``decoder_only`` keeps the encoder, and with it the latents of existing models.

    ``equivariance`` is the weight of the error of decoded latents that were scaled and turned, towards the image scaled
    and turned in the same way (EQ-VAE, arXiv 2502.09509).

    Without a ``batch`` it is `default_batch`.
    """

    batch: int | None = None
    seed: int = 0
    l1: float = 1.0
    mse: float = 2.0
    gradient: float = 0.5
    kl: float = 2e-4
    adversarial: float = 0.0
    equivariance: float = 0.0
    decoder_only: bool = False
    compile: bool = True


def default_batch(vae: AutoencoderKL, pools: list[Pool], device: torch.device) -> int:
    """Return the images per step: 128 on a GPU, on a CPU so few that a step takes seconds and little memory."""
    if device.type != "cpu":
        return _GPU_BATCH
    channels: int = vae.config.block_out_channels[0]
    area = max(height * width for height, width in (pool.size for pool in pools))
    return max(2, min(_GPU_BATCH, _CPU_VALUES // (area * channels)))


def build_vae(size: VaeSize, latent_channels: int, seed: int) -> AutoencoderKL:
    """Build a VAE with random weights, in the layout of SD3's."""
    levels = len(size.channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderKL(
            in_channels=3, out_channels=3, latent_channels=latent_channels, block_out_channels=size.channels,
            down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
            layers_per_block=size.layers, norm_num_groups=size.groups, mid_block_add_attention=True,
            use_quant_conv=False, use_post_quant_conv=False, scaling_factor=SD3_LATENTS.scale,
            shift_factor=SD3_LATENTS.shift,
        )  # fmt: skip


def open_vae(folder: Path) -> AutoencoderKL:
    """Load an existing VAE in float32 from its own folder or from a diffusers folder."""
    folder = folder / "vae" if (folder / "vae" / "config.json").is_file() else folder
    read_config(folder, "vae")
    vae: AutoencoderKL = load_diffusers_model(AutoencoderKL, folder, torch.float32)
    if vae.config.in_channels != 3 or vae.config.out_channels != 3:
        raise UserError(f"{folder} is not a VAE of RGB images; give another --init")
    return vae


class Reconstruction(nn.Module):
    """Pixels and standard normal noise -> (reconstruction, mean, log-variance).

    With ``normalise`` the latents are normalised per batch, and the decoder sees them in the scale of SD3.
    """

    def __init__(self, vae: AutoencoderKL, normalise: bool) -> None:
        super().__init__()
        self.vae = vae
        self.normalise = normalise

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode, draw from the posterior and decode."""
        mean, logvar = encode(self.vae, images)
        if not self.normalise:
            return decode(self.vae, mean + torch.exp(0.5 * logvar) * noise), mean, logvar
        std, shift = torch.std_mean(mean, dim=(0, 2, 3), keepdim=True)
        std = std.clamp(min=_MIN_STD)
        mean = (mean - shift) / std
        logvar = logvar - 2 * std.log()
        latents = mean + torch.exp(0.5 * logvar) * noise
        return decode(self.vae, SD3_LATENTS.denormalise(latents)), mean, logvar


def encode(vae: AutoencoderKL, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log-variance of the posterior in float32; unlike the stock method it compiles as one graph."""
    moments = vae.encoder(images)
    if vae.quant_conv is not None:
        moments = vae.quant_conv(moments)
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean, logvar.clamp(-30.0, 20.0)


def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Return images in float32."""
    images: Tensor = vae.decoder(latents if vae.post_quant_conv is None else vae.post_quant_conv(latents))
    return images.float()


@torch.no_grad()
def channel_statistics(vae: AutoencoderKL, pools: list[Pool], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each latent channel over training images of all sizes."""
    total = sum(pool.trained for pool in pools)
    count = 0
    first = torch.zeros((), device=device)
    second = torch.zeros((), device=device)
    for pool in pools:
        most = _STATISTICS_IMAGES if device.type != "cpu" else _ON_CPU
        number = max(1, min(pool.trained, most * pool.trained // total))
        rows = np.linspace(pool.held_out, len(pool.ids) - 1, number).astype(np.int64)
        for start in range(0, number, 64):
            mean, _ = encode(vae, take(pool.pixels, rows[start : start + 64], device))
            values = mean.double().transpose(0, 1).flatten(1)
            count += values.shape[1]
            first = first + values.sum(1)
            second = second + values.square().sum(1)
    mean = first / count
    return mean, (second / count - mean.square()).clamp(min=_MIN_STD**2).sqrt()


def normalising_fold(vae: AutoencoderKL, pools: list[Pool], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation to fold so that latents are normal under the scale of SD3."""
    mean, std = channel_statistics(vae, pools, device)
    std = std * SD3_LATENTS.scale
    return mean - SD3_LATENTS.shift * std, std


@torch.no_grad()
def fold_into_encoder(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Make the encoder return (latent - mean) / std, by changing its last convolution."""
    conv = vae.encoder.conv_out if vae.quant_conv is None else vae.quant_conv
    channels = len(mean)
    std64 = std.double()
    conv.weight[:channels] = (conv.weight[:channels].double() / std64[:, None, None, None]).float()
    conv.bias[:channels] = ((conv.bias[:channels].double() - mean.double()) / std64).float()
    conv.bias[channels:] -= (2 * std64.log()).float()


@torch.no_grad()
def fold_into_decoder(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Make the decoder expect (latent - mean) / std, by changing its first convolution.

    Exact except at the borders, where a padded convolution sees zeros instead of the mean: train afterwards.
    """
    conv = vae.decoder.conv_in if vae.post_quant_conv is None else vae.post_quant_conv
    weight = conv.weight.double()
    conv.bias += (weight * mean.double()[None, :, None, None]).sum((1, 2, 3)).float()
    conv.weight.copy_((weight * std.double()[None, :, None, None]).float())


class VaeTask:
    """A VAE in training; see `fit.Task`. Without ``normalise`` the latents keep their scale and shift."""

    score = "psnr"

    def __init__(
        self, vae: AutoencoderKL, pools: list[Pool], device: torch.device, options: VaeOptions, grid: Path | None = None
    ) -> None:
        self.batch = options.batch or default_batch(vae, pools, device)
        self.device = device
        self.pools = pools
        self.options = replace(options, batch=self.batch)
        self.grid = grid
        self.vae = vae.to(device).train()
        if device.type == "cuda":
            self.vae = self.vae.to(memory_format=torch.channels_last)
        if options.decoder_only:
            for part in (self.vae.encoder, self.vae.quant_conv):
                if part is not None:
                    part.requires_grad_(False)
        self.model = nn.ModuleDict({"vae": self.vae})
        if options.adversarial:
            self.model["discriminator"] = Discriminator(options.seed).to(device)
        reconstruction = Reconstruction(self.vae, normalise=not options.decoder_only)
        self._reconstruct = compiled(reconstruction, device) if options.compile else reconstruction

    @torch.no_grad()
    def start_new(self) -> None:
        """Normalise the latents of a random VAE and make their noise small: it would hide the signal at first."""
        fold_into_encoder(self.vae, *normalising_fold(self.vae, self.pools, self.device))
        conv = self.vae.encoder.conv_out
        channels = self.vae.config.latent_channels
        conv.weight[channels:] *= _FIRST_NOISE
        conv.bias[channels:] = 2 * math.log(_FIRST_NOISE / SD3_LATENTS.scale)
        self.vae.decoder.conv_in.weight *= SD3_LATENTS.scale  # random weights expect inputs of deviation 1

    def start_from(self) -> None:
        """Normalise the latents of an existing VAE once, so that its decoder expects what training will give it."""
        if not self.options.decoder_only:
            mean, std = normalising_fold(self.vae, self.pools, self.device)
            fold_into_encoder(self.vae, mean, std)
            fold_into_decoder(self.vae, mean, std)

    def loss(self, step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of a random batch, mirrored in every second step."""
        options = self.options
        pool, rows = draw_rows(self.pools, options.seed, "parts-vae", step, self.batch)
        images = take(pool.pixels, rows, self.device)
        images = images.flip(3) if step % 2 else images
        with half_precision(self.device):
            output, mean, logvar = self._reconstruct(images, self._noise(step, images))
        l1 = F.l1_loss(output, images)
        mse = F.mse_loss(output, images)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        loss = options.l1 * l1 + options.mse * mse + options.gradient * gradient_loss(output, images)
        loss = loss + (0.0 if options.decoder_only else options.kl) * kl
        if options.equivariance:
            loss = loss + options.equivariance * self._equivariance(mean, images, step)
        if options.adversarial:
            loss = loss + self._adversarial(output, images, step)
        return loss, {"l1": l1.detach(), "kl": kl.detach()}

    def _noise(self, step: int, images: Tensor) -> Tensor:
        seed = int(stream(self.options.seed, "parts-vae-noise", 0, 0, step).integers(1 << 62))
        generator = torch.Generator(self.device).manual_seed(seed)
        factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        height = images.shape[2] // factor
        width = images.shape[3] // factor
        shape = (len(images), self.vae.config.latent_channels, height, width)
        return torch.randn(shape, generator=generator, device=self.device)

    def _equivariance(self, latents: Tensor, images: Tensor, step: int) -> Tensor:
        """Return the error of the means of the posterior, scaled and turned, towards the image in the same pose."""
        rng = stream(self.options.seed, "parts-vae-pose", 0, 0, step)
        sides = [int(rng.integers(max(1, side // _LARGEST_SHRINK), side + 1)) for side in latents.shape[2:]]
        turns = int(rng.integers(4))
        factors = [whole // side for whole, side in zip(images.shape[2:], latents.shape[2:], strict=True)]
        target = posed(images, [factor * side for factor, side in zip(factors, sides, strict=True)], turns)
        inputs = posed(latents, sides, turns)
        if not self.options.decoder_only:
            inputs = SD3_LATENTS.denormalise(inputs)
        with half_precision(self.device):
            output = decode(self.vae, inputs)
        return self.options.l1 * F.l1_loss(output, target) + self.options.mse * F.mse_loss(output, target)

    def _adversarial(self, output: Tensor, images: Tensor, step: int) -> Tensor:
        """Return the hinge losses of both sides; each side's gradients reach its own weights only."""
        discriminator: Any = self.model["discriminator"]
        begin, end = _ADVERSARY_STEPS
        weight = self.options.adversarial * min(1.0, max(0.0, (step - begin) / (end - begin)))
        with half_precision(self.device):
            real = discriminator(images)
            fake = discriminator(output.detach())
            judged = frozen_call(discriminator, output)
        own = F.relu(1 - real.float()).mean() + F.relu(1 + fake.float()).mean()
        loss: Tensor = own - weight * judged.float().mean()
        return loss

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the PSNR of held-out images, in float32 as the VAE is used, and write the grid."""
        vae = self.finished()
        error = 0.0
        count = 0
        most = _EVALUATED if self.device.type != "cpu" else _ON_CPU
        shown: list[tuple[Tensor, Tensor]] = []
        with tf32_convolutions():
            for pool in self.pools:
                for start in range(0, min(pool.held_out, most), 32):
                    rows = np.arange(start, min(start + 32, pool.held_out, most))
                    images = take(pool.pixels, rows, self.device)
                    output = decode(vae, encode(vae, images)[0]).clamp(-1, 1)
                    error += ((output - images) / 2).square().mean((1, 2, 3)).sum().item()
                    count += len(rows)
                    shown += list(zip(images, output, strict=True)) if len(shown) < _SHOWN else []
        quality = -10 * math.log10(max(error / max(count, 1), 1e-10))
        if self.grid is not None:
            write_grid(shown[:_SHOWN], self.grid, f"images and reconstructions, {quality:.2f} dB")
        return {"psnr": quality}

    def finished(self) -> AutoencoderKL:
        """Return a copy with the statistics of the latents folded in."""
        vae: AutoencoderKL = copy.deepcopy(self.vae).eval().requires_grad_(False)
        if not self.options.decoder_only:
            fold_into_encoder(vae, *normalising_fold(vae, self.pools, self.device))
            vae.register_to_config(scaling_factor=SD3_LATENTS.scale, shift_factor=SD3_LATENTS.shift)
        return vae


def posed(values: Tensor, sides: Sequence[int], turns: int) -> Tensor:
    """Return images or latents [B, C, H, W] scaled to these sides, then turned by quarters."""
    scaled = F.interpolate(values, tuple(sides), mode="bilinear", antialias=True, align_corners=False)
    return scaled.rot90(turns, (2, 3))


def half_precision(device: torch.device) -> torch.autocast:
    """Return a context that computes in bfloat16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def compiled(module: nn.Module, device: torch.device) -> Any:
    """Return the module compiled on a GPU, or unchanged where that does not work."""
    if device.type != "cuda":
        return module
    if problem := why_not_compiled(device):
        info(f"{problem}: training without it, which is slower")
        return module
    warnings.filterwarnings("ignore", ".*functools.lru_cache", UserWarning)  # diffusers' checks of versions
    info("the first step compiles the model, which takes a minute or two; --no-compile starts at once and is slower")
    return torch.compile(module, dynamic=False)


def gradient_loss(output: Tensor, images: Tensor, scales: int = 3) -> Tensor:
    """Return the mean absolute difference of horizontal and vertical differences, at several scales: edges count."""
    loss = output.new_zeros(())
    for _ in range(scales):
        for dim in (2, 3):
            loss = loss + (output.diff(dim=dim) - images.diff(dim=dim)).abs().mean()
        output = F.avg_pool2d(output, 2)
        images = F.avg_pool2d(images, 2)
    return loss / (2 * scales)


def write_grid(pairs: list[tuple[Tensor, Tensor]], path: Path, title: str) -> None:
    """Write images, each above its reconstruction, as a PNG."""
    if pairs:
        columns = min(len(pairs), 6)
        rows = [pairs[start : start + columns] for start in range(0, len(pairs), columns)]
        cells = [_image(pair[side]) for row in rows if len(row) == columns for side in (0, 1) for pair in row]
        save_png(make_grid(cells, [""] * len(cells), columns, scale=1, title=title), path, {})


def _image(values: Tensor) -> Image.Image:
    pixels = ((values.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0)
    return Image.fromarray(pixels.cpu().numpy())
