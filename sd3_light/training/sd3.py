"""SD3 in training: model inputs from cached features, the denoiser before the first step, saving."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import ModelConfig, UserError
from sd3_light.data.loader import PreparedBatch
from sd3_light.data.shards import CaptionFeatures
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch
from sd3_light.encoders.text import join_text, unpad_text
from sd3_light.encoders.vae import LatentScale, draw_latent
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.single_file import transformer_from_single_file
from sd3_light.flow.conditioning import draw_drops, drop_text
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.flow.timesteps import open_interval, times_from_quantiles
from sd3_light.model.part_configs import LOCAL_WEIGHTS
from sd3_light.model.random_weights import new_transformer, transformer_from_state
from sd3_light.model.start import WeightsStart, where_weights_start
from sd3_light.randomness import stream
from sd3_light.training.saver import model_config, model_spec

_TEXT = ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled")
_LENGTHS = ("clip_l.length", "clip_g.length", "t5.length")


@dataclass(frozen=True)
class InputPreparer:
    """Turns cached features into (features, label), with random draws per sample (law 1). Small: workers get a copy.

    ``empty_text`` are the features of the empty caption, or None where a fully dropped sample carries zeros.
    """

    seed: int
    model: ModelConfig
    scale: LatentScale
    empty_text: CaptionFeatures | None

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> PreparedBatch:
        """Return ((noisy_latents, 1000 t, prompt_embeds, pooled_prompt_embeds), (target, mask)).

        With real text tokens the features end with ``lengths``: how many first rows of prompt_embeds are a sample's
        own. ``timestep_quantile`` makes a validation batch: that quantile of t for all samples, noise that depends on
        the sample alone, the posterior's mean and no dropout.
        """
        return self.prepare_into(batch, None, timestep_quantile)

    def prepare_into(
        self, batch: CachedBatch, allocate: AllocateTensor | None, timestep_quantile: float | None = None
    ) -> PreparedBatch:
        """Like `prepare_inputs`, with the prompt, most of the bytes, in memory that ``allocate`` returns."""
        evaluation = timestep_quantile is not None
        moments = batch["moments"]
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        noise = self._normals(batch, "eval-noise" if evaluation else "noise", shape)
        posterior = None if evaluation else self._normals(batch, "posterior", shape)
        clean = self.scale.normalise(draw_latent(moments, posterior))
        t = self._times(batch, clean.shape, timestep_quantile)
        mask = batch.get("mask")
        return (
            (interpolate(clean, noise, t), 1000 * t, *self._text(batch, evaluation, allocate)),
            (velocity(clean, noise), None if mask is None else mask.float() / 255),
        )

    def _text(self, batch: CachedBatch, evaluation: bool, allocate: AllocateTensor | None = None) -> tuple[Tensor, ...]:
        real = self.model.text_tokens == "real"
        texts = unpad_text({name: batch[name] for name in (_TEXT + _LENGTHS if real else _TEXT)})
        if self.model.enable_uncond_text_dropout and not evaluation:
            probability = self.model.uncond_text_dropout_prob
            drops = [draw_drops(self.seed, *occurrence, probability) for occurrence in _occurrences(batch)]
            texts = drop_text(texts, drops, self.empty_text, real)
        prompt, pooled, lengths = join_text(texts, allocate)
        return (prompt, pooled, lengths) if real else (prompt, pooled)

    def _normals(self, batch: CachedBatch, purpose: str, shape: tuple[int, ...]) -> Tensor:
        occurrences = _occurrences(batch, fixed=purpose.startswith("eval"))
        values = np.empty((len(occurrences), *shape), dtype=np.float32)
        for at, occurrence in enumerate(occurrences):
            stream(self.seed, purpose, *occurrence).standard_normal(dtype=np.float32, out=values[at])
        return torch.from_numpy(values)

    def _times(self, batch: CachedBatch, shape: torch.Size, quantile: float | None) -> Tensor:
        quantiles = [
            open_interval(stream(self.seed, "timestep", *occurrence).random()) if quantile is None else quantile
            for occurrence in _occurrences(batch)
        ]
        tokens = (shape[-1] // 2) * (shape[-2] // 2)
        model = self.model
        t = times_from_quantiles(
            quantiles, tokens, model.timestep_sample_method, model.sigmoid_scale, model.shift, model.flux_shift
        )
        return torch.tensor(t, dtype=torch.float32)


def _occurrences(batch: CachedBatch, fixed: bool = False) -> list[tuple[int, int, int]]:
    """Return (epoch, repeat, sample id) of each sample; with ``fixed`` epoch and repeat are 0, as evaluations need."""
    ids = batch["sample_id"].tolist()
    if fixed:
        return [(0, 0, sample_id) for sample_id in ids]
    return list(zip(batch["epoch"].tolist(), batch["repeat"].tolist(), ids, strict=True))


class LightSD3Pipeline:
    """SD3 for the training stage: a denoiser in float32, the preparation of its inputs, and saving.

    ``start`` names the weights to start from; by default those of ``model``.
    """

    name = "sd3"

    def __init__(
        self, model: ModelConfig, seed: int, empty_text: CaptionFeatures | None, start: WeightsStart | None = None
    ) -> None:
        self.model = model
        self.transformer = starting_transformer(start or where_weights_start(model), seed)
        uncond = empty_text if model.uncond_text == "empty" else None
        self.preparer = InputPreparer(seed, model, LatentScale.of_folder(model.diffusers_path), uncond)

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> PreparedBatch:
        """See `InputPreparer.prepare_inputs`."""
        return self.preparer.prepare_inputs(batch, timestep_quantile)

    def save_model(self, folder: Path, state_dict: Mapping[str, Tensor]) -> Path:
        """Write a complete, verified diffusers folder with all weights and buffers of the denoiser, in `model.dtype`.

        A run saves in its `save_dtype`: see `Saver`.
        """
        spec = model_spec(self.model, model_config(self.transformer))
        return write_folder(Path(folder), state_dict, spec)


def split_batch(prepared: PreparedBatch, pieces: int) -> list[PreparedBatch]:
    """Split a prepared batch into ``pieces`` equal micro-batches; real text is cut to each one's longest sample."""
    features, (target, mask) = prepared
    assert len(target) % pieces == 0, (len(target), pieces)
    parts = [_shortened(part) for part in zip(*(tensor.chunk(pieces) for tensor in features), strict=True)]
    masks = [None] * pieces if mask is None else mask.chunk(pieces)
    return list(zip(parts, zip(target.chunk(pieces), masks, strict=True), strict=True))


def _shortened(features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(features) == 4:
        return features
    noisy, times, prompt, pooled, lengths = features
    return noisy, times, prompt[:, : int(lengths.max())], pooled, lengths


def starting_transformer(start: WeightsStart, seed: int) -> SD3Transformer2DModel:
    """Return the denoiser before the first step, in float32 (law 4)."""
    if start.file is not None:
        config, state = transformer_from_single_file(start.file)
        return transformer_from_state(config, {name: tensor.float() for name, tensor in state.items()})
    if start.folder is None:
        return new_transformer(start.size.transformer_config(), seed)
    options = {"dtype": torch.float32, "output_loading_info": True, **LOCAL_WEIGHTS}
    transformer, loading = SD3Transformer2DModel.from_pretrained(start.folder, **options)
    mismatches = [*loading["missing_keys"], *loading["unexpected_keys"]]
    if mismatches:  # diffusers only warns, and starts from random weights where some are missing
        raise UserError(
            f"the weights in {start.folder} do not match its config.json: {mismatches[0]}; download or export it again"
        )
    return transformer
