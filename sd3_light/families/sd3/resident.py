"""Micro-batches of a cache in memory: indices on the host, tensors gathered where the cache is.

A batch of indices has rows of tables instead of their content: ``image_rows`` [B], ``clip_l_rows`` and so on [B, T],
``pooled_rows`` [2, B] of both pooled vectors, and ``mask_rows`` [2, B], if there are masks: the samples' numbers and
whether their images are mirrored. Absent tokens are rows of zeros. ``bucket`` is a number of the host. The rest is as
in other batches.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.data.order import Picks
from sd3_light.data.resident import ResidentBucket, ResidentCache, ResidentText, index_rows, select_masks, select_rows
from sd3_light.data.slots import AllocateTensor
from sd3_light.families.sd3.prepare import InputPreparer
from sd3_light.families.sd3.text_dropout import ENCODERS, draw_drops
from sd3_light.randomness import choices, occurrence_words

Indices = NDArray[np.int64]
_T5 = ENCODERS.index("t5")
_POOLED = ("clip_l", "clip_g")


@dataclass(frozen=True)
class ResidentInputs:
    """Prepares the micro-batches of an `InputPreparer` from a cache in memory: the same numbers.

    ``seed`` is that of the order: captions and flips are drawn from it, as by `CachedDataset.read`.
    """

    preparer: InputPreparer
    cache: ResidentCache
    seed: int

    def indices(self, picks: Picks) -> Batch:
        """Return where a batch's tensors are; caption, flip, time and text dropout are drawn per sample (law 1)."""
        model = self.preparer.model
        bucket = self.cache.buckets[picks.bucket]
        sample = bucket.first_sample[picks.segment] + picks.index
        occurrences = occurrence_words(picks.epoch, picks.repeat, bucket.ids[sample])
        first_caption, first_image = bucket.first_caption[sample], bucket.first_image[sample]
        counts = bucket.first_caption[sample + 1] - first_caption
        caption = self.cache.pick_captions(picks, self.seed, bucket.ids[sample], counts)
        variant = choices(self.seed, "flip", occurrences, bucket.first_image[sample + 1] - first_image)
        drops = np.zeros((len(sample), len(ENCODERS)), dtype=bool)
        if model.enable_uncond_text_dropout:
            joint = model.uncond_text_dropout == "joint"
            drops = np.array(draw_drops(self.preparer.seed, occurrences, model.uncond_text_dropout_prob, joint))
        distinct = bucket.captions[first_caption + caption]
        rows, lengths = self._text_rows(bucket.text, distinct, drops)
        shape = bucket.images["moments"].shape
        values = {"image_rows": index_rows(first_image + variant), "t": self.preparer.times(occurrences, shape), **rows}
        values |= self.preparer.image_draws(occurrences, shape)
        values["words"] = torch.from_numpy(occurrences).view(torch.int32)
        if bucket.masked[sample].any():
            values["mask_rows"] = index_rows(np.stack([sample, variant]))
        host = {"bucket": torch.tensor(picks.bucket), **self.preparer.host_values(lengths)}
        return Batch(len(sample), values, host)

    def _text_rows(
        self, text: ResidentText, distinct: Indices, drops: NDArray[np.bool_]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the rows of tokens and pooled vectors, and the texts' lengths, as `drop_text` and `join_text` do."""
        real, zeroed = self.preparer.model.text_tokens == "real", drops
        dropped_all: NDArray[np.bool_] = np.logical_and.reduce(drops, axis=1)
        if self.preparer.empty_text is not None:
            distinct, zeroed = np.where(dropped_all, text.empty, distinct), drops & ~dropped_all[:, None]
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
        return rows, torch.from_numpy(lengths)

    def gather(self, batch: Batch, empty: AllocateTensor | None = None) -> Batch:
        """Return a batch of `InputPreparer.prepare_clean` for indices; ``empty`` allocates moments and prompt."""
        bucket: ResidentBucket = self.cache.buckets[int(batch.host["bucket"])]
        text = bucket.text
        prompt, first = select_rows(text.tokens["t5"], batch["t5_rows"], empty), 0
        for name in ("clip_l", "clip_g"):
            rows = batch[f"{name}_rows"]
            tokens = select_rows(text.tokens[name], rows)
            # where one has tokens the other is zero, so the sum is a copy
            prompt[:, : rows.shape[1], first : first + tokens.shape[-1]] += tokens
            first += tokens.shape[-1]
        each = zip(_POOLED, batch["pooled_rows"], strict=True)
        pooled = [select_rows(text.fixed[f"{name}.pooled"], rows) for name, rows in each]
        values = {"moments": select_rows(bucket.images["moments"], batch["image_rows"], empty), "t": batch["t"]}
        values |= {"prompt": prompt, "pooled": torch.cat(pooled, dim=-1)}
        values |= batch.select(("kept", "corners", "words")).values
        values |= {name: select_rows(bucket.images[name], batch["image_rows"]) for name in self.preparer.columns}
        mask_rows = batch.get("mask_rows")
        if mask_rows is not None:
            values["mask"] = select_masks(bucket, *mask_rows)
        host = {name: counts for name, counts in batch.host.items() if name != "bucket"}
        return Batch(batch.size, values, host)
