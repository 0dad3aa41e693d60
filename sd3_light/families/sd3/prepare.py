"""SD3 in training: model inputs from cached features, the denoiser before the first step, saving."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.registry import family_of, starting_weights
from sd3_light.core.start import WeightsStart
from sd3_light.data.prepare import Conditioning, FlowPreparer, Occurrences, reference_columns, token_grid
from sd3_light.data.resident import ResidentCache, ResidentText, index_rows, select_rows
from sd3_light.data.shards import CaptionFeatures
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch
from sd3_light.encoding.vae import LatentScale
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.of_run import model_config, model_spec
from sd3_light.families.resident import Indices, ResidentBatches
from sd3_light.families.sd3.draws import ENCODERS, draw_corners, draw_drops, draw_kept, drop_text
from sd3_light.families.sd3.text import join_text, unpad_text
from sd3_light.model.base_values import shift_line

_TEXT = ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled")
_LENGTHS = ("clip_l.length", "clip_g.length", "t5.length")
_POOLED = ("clip_l", "clip_g")
_T5 = ENCODERS.index("t5")

Pair = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""(features, label) of a batch, as training loops outside this package take them."""


@dataclass(frozen=True)
class InputPreparer(FlowPreparer):
    """SD3's batches: prompt and pooled are the joined texts of three encoders.

    With real text tokens ``prompt.length`` says how many first rows of prompt are a sample's own. ``empty_text`` are
    the features of the empty caption, or None where a fully dropped sample carries zeros. ``num_positions`` is the side
    of the denoiser's position table.
    """

    empty_text: CaptionFeatures | None = None
    num_positions: int = 0

    @staticmethod
    def of(model: ModelConfig, seed: int, empty_text: CaptionFeatures | None, num_positions: int) -> "InputPreparer":
        """Return the preparer of a [model] table."""
        used = empty_text if model.uncond_text == "empty" else None
        scale = LatentScale.of_folder(model.diffusers_path)
        references = reference_columns(model.references)
        return InputPreparer(seed, model, scale, used, num_positions, line=shift_line(model), references=references)

    def condition(
        self, rows: CachedBatch, occurrences: Occurrences, evaluation: bool, allocate: AllocateTensor | None
    ) -> Conditioning:
        """See `FlowPreparer.condition`."""
        real = self.model.text_tokens == "real"
        texts = unpad_text({name: rows[name] for name in (_TEXT + _LENGTHS if real else _TEXT)})
        drops = None if evaluation else self.drops(occurrences)
        if drops is not None:
            texts = drop_text(texts, drops, self.empty_text, real)
        prompt, pooled, lengths = join_text(texts, allocate)
        return Conditioning({"prompt": prompt, "pooled": pooled}, self.host_values(lengths))

    def drops(self, occurrences: Occurrences) -> list[tuple[bool, ...]] | None:
        """Return which encoders are dropped for each sample; None without text dropout."""
        if not self.model.enable_uncond_text_dropout:
            return None
        joint = self.model.uncond_text_dropout == "joint"
        return draw_drops(self.seed, occurrences, self.model.uncond_text_dropout_prob, joint)

    def host_values(self, lengths: Tensor) -> dict[str, Tensor]:
        """Return a batch's counts: the lengths of real text."""
        return {"prompt.length": lengths} if self.model.text_tokens == "real" else {}

    def image_draws(self, occurrences: Occurrences, shape: torch.Size) -> dict[str, Tensor]:
        """Return what the config draws per image: ``kept`` tokens of a route, ``corners`` of position crops."""
        routing = self.model.routing
        side = self.model.position_crop_side
        draws: dict[str, NDArray[np.int64]] = {}
        if routing is not None:
            draws["kept"] = draw_kept(self.seed, occurrences, math.prod(token_grid(shape)), routing.share)
        if side is not None:
            draws["corners"] = draw_corners(self.seed, occurrences, token_grid(shape), side, self.num_positions)
        return {name: torch.from_numpy(draw.astype(np.int32)) for name, draw in draws.items()}

    def resident(self, cache: ResidentCache, seed: int) -> "ResidentInputs":
        """See `FlowPreparer.resident`."""
        return ResidentInputs(self, cache, seed)


@dataclass(frozen=True)
class ResidentInputs(ResidentBatches):
    """The batches of an `InputPreparer` from a cache in memory.

    A batch of indices has ``clip_l_rows`` and so on [B, T], and ``pooled_rows`` [2, B] of both pooled vectors. Absent
    tokens are rows of zeros.
    """

    preparer: InputPreparer

    def text_rows(self, text: ResidentText, distinct: Indices, occurrences: Occurrences) -> Conditioning:
        """See `ResidentBatches.text_rows`: as `drop_text` and `join_text` do."""
        drops = np.array(self.preparer.drops(occurrences) or np.zeros((len(occurrences), len(ENCODERS)), dtype=bool))
        real = self.preparer.model.text_tokens == "real"
        zeroed = drops
        dropped_all: NDArray[np.bool_] = np.logical_and.reduce(drops, axis=1)
        if self.preparer.empty_text is not None:
            distinct = np.where(dropped_all, text.empty, distinct)
            zeroed = drops & ~dropped_all[:, None]
        counts = [text.starts[name][distinct + 1] - text.starts[name][distinct] for name in ENCODERS]
        if real:
            counts = [
                np.where(zeroed[:, at], 0 if at == _T5 else np.where(dropped_all, 1, count), count)
                for at, count in enumerate(counts)
            ]
        num_clip = np.maximum(counts[0], counts[1])
        lengths = num_clip + counts[_T5]
        assert lengths.min() > 0, "every sample needs at least one text token"
        rows = {}
        for at, name in enumerate(ENCODERS):
            first = num_clip if at == _T5 else np.zeros_like(num_clip)
            longest = int((lengths if at == _T5 else num_clip).max())
            position = np.arange(longest) - first[:, None]
            is_token = (position >= 0) & (position < counts[at][:, None]) & ~zeroed[:, at, None]
            start = text.starts[name][distinct][:, None]
            rows[f"{name}_rows"] = index_rows(np.where(is_token, start + position, text.zero_row(name)))
        pooled = [np.where(zeroed[:, ENCODERS.index(name)], text.empty + 1, distinct) for name in _POOLED]
        rows["pooled_rows"] = index_rows(np.stack(pooled))
        return Conditioning(rows, self.preparer.host_values(torch.from_numpy(lengths)))

    def gather_texts(self, text: ResidentText, batch: Batch, empty: AllocateTensor | None) -> dict[str, Tensor]:
        """See `ResidentBatches.gather_texts`."""
        prompt = select_rows(text.tokens["t5"], batch["t5_rows"], empty)
        first = 0
        for name in _POOLED:
            rows = batch[f"{name}_rows"]
            tokens = select_rows(text.tokens[name], rows)
            # where one has tokens the other is zero, so the sum is a copy
            prompt[:, : rows.shape[1], first : first + tokens.shape[-1]] += tokens
            first += tokens.shape[-1]
        each = zip(_POOLED, batch["pooled_rows"], strict=True)
        pooled = [select_rows(text.fixed[f"{name}.pooled"], rows) for name, rows in each]
        return {"prompt": prompt, "pooled": torch.cat(pooled, dim=-1)}


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
    ) -> None:
        self.model = model
        denoiser = family_of(model).weights.load(start or starting_weights(model), seed)
        assert isinstance(denoiser, SD3Transformer2DModel)
        self.transformer = denoiser
        self.preparer = InputPreparer.of(model, seed, empty_text, denoiser.config.pos_embed_max_size)

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
