"""SD3 in training: model inputs from cached features, the denoiser before the first step, saving."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.registry import family_of, starting_weights
from sd3_light.core.start import WeightsStart
from sd3_light.data.shards import CaptionFeatures
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch
from sd3_light.encoders.text import join_text, unpad_text
from sd3_light.encoders.vae import LatentScale, draw_latent
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.flow.conditioning import draw_drops, drop_text
from sd3_light.flow.image_draws import draw_corners, draw_kept
from sd3_light.flow.noise import DeviceNoise
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.flow.timesteps import open_interval, times_from_quantiles
from sd3_light.randomness import fill_normals, first_words, occurrence_words, streams, uniforms
from sd3_light.training.exports import model_config, model_spec

_TEXT = ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled")
_LENGTHS = ("clip_l.length", "clip_g.length", "t5.length")

Draw = Callable[[tuple[int, ...]], Tensor]
"""Shape of a sample -> standard normals of the batch."""


Pair = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""(features, label) of a batch, as training loops outside this package take them."""

Noise = Literal["table", "ziggurat"]
"""How a sample's stream becomes normals: by `randomness.fill_normals`, or by numpy's method, as in earlier versions."""


@dataclass(frozen=True)
class InputPreparer:
    """Turns cached features into batches, with random draws per sample (law 1). Small: workers get a copy.

    ``empty_text`` are the features of the empty caption, or None where a fully dropped sample carries zeros. ``noise``
    is "ziggurat" for runs that started with it. ``num_positions`` is the side of the denoiser's position table.
    """

    seed: int
    model: ModelConfig
    scale: LatentScale
    empty_text: CaptionFeatures | None
    noise: Noise = "table"
    num_positions: int = 0

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> Batch:
        """Return noisy, t, prompt, pooled, target and, where there is one, mask.

        With real text tokens ``prompt.length`` says how many first rows of prompt are a sample's own. In training
        there are also the config's `image_draws`. ``timestep_quantile`` makes a validation batch: that quantile of t
        for all samples, noise that depends on the sample alone, the posterior's mean and no dropout.
        """
        return self.prepare_into(batch, None, timestep_quantile)

    def prepare_into(
        self, batch: CachedBatch, allocate: AllocateTensor | None, timestep_quantile: float | None = None
    ) -> Batch:
        """Like `prepare_inputs`, with the prompt, most of the bytes, in memory that ``allocate`` returns."""
        return self.add_noise(self._clean(batch, allocate, timestep_quantile), timestep_quantile is not None)

    def prepare_clean(self, batch: CachedBatch, allocate: AllocateTensor | None = None) -> Batch:
        """Return moments, t, prompt, pooled, words and so on, to get noise later.

        ``words`` are `randomness.occurrence_words` as int32 [B, 4].
        """
        return self._clean(batch, allocate, None)

    def add_noise(self, clean: Batch, evaluation: bool = False) -> Batch:
        """Return the batch of `prepare_inputs` for one of `prepare_clean`, both on the host."""
        occurrences = clean["words"].view(torch.int64).numpy()
        if evaluation:
            draw = partial(self._normals, "eval-noise", occurrence_words(0, 0, occurrences[:, 1]))
            return self._noisy(clean, draw, None)
        draws = (partial(self._normals, purpose, occurrences) for purpose in ("noise", "posterior"))
        return self._noisy(clean, *draws)

    def noise_adder(self, device: torch.device) -> Callable[[Batch], Batch]:
        """Return a function that turns a batch of `prepare_clean` on the device into one of `prepare_inputs`.

        Noise and posterior draws have the same bits as on the host; latents and targets agree to rounding.
        """
        noise = DeviceNoise(self.seed, device)

        def add(clean: Batch) -> Batch:
            words = clean["words"].view(torch.int64)
            draws = (partial(noise.normals, purpose, words) for purpose in ("noise", "posterior"))
            return self._noisy(clean, *draws)

        return add

    def _clean(self, batch: CachedBatch, allocate: AllocateTensor | None, timestep_quantile: float | None) -> Batch:
        occurrences = occurrence_words(batch["epoch"], batch["repeat"], batch["sample_id"])
        moments = batch["moments"]
        is_evaluation = timestep_quantile is not None
        values = {"moments": moments, "t": self.times(occurrences, moments.shape, timestep_quantile)}
        prompt, pooled, lengths = self._text(batch, occurrences, is_evaluation, allocate)
        values |= {"prompt": prompt, "pooled": pooled}
        if not is_evaluation:
            values |= self.image_draws(occurrences, moments.shape)
        values["words"] = torch.from_numpy(occurrences).view(torch.int32)
        return Batch(len(moments), values, self.host_values(lengths)).with_values({"mask": batch.get("mask")})

    def host_values(self, lengths: Tensor) -> dict[str, Tensor]:
        """Return a batch's counts: the lengths of real text."""
        return {"prompt.length": lengths} if self.model.text_tokens == "real" else {}

    def _noisy(self, clean: Batch, noise: Draw, posterior: Draw | None) -> Batch:
        moments, t, mask = clean["moments"], clean["t"], clean.get("mask")
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        drawn = noise(shape)
        latent = self.scale.normalise(draw_latent(moments, None if posterior is None else posterior(shape)))
        rest = clean.with_values({}, without=("moments", "words", "mask"))
        values = {"noisy": interpolate(latent, drawn, t), **rest.values, "target": velocity(latent, drawn)}
        return replace(clean, values=values).with_values({"mask": None if mask is None else _mask_weights(mask)})

    def _text(
        self, batch: CachedBatch, occurrences: NDArray[np.int64], evaluation: bool, allocate: AllocateTensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return prompt, pooled vectors and the lengths of the prompt."""
        real = self.model.text_tokens == "real"
        texts = unpad_text({name: batch[name] for name in (_TEXT + _LENGTHS if real else _TEXT)})
        if self.model.enable_uncond_text_dropout and not evaluation:
            probability, joint = self.model.uncond_text_dropout_prob, self.model.uncond_text_dropout == "joint"
            drops = draw_drops(self.seed, occurrences, probability, joint)
            texts = drop_text(texts, drops, self.empty_text, real)
        return join_text(texts, allocate)

    def _normals(self, purpose: str, occurrences: NDArray[np.int64], shape: tuple[int, ...]) -> Tensor:
        values = np.empty((len(occurrences), *shape), dtype=np.float32)
        for at, draw in enumerate(streams(self.seed, purpose, occurrences)):
            if self.noise == "ziggurat":
                draw.standard_normal(dtype=np.float32, out=values[at])
            else:
                fill_normals(draw, values[at])
        return torch.from_numpy(values)

    def times(self, occurrences: NDArray[np.int64], shape: torch.Size, quantile: float | None = None) -> Tensor:
        """Return t [B] for latents of a shape that ends with height and width."""
        if quantile is None:
            drawn = uniforms(first_words(self.seed, "timestep", occurrences)[0]).tolist()
            quantiles = [open_interval(value) for value in drawn]
        else:
            quantiles = [quantile] * len(occurrences)
        return torch.tensor(times_from_quantiles(quantiles, math.prod(_grid(shape)), self.model), dtype=torch.float32)

    def image_draws(self, occurrences: NDArray[np.int64], shape: torch.Size) -> dict[str, Tensor]:
        """Return what the config draws per image: ``kept`` tokens of a route, ``corners`` of position crops."""
        routing, side, draws = self.model.routing, self.model.position_crop_side, dict[str, NDArray[np.int64]]()
        if routing is not None:
            draws["kept"] = draw_kept(self.seed, occurrences, math.prod(_grid(shape)), routing.share)
        if side is not None:
            draws["corners"] = draw_corners(self.seed, occurrences, _grid(shape), side, self.num_positions)
        return {name: torch.from_numpy(draw.astype(np.int32)) for name, draw in draws.items()}


def _mask_weights(mask: Tensor) -> Tensor:
    """Return the weights 0 to 1 of a mask of bytes, with the same bits on every device.

    A GPU divides by a number of the host as a multiplication by its reciprocal, by a tensor exactly.
    """
    return mask.float() / mask.new_full((), 255.0, dtype=torch.float32)


def _grid(shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns of tokens of latents whose shape ends with height and width."""
    return shape[-2] // 2, shape[-1] // 2


@dataclass(frozen=True)
class CleanPreparer:
    """Prepares batches without noise, for a device that adds it."""

    preparer: InputPreparer

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> Batch:
        """See `InputPreparer.prepare_clean`."""
        return self.preparer.prepare_clean(batch)

    def prepare_into(self, batch: CachedBatch, empty: AllocateTensor, timestep_quantile: float | None = None) -> Batch:
        """See `InputPreparer.prepare_clean`."""
        return self.preparer.prepare_clean(batch, empty)


class LightSD3Pipeline:
    """SD3 for the training stage: a denoiser in float32, the preparation of its inputs, and saving.

    ``start`` names the weights to start from; by default those of ``model``.
    """

    name = "sd3"

    def __init__(
        self,
        model: ModelConfig,
        seed: int,
        empty_text: CaptionFeatures | None,
        start: WeightsStart | None = None,
        noise: Noise = "table",
    ) -> None:
        self.model = model
        denoiser = family_of(model).weights.load(start or starting_weights(model), seed)
        assert isinstance(denoiser, SD3Transformer2DModel)
        self.transformer = denoiser
        uncond = empty_text if model.uncond_text == "empty" else None
        scale, positions = LatentScale.of_folder(model.diffusers_path), self.transformer.config.pos_embed_max_size
        self.preparer = InputPreparer(seed, model, scale, uncond, noise, positions)

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> Pair:
        """Return ((noisy_latents, 1000 t, prompt_embeds, pooled_prompt_embeds), (target, mask)).

        With real text tokens the lengths of the prompts follow the features, then the config's draws per image.
        """
        prepared = self.preparer.prepare_inputs(batch, timestep_quantile)
        lengths = prepared.lengths("prompt")
        draws = prepared.select(("kept", "corners")).tensors()
        features = (prepared["noisy"], 1000 * prepared["t"], prepared["prompt"], prepared["pooled"])
        return (*features, *(() if lengths is None else (lengths,)), *draws), (prepared["target"], prepared.get("mask"))

    def save_model(self, folder: Path, state_dict: Mapping[str, Tensor]) -> Path:
        """Write a complete, verified diffusers folder with all weights and buffers of the denoiser, in `model.dtype`.

        A run saves in its `save_dtype`: see `Saver`.
        """
        spec = model_spec(self.model, model_config(self.transformer))
        return write_folder(Path(folder), state_dict, spec)


def split_batch(prepared: Pair, pieces: int) -> list[Pair]:
    """Split (features, label) of `LightSD3Pipeline.prepare_inputs` into ``pieces`` equal pairs.

    Real text is cut to each one's longest sample.
    """
    features, (target, mask) = prepared
    assert target is not None and len(target) % pieces == 0, pieces
    parts = [_shortened(part) for part in zip(*(tensor.chunk(pieces) for tensor in features), strict=True)]
    masks = [None] * pieces if mask is None else mask.chunk(pieces)
    return list(zip(parts, zip(target.chunk(pieces), masks, strict=True), strict=True))


def _shortened(features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # lengths are the only int64 among the features
    lengths = next((feature for feature in features[4:] if feature.dtype == torch.int64), None)
    if lengths is None:
        return features
    noisy, times, prompt, *rest = features
    return noisy, times, prompt[:, : int(lengths.max())], *rest
