"""The latents of a VAE by its config; no weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.config import UserError
from sd3_light.core.columns import Bucket
from sd3_light.model.part_configs import read_config


@dataclass(frozen=True)
class LatentShape:
    """The ``channels`` of latents, and the ``factor`` of pixels per latent pixel in each direction.

    The VAE of a video model takes images as videos of one frame (``has_frames``); their latents are stored without it.
    """

    channels: int
    factor: int
    has_distribution: bool = True
    has_frames: bool = False

    @staticmethod
    def of_folder(folder: Path) -> "LatentShape":
        """Return the latents of a diffusers folder. Raises UserError for an unknown VAE."""
        config = read_config(folder / "vae", "vae")
        kind = config.get("_class_name")
        if kind not in _READERS:
            known = ", ".join(_READERS)
            raise UserError(f"{folder / 'vae'} describes a {kind!r:.80}; the VAEs that are known are {known}")
        try:
            shape = _READERS[kind](config)
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder / 'vae'}: its config.json lacks the shape of its latents ({error!r:.80}); download it again"
            ) from error
        return shape

    def size(self, bucket: Bucket) -> tuple[int, int]:
        """Return height and width of the latents of a bucket's images."""
        return -(-bucket.height // self.factor), -(-bucket.width // self.factor)

    def moments(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the shape of an image's moments: mean and log-variance, or the latents without a distribution."""
        return (self.channels * (2 if self.has_distribution else 1), *self.size(bucket))


def _images(config: Mapping[str, Any]) -> LatentShape:
    return LatentShape(int(config["latent_channels"]), 2 ** (len(config["block_out_channels"]) - 1))


def _videos(config: Mapping[str, Any]) -> LatentShape:
    factor = config.get("scale_factor_spatial") or 2 ** len(config["temperal_downsample"])
    return LatentShape(int(config["z_dim"]), int(factor), has_frames=True)


def _deep_compression(config: Mapping[str, Any]) -> LatentShape:
    levels = len(config["encoder_block_out_channels"])
    return LatentShape(int(config["latent_channels"]), 2 ** (levels - 1), has_distribution=False)


_READERS = {
    "AutoencoderKL": _images,
    "AutoencoderKLFlux2": _images,
    "AutoencoderKLQwenImage": _videos,
    "AutoencoderKLWan": _videos,
    "AutoencoderDC": _deep_compression,
}
