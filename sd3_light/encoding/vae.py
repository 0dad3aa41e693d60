"""Conversion from pixels to raw and normalised latents.

The cache stores raw moments; they are normalised on read, so that changing the scale does not need a new cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import diffusers
import numpy as np
import torch
from diffusers import ModelMixin
from numpy.typing import NDArray
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.model.device_copy import to_device
from sd3_light.model.folder import weight_files
from sd3_light.model.loading import load_diffusers_model
from sd3_light.model.part_configs import WEIGHTS_STEM, read_config
from sd3_light.tensor_file import StoredTensor, open_tensors

LOW_PSNR = 20.0
"""Reconstructions below this many dB have lost what the image shows; SD3's VAE reaches 30 and more on photographs."""


@dataclass(frozen=True)
class LatentScale:
    """How a VAE's latents [B, C, ...] are normalised: (raw - shift) x scale, or by mean and deviation of each channel.

    With ``patch`` p, there are p x p means and deviations per channel, for the rows and columns of a patch. A VAE
    without a distribution gives latents in place of moments.
    """

    scale: float
    shift: float
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    has_distribution: bool = True
    patch: int = 1

    @staticmethod
    def of_folder(diffusers_path: Path) -> "LatentScale":
        """Read the numbers from the VAE of a diffusers folder: from its config, or where a class keeps them."""
        config = read_config(diffusers_path / "vae", "vae")
        if config.get("_class_name") == _WITH_BATCH_NORM:
            return _batch_norm_scale(diffusers_path / "vae", float(config.get("batch_norm_eps", 1e-4)))
        return LatentScale.of_config(config)

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> "LatentScale":
        """Read the numbers from a VAE's config; one with none leaves latents as they are."""
        means = tuple(config.get("latents_mean") or ())
        deviations = tuple(config.get("latents_std") or ())
        scale = float(config.get("scaling_factor") or 1.0)
        shift = float(config.get("shift_factor") or 0.0)
        is_plain = config.get("_class_name") in _WITHOUT_DISTRIBUTION
        if means and deviations:
            return LatentScale(scale, 0.0, means, deviations, not is_plain)
        return LatentScale(scale, shift, has_distribution=not is_plain)

    def latent_shape(self, moments: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one latent [C, ...] for moments [B, ...]."""
        channels, *sides = moments[1:]
        return (channels // 2 if self.has_distribution else channels, *sides)

    def draw(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """Return normalised latents: of the posterior's mean, or of a sample drawn with standard normal ``noise``."""
        raw = draw_latent(moments, noise) if self.has_distribution else moments.float()
        return self.normalise(raw)

    def normalise(self, raw: Tensor) -> Tensor:
        """Return the latents as the denoiser expects them."""
        if self.means:
            return (raw - self._spread(self.means, raw)) / self._spread(self.deviations, raw) * self.scale
        return (raw - self.shift) * self.scale

    def denormalise(self, latents: Tensor) -> Tensor:
        """Return the latents as the VAE's decoder expects them, with the bits of the stock pipelines."""
        if not self.means:
            return latents / self.scale + self.shift
        means, deviations = (self._spread(values, latents) for values in (self.means, self.deviations))
        return latents * deviations + means if self.patch > 1 else latents / self.scale / (1.0 / deviations) + means

    def _spread(self, values: Sequence[float], like: Tensor) -> Tensor:
        """Return the numbers of channels, or of their places in a patch, in the shape of latents [B, C, ...]."""
        numbers = to_device(torch.tensor(values, dtype=like.dtype), like.device)
        if self.patch == 1:
            return numbers.view(1, -1, *[1] * (like.dim() - 2))
        patches = [side // self.patch for side in like.shape[-2:]]
        return numbers.view(1, -1, self.patch, self.patch).repeat(1, 1, *patches)


_WITHOUT_DISTRIBUTION = ("AutoencoderDC",)
_WITH_BATCH_NORM = "AutoencoderKLFlux2"
_STATISTICS = ("bn.running_mean", "bn.running_var")  # of patches of 2 x 2, in the order of channel, row, column


def _batch_norm_scale(folder: Path, epsilon: float) -> LatentScale:
    """Return the statistics in a VAE's weights; the others are not read."""
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(folder, WEIGHTS_STEM):
        stored |= open_tensors(file)[0] if file.is_file() else {}
    missing = [name for name in _STATISTICS if name not in stored]
    if missing:
        raise UserError(f"{folder} lacks {missing[0]}, by which its latents are normalised; download the folder again")
    mean, variance = (stored[name].load().float() for name in _STATISTICS)
    deviations = torch.sqrt(variance + epsilon)
    return LatentScale(1.0, 0.0, tuple(mean.tolist()), tuple(deviations.tolist()), patch=2)


SD3_LATENTS = LatentScale(1.5305, 0.0609)
"""The constants of Stability's VAEs, which programs that read single files assume."""


def vae_class(diffusers_path: Path) -> Any:
    """Return the class of a diffusers folder's VAE; `AutoencoderKL` if its config names none."""
    name = read_config(diffusers_path / "vae", "vae").get("_class_name", "AutoencoderKL")
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ModelMixin)):
        raise UserError(
            f"{diffusers_path}: its VAE is a {name!r:.80}, which diffusers lacks; download the folder again"
        )
    return kind


