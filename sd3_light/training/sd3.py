"""What training asks of SD3: inputs from cached features, the denoiser and where it starts, saving."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import ModelConfig, UserError
from sd3_light.encoders.text import Allocate, TextFeatures, join_text, unpad_text
from sd3_light.encoders.vae import LatentScale, draw_latent
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.single_file import transformer_from_single_file
from sd3_light.flow.conditioning import draw_drops, drop_text
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.flow.timesteps import times_from_quantiles
from sd3_light.model.random_weights import new_transformer
from sd3_light.model.start import where_weights_start
from sd3_light.randomness import stream
from sd3_light.training.saver import model_config, model_spec

Batch = Mapping[str, Any]
Prepared = tuple[tuple[Tensor, ...], tuple[Tensor, Tensor | None]]
_TEXT = ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled")
_LENGTHS = ("clip_l.length", "clip_g.length", "t5.length")


@dataclass(frozen=True)
class InputPreparer:
    """Cached features -> (features, label), every draw each sample's own (law 1). Light, so that workers can carry it.

    ``empty_text`` are the features of the empty caption, or None where a fully dropped sample carries zeros.
    """

    seed: int
    model: ModelConfig
    scale: LatentScale
    empty_text: TextFeatures | None

    def prepare_inputs(self, batch: Batch, timestep_quantile: float | None = None) -> Prepared:
        """((noisy_latents, 1000 t, prompt_embeds, pooled_prompt_embeds), (target, mask)); with real text tokens the
        features end with ``lengths``, how many of a sample's first rows of prompt_embeds are its own.

        With ``timestep_quantile`` the batch is one of validation: that quantile of t for all, noise that depends on the
        sample alone, the posterior's mean and no dropout.
        """
        return self._prepared(batch, timestep_quantile, None)

    def prepare_into(self, batch: Batch, empty: Allocate, timestep_quantile: float | None = None) -> Prepared:
        """As `prepare_inputs`; the prompt, most of the bytes, lies in what ``empty`` gives."""
        return self._prepared(batch, timestep_quantile, empty)

    def _prepared(self, batch: Batch, timestep_quantile: float | None, empty: Allocate | None) -> Prepared:
        evaluation = timestep_quantile is not None
        moments = batch["moments"]
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        noise = self._normals(batch, "eval-noise" if evaluation else "noise", shape)
        posterior = None if evaluation else self._normals(batch, "posterior", shape)
        clean = self.scale.normalise(draw_latent(moments, posterior))
        t = self._times(batch, clean.shape, timestep_quantile)
        mask = batch.get("mask")
        return (
            (interpolate(clean, noise, t), 1000 * t, *self._text(batch, evaluation, empty)),
            (velocity(clean, noise), None if mask is None else mask.float() / 255),
        )

    def _text(self, batch: Batch, evaluation: bool, empty: Allocate | None = None) -> tuple[Tensor, ...]:
        real = self.model.text_tokens == "real"
        texts = unpad_text({name: batch[name] for name in (_TEXT + _LENGTHS if real else _TEXT)})
        if self.model.enable_uncond_text_dropout and not evaluation:
            texts = drop_text(texts, self._drops(batch), self.empty_text, real)
        prompt, pooled, lengths = join_text(texts, empty)
        return (prompt, pooled, lengths) if real else (prompt, pooled)

    def _normals(self, batch: Batch, purpose: str, shape: tuple[int, ...]) -> Tensor:
        occurrences = _occurrences(batch, fixed=purpose.startswith("eval"))
        values = np.empty((len(occurrences), *shape), dtype=np.float32)
        for at, occurrence in enumerate(occurrences):
            stream(self.seed, purpose, *occurrence).standard_normal(dtype=np.float32, out=values[at])
        return torch.from_numpy(values)

    def _times(self, batch: Batch, shape: torch.Size, quantile: float | None) -> Tensor:
        occurrences = _occurrences(batch)
        quantiles = [
            _open_interval(stream(self.seed, "timestep", *occurrence).random()) if quantile is None else quantile
            for occurrence in occurrences
        ]
        tokens = (shape[-1] // 2) * (shape[-2] // 2)
        model = self.model
        drawn = times_from_quantiles(
            quantiles, tokens, model.timestep_sample_method, model.sigmoid_scale, model.shift, model.flux_shift
        )
        return torch.tensor(drawn, dtype=torch.float32)

    def _drops(self, batch: Batch) -> list[tuple[bool, ...]]:
        probability = self.model.uncond_text_dropout_prob
        return [draw_drops(self.seed, *occurrence, probability) for occurrence in _occurrences(batch)]


def _open_interval(u: float) -> float:
    return min(max(u, 1e-12), 1 - 1e-12)


def _occurrences(batch: Batch, fixed: bool = False) -> list[tuple[int, int, int]]:
    """(epoch, repeat, sample id) of each sample; epoch and repeat are 0 where every evaluation must see the same."""
    ids = batch["sample_id"].tolist()
    if fixed:
        return [(0, 0, sample_id) for sample_id in ids]
    return list(zip(batch["epoch"].tolist(), batch["repeat"].tolist(), ids, strict=True))


class LightSD3Pipeline:
    """SD3 as the training stage sees it: a denoiser in float32, the preparation of its inputs, and how it is saved."""

    name = "sd3"

    def __init__(self, model: ModelConfig, seed: int, empty_text: TextFeatures | None) -> None:
        self.model = model
        self.transformer = starting_transformer(model, seed)
        uncond = empty_text if model.uncond_text == "empty" else None
        self.preparer = InputPreparer(seed, model, LatentScale.of_folder(model.diffusers_path), uncond)

    def prepare_inputs(self, batch: Batch, timestep_quantile: float | None = None) -> Prepared:
        """See `InputPreparer.prepare_inputs`."""
        return self.preparer.prepare_inputs(batch, timestep_quantile)

    def save_model(self, folder: Path, state_dict: Mapping[str, Tensor]) -> Path:
        """Write a complete, proven diffusers folder with these weights and buffers of the denoiser, all of them, in
        `model.dtype`. (A run saves in its `save_dtype`: see `Saver`.)"""
        spec = model_spec(self.model, model_config(self.transformer))
        return write_folder(Path(folder), state_dict, spec)


def split_batch(prepared: Prepared, pieces: int) -> list[Prepared]:
    """A prepared batch as ``pieces`` equal micro-batches; real text ends where the longest of a micro-batch does."""
    features, (target, mask) = prepared
    assert len(target) % pieces == 0, (len(target), pieces)
    cut = [_shortened(part) for part in zip(*(tensor.chunk(pieces) for tensor in features), strict=True)]
    masks = [None] * pieces if mask is None else mask.chunk(pieces)
    return list(zip(cut, zip(target.chunk(pieces), masks, strict=True), strict=True))


def _shortened(features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(features) == 4:
        return features
    noisy, times, prompt, pooled, lengths = features
    return noisy, times, prompt[:, : int(lengths.max())], pooled, lengths


def starting_transformer(model: ModelConfig, seed: int) -> SD3Transformer2DModel:
    """The denoiser where training starts, in float32 (law 4)."""
    start = where_weights_start(model)
    if start.file is not None:
        return _from_single_file(start.file)
    if start.folder is None:
        return new_transformer(start.size.transformer_config(), seed)
    given = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
    transformer, told = SD3Transformer2DModel.from_pretrained(start.folder, **given)
    gaps = [*told["missing_keys"], *told["unexpected_keys"]]
    if gaps:  # diffusers only warns, and starts from random weights where some are missing
        raise UserError(f"{start.folder} is not what its config.json promises: {gaps[0]}; fetch or write it anew")
    return transformer


def _from_single_file(path: Path) -> SD3Transformer2DModel:
    config, state = transformer_from_single_file(path)
    with torch.device("meta"):
        transformer = SD3Transformer2DModel(**config)
    wide = {name: tensor.float() for name, tensor in state.items()}
    transformer.load_state_dict(wide, strict=True, assign=True)
    return transformer.eval()
