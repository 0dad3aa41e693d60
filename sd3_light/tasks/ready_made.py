"""Ready-made units: latents of any diffusers VAE, encoded and drawn, and text with dropout."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.config.base import require_value
from sd3_light.config.faults import UserError
from sd3_light.data.slots import replace_items
from sd3_light.encoding.vae import LatentScale, draw_latent, encode_pixels, has_frames
from sd3_light.tasks.units import Draw, PipelineUnit, Values


class EncodeImage(PipelineUnit):
    """Encodes an image (PIL, or an array [H, W, 3] of bytes) with the module's VAE, of images or of videos.

    The moments are mean and log-variance [2C, h, w]; a VAE without a distribution (DC-AE) gives the latent [C, h, w].
    """

    reads = ("image",)
    writes = ("moments",)
    uses = ("vae",)

    def run(self, module: Any, image: Any) -> Values:  # type: ignore[override]
        """Return the moments."""
        pixels = torch.from_numpy(np.array(image))
        if pixels.ndim != 3 or pixels.shape[-1] != 3:
            raise UserError(f"EncodeImage: an image has shape {tuple(pixels.shape)}, not [H, W, 3]; convert it to RGB")
        return {"moments": _encode(module.vae, pixels)}


class EncodeVideo(PipelineUnit):
    """Encodes a video (bytes [F, H, W, 3]) with the module's video VAE into moments [2C, f, h, w].

    With ``sample=False`` it keeps the means [C, f, h, w] only, as Wan is trained: `DrawLatent` then draws nothing, and
    the moments take half the space on disk.
    """

    reads = ("video",)
    writes = ("moments",)
    uses = ("vae",)

    def __init__(self, sample: bool = True) -> None:
        self.sample = sample

    def run(self, module: Any, video: Any) -> Values:  # type: ignore[override]
        """Return the moments."""
        frames = video if isinstance(video, Tensor) else torch.from_numpy(np.array(video))
        if frames.ndim != 4 or frames.shape[-1] != 3:
            raise UserError(f"EncodeVideo: a video has shape {tuple(frames.shape)}, not [F, H, W, 3]; stack RGB frames")
        if not has_frames(module.vae.encoder):
            raise UserError(f"EncodeVideo: {type(module.vae).__name__} encodes images; give the VAE of a video model")
        _require_whole_groups(module.vae, len(frames))
        moments = _encode(module.vae, frames)
        return {"moments": moments if self.sample else moments.chunk(2)[0]}


def _require_whole_groups(vae: Any, frames: int) -> None:
    """Raise if the VAE would silently drop the last frames: it encodes the first frame, then groups."""
    group = getattr(vae.config, "scale_factor_temporal", None) or 1
    if rest := (frames - 1) % group:
        raise UserError(
            f"EncodeVideo: a video has {frames} frames; {type(vae).__name__} encodes {group}n + 1 of them: give "
            f"frames={frames - rest}"
        )


def _encode(vae: Any, pixels: Tensor) -> Tensor:
    return encode_pixels(vae, pixels[None].to(vae.device))[0].float()


class DrawLatent(PipelineUnit):
    """Draws a latent from the moments, again in every epoch, and normalises it as the VAE's config says."""

    reads = ("moments",)
    writes = ("latents",)
    draws = True

    def run(self, module: Any, moments: Tensor, draw: Draw) -> Values:  # type: ignore[override]
        """Return the normalised latent, as the denoiser expects it."""
        config = module.vae.config
        channels = getattr(config, "z_dim", None) or config.latent_channels
        if len(moments) == channels:  # the latent itself
            return {"latents": normalise_latent(moments, config)}
        noise = draw("posterior", (len(moments) // 2, *moments.shape[1:]))
        return {"latents": normalise_latent(draw_latent(moments[None], noise[None])[0], config)}


def normalise_latent(raw: Tensor, config: Any) -> Tensor:
    """Return a latent [C, ...] normalised by ``latents_mean`` and ``latents_std`` of the VAE's config, if it has them,
    or by ``scaling_factor`` and ``shift_factor``; a config with neither leaves it as it is.
    """
    names = ("latents_mean", "latents_std", "scaling_factor", "shift_factor")
    return LatentScale.of_config({name: getattr(config, name, None) for name in names}).normalise(raw[None])[0]


FULL = "full_"
EMPTY = "empty_"


def drop_text(encode: Any, probability: Any, **empty: Any) -> tuple[PipelineUnit, PipelineUnit]:
    """Return two units in place of ``encode``, a unit that encodes text: the encoding, and its dropout.

    Each epoch draws again; validation drops nothing. A dropped sample gets what ``encode`` writes for the values in
    ``empty``, by default ``prompt=""``. A data process stores both, so training on its data needs no text encoder.
    """
    if not isinstance(encode, PipelineUnit):
        raise UserError(f"drop_text: {encode!r} is not a unit; give the unit that encodes the text")
    require_value(ModelConfig, "uncond_text_dropout_prob", probability, "drop_text: probability")
    empty = empty or {"prompt": ""}
    if unknown := [name for name in empty if not {name, f"{name}?"} & set(encode.reads)]:
        raise UserError(
            f"drop_text: unit {encode.label} does not read {unknown[0]!r}; name a value of {list(encode.reads)}"
        )
    return _EncodeBoth(encode, empty), _DropText(encode, float(probability))


class _EncodeBoth(PipelineUnit):
    """Runs ``encode`` on the sample, and once on the empty text."""

    def __init__(self, encode: PipelineUnit, empty: Values) -> None:
        self.encode = encode
        self.empty = empty
        self.reads = encode.reads
        self.uses = encode.uses
        self.writes = tuple(prefix + name for prefix in (FULL, EMPTY) for name in encode.writes)
        self._memo: tuple[Any, Values] | None = None

    @property
    def label(self) -> str:
        """The encoder's name."""
        return self.encode.label

    def settings(self) -> Values:
        """Return the encoder's settings and the empty text."""
        return {**self.encode.settings(), "empty": str(sorted(self.empty.items()))}

    def run(self, module: Any, **values: Any) -> Values:
        """Return both results."""
        if self._memo is None or self._memo[0] is not module:
            # copied: it may hold values of this sample, whose memory later batches use
            written = self.encode.run(module, **{**values, **self.empty})
            self._memo = (module, replace_items(written, Tensor, Tensor.clone))
        results = {FULL: self.encode.run(module, **values), EMPTY: self._memo[1]}
        return {prefix + name: value for prefix, written in results.items() for name, value in written.items()}


class _DropText(PipelineUnit):
    """Chooses the text or the empty text; one draw for everything that the encoder writes."""

    draws = True

    def __init__(self, encode: PipelineUnit, probability: float) -> None:
        self.writes = encode.writes
        self.probability = probability
        self.reads = (*(prefix + name for prefix in (FULL, EMPTY) for name in encode.writes), "is_evaluation?")
        self._threshold = math.inf * (probability - 0.5)
        if 0 < probability < 1:
            self._threshold = NormalDist().inv_cdf(probability)

    @property
    def label(self) -> str:
        """The name in errors."""
        return "drop_text"

    def run(self, module: Any, draw: Draw, is_evaluation: bool = False, **values: Any) -> Values:  # type: ignore[override]
        """Return the values under the encoder's names."""
        dropped = not is_evaluation and float(draw("text-dropout", (1,), on_host=True)) < self._threshold
        chosen = EMPTY if dropped else FULL
        return {name: values[chosen + name] for name in (written.rstrip("?") for written in self.writes)}