def load_vae(diffusers_path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the VAE of a diffusers folder, frozen."""
    vae: Any = load_diffusers_model(vae_class(diffusers_path), diffusers_path / "vae", dtype)
    return vae.to(device).eval().requires_grad_(False)


class VaeDecoder:
    """Decodes normalised latents with the VAE of a diffusers folder, in float32 and one image at a time.

    The weights are on the host; inside the context a copy of them is on the device.
    """

    def __init__(self, diffusers_path: Path, device: torch.device) -> None:
        self.vae = load_vae(diffusers_path, torch.device("cpu"), torch.float32)
        self.vae.enable_slicing()  # one image at a time: its activations are the largest of all
        self._scale = LatentScale.of_folder(diffusers_path)
        self._device = device
        self._host: list[Tensor] = []

    def __enter__(self) -> Self:
        tensors = self._tensors()
        self._host = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        for tensor, host in zip(self._tensors(), self._host, strict=True):
            tensor.data = host
        self._host = []

    def _tensors(self) -> list[Tensor]:
        return [*self.vae.parameters(), *self.vae.buffers()]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels [B, 3, H, W] from 0 to 1; of clips [B, 3, F, H, W]."""
        return self.pixels(self._scale.denormalise(latents))

    @torch.no_grad()
    def pixels(self, raw: Tensor) -> Tensor:
        """Return the same of latents as the VAE takes them."""
        return (decode_raw(self.vae, raw) * 0.5 + 0.5).clamp(0, 1)


def decode_raw(vae: Any, latents: Tensor) -> Tensor:
    """Return the images [B, 3, H, W] from -1 to 1 of latents [B, C, h, w]; those of clips [B, C, f, h, w] have frames.

    A VAE of videos decodes an image as one frame.
    """
    if latents.dim() == 5 or not has_frames(vae.decoder):
        images: Tensor = vae.decode(latents, return_dict=False)[0]
        return images
    frames: Tensor = vae.decode(latents.unsqueeze(2), return_dict=False)[0]
    return frames[:, :, 0]


def has_frames(part: nn.Module) -> bool:
    """Return whether the encoder or decoder is one of videos."""
    return next(part.parameters()).dim() == 5


def raw_moments(vae: Any, pixels: Tensor, flip: bool = False) -> Tensor:
    """Encode uint8 pixels, mirrored with ``flip``, to moments [B, 2C, h, w] in fp16 on the device; see below."""
    # the VAE clamps the log-variance to a range that fp16 holds
    return encode_pixels(vae, pixels.flip(-2) if flip else pixels).to(torch.float16).contiguous()


def encode_pixels(vae: Any, pixels: Tensor, tf32: bool = True) -> Tensor:
    """Encode pixels [B, H, W, 3] from 0 to 255 to mean and log-variance [B, 2C, h, w] in the encoder's dtype.

    A VAE without a distribution gives latents [B, C, h, w]. Clips [B, F, H, W, 3] give moments [B, 2C, f, h, w].
    """
    dtype = next(vae.encoder.parameters()).dtype  # of its first convolution
    images = (pixels.movedim(-1, 1).float() / 127.5 - 1).to(dtype)
    is_image = has_frames(vae.encoder) and pixels.dim() == 4
    with tf32_convolutions(tf32):
        encoded = vae.encode(images.unsqueeze(2) if is_image else images)
    if hasattr(encoded, "latent"):
        latent: Tensor = encoded.latent
        return latent
    posterior = encoded.latent_dist
    moments = torch.cat([posterior.mean, posterior.logvar], dim=1)
    return moments[:, :, 0] if is_image else moments


@contextmanager
def tf32_convolutions(allowed: bool = True) -> Iterator[None]:
    """Use deterministic TF32 convolutions on GPUs in this block, so that equal images give equal bytes."""
    cudnn: Any = torch.backends.cudnn
    # TF32 has ten bits of mantissa, as many as the stored fp16
    flags = {"allow_tf32": allowed, "benchmark": False, "deterministic": True}
    previous = {name: getattr(cudnn, name) for name in flags}
    try:
        for name, value in flags.items():
            setattr(cudnn, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(cudnn, name, value)


@torch.no_grad()
def decode_moments(vae: Any, moments: Tensor) -> NDArray[np.uint8]:
    """Decode the posterior means of moments [B, 2C, h, w] to pixels [B, H, W, 3]; of clips the first frame."""
    is_plain = type(vae).__name__ in _WITHOUT_DISTRIBUTION
    means = moments if is_plain else moments.chunk(2, dim=1)[0]
    if means.dim() == 5:
        means = means[:, :, 0]  # the first frame depends on the first latents alone
    dtype = next(vae.decoder.parameters()).dtype  # may differ from the encoder's
    images = decode_raw(vae, means.to(vae.device, dtype))
    values = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to("cpu", torch.uint8)
    pixels: NDArray[np.uint8] = values.permute(0, 2, 3, 1).numpy()
    return pixels


def psnr(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """Return the peak signal-to-noise ratio of two images of one size, in dB; equal images have 68."""
    error = float(np.mean((first.astype(np.float32) - second) ** 2))
    return 10 * math.log10(255**2 / max(error, 1e-2))


def draw_latent(moments: Tensor, noise: Tensor | None) -> Tensor:
    """Return raw latents [B, C, h, w]: the posterior's mean, or a sample drawn with standard normal ``noise``."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean if noise is None else mean + torch.exp(0.5 * logvar) * noise
