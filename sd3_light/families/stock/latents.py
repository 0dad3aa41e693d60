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

    The VAE of a video model takes images as videos of one frame: it has a ``frame_step``, the frames of a clip per
    frame of its latents, after the first.
    """

    channels: int
    factor: int
    has_distribution: bool = True
    frame_step: int | None = None

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

    def latents(self, bucket: Bucket, with_frames: bool = False) -> tuple[int, ...]:
        """Return the shape of an image's latents; ``with_frames`` that of a clip's."""
        return (self.channels, *((self.frames(bucket.frames),) if with_frames else ()), *self.size(bucket))

    def frames(self, frames: int) -> int:
        """Return the frames of a clip's latents."""
        return 1 + (frames - 1) // self.frame_step if self.frame_step else frames

    def moments(self, bucket: Bucket, with_frames: bool = False) -> tuple[int, ...]:
        """Return the shape of an image's moments: mean and log-variance, or the latents without a distribution."""
        channels, *sides = self.latents(bucket, with_frames)
        return (channels * (2 if self.has_distribution else 1), *sides)


def _images(config: Mapping[str, Any]) -> LatentShape:
    return LatentShape(int(config["latent_channels"]), 2 ** (len(config["block_out_channels"]) - 1))


def _videos(config: Mapping[str, Any]) -> LatentShape:
    factor = config.get("scale_factor_spatial") or 2 ** len(config["temperal_downsample"])
    step = config.get("scale_factor_temporal") or 2 ** sum(config["temperal_downsample"])
    return LatentShape(int(config["z_dim"]), int(factor), frame_step=int(step))


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
