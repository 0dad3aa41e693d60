"""Batches of a stock denoiser: the cached columns of a caption as they are, dropped together or not at all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.core.training import ResidentPreparer
from sd3_light.data.order import Picks
from sd3_light.data.resident import ResidentBucket, ResidentCache, ResidentText
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch
from sd3_light.randomness import choices, first_words, occurrence_words, uniforms
from sd3_light.training.prepare import Conditioning, FlowPreparer, Occurrences

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class StockPreparer(FlowPreparer):
    """Values have the names of the columns; ``NAME.length`` are the rows of each sample of a ragged one.

    ``ragged`` and ``fixed`` are the columns of captions. A dropped sample gets ``empty_text``, the unconditional text.
    """

    ragged: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    empty_text: Mapping[str, Tensor] = field(default_factory=dict)

    def condition(
        self, rows: CachedBatch, occurrences: Occurrences, evaluation: bool, allocate: AllocateTensor | None
    ) -> Conditioning:
        """See `FlowPreparer.condition`."""
        dropped = np.zeros(len(occurrences), dtype=bool) if evaluation else self.drops(occurrences)
        values: dict[str, Tensor] = {}
        host: dict[str, Tensor] = {}
        for name in self.ragged:
            texts = [text[:length] for text, length in zip(rows[name], rows[f"{name}.length"].tolist(), strict=True)]
            texts = [self.empty_text[name] if drop else text for text, drop in zip(texts, dropped, strict=True)]
            host[f"{name}.length"] = torch.tensor([len(text) for text in texts])
            values[name] = _padded(texts, allocate)
        for name in self.fixed:
            kept = rows[name].clone() if dropped.any() else rows[name]
            for number in np.flatnonzero(dropped).tolist():
                kept[number] = self.empty_text[name]
            values[name] = kept
        return Conditioning(values, host)

    def drops(self, occurrences: Occurrences) -> NDArray[np.bool_]:
        """Return which samples lose their text; one draw per occurrence of a sample (law 1)."""
        if not self.model.enable_uncond_text_dropout:
            return np.zeros(len(occurrences), dtype=bool)
        draws = uniforms(first_words(self.seed, "text-dropout", occurrences)[0])
        dropped: NDArray[np.bool_] = draws < self.model.uncond_text_dropout_prob
        return dropped

    def resident(self, cache: ResidentCache, seed: int) -> ResidentPreparer:
        """See `FlowPreparer.resident`."""
        return ResidentColumns(self, cache, seed)


def _padded(texts: list[Tensor], allocate: AllocateTensor | None) -> Tensor:
    """Return texts [B, T, ...], padded with zeros to the longest."""
    shape = (len(texts), max(map(len, texts)), *texts[0].shape[1:])
    padded = torch.empty(shape, dtype=texts[0].dtype) if allocate is None else allocate(shape, texts[0].dtype)
    for target, text in zip(padded, texts, strict=True):
        target[: len(text)] = text
        target[len(text) :] = 0
    return padded


@dataclass(frozen=True)
class ResidentColumns:
    """The batches of a `StockPreparer` from a cache in memory.

    A batch of indices has ``image_rows`` [B], ``NAME.rows`` [B, T] or [B] of each column of captions, and
    ``mask_rows`` [2, B], if there are masks: the samples' numbers and whether their images are mirrored.
    """

    preparer: StockPreparer
    cache: ResidentCache
    seed: int

    def indices(self, picks: Picks) -> Batch:
        """See `ResidentPreparer.indices`."""
        bucket = self.cache.buckets[picks.bucket]
        sample = bucket.first_sample[picks.segment] + picks.index
        ids = bucket.ids[sample]
        occurrences = occurrence_words(picks.epoch, picks.repeat, ids)
        first_caption = bucket.first_caption[sample]
        first_image = bucket.first_image[sample]
        caption = self.cache.pick_captions(picks, self.seed, ids, bucket.first_caption[sample + 1] - first_caption)
        variant = choices(self.seed, "flip", occurrences, bucket.first_image[sample + 1] - first_image)
        distinct = bucket.captions[first_caption + caption]
        distinct = np.where(self.preparer.drops(occurrences), bucket.text.empty, distinct)
        shape = bucket.images["moments"].shape
        values = {"image_rows": _rows(first_image + variant), "t": self.preparer.times(occurrences, shape)}
        host = {"bucket": torch.tensor(picks.bucket)}
        for name in self.preparer.ragged:
            values[f"{name}.rows"], host[f"{name}.length"] = _ragged_rows(bucket.text, name, distinct)
        if self.preparer.fixed:
            values["caption_rows"] = _rows(distinct)
        values["words"] = torch.from_numpy(occurrences).view(torch.int32)
        if bucket.masked[sample].any():
            values["mask_rows"] = _rows(np.stack([sample, variant]))
        return Batch(len(sample), values, host)

    def gather(self, batch: Batch, empty: AllocateTensor | None = None) -> Batch:
        """See `ResidentPreparer.gather`."""
        bucket = self.cache.buckets[int(batch.host["bucket"])]
        values = {"moments": _select(bucket.images["moments"], batch["image_rows"], empty), "t": batch["t"]}
        for name in self.preparer.ragged:
            values[name] = _select(bucket.text.tokens[name], batch[f"{name}.rows"], empty)
        for name in self.preparer.fixed:
            values[name] = _select(bucket.text.fixed[name], batch["caption_rows"])
        values["words"] = batch["words"]
        mask_rows = batch.get("mask_rows")
        if mask_rows is not None:
            values["mask"] = _masks(bucket, *mask_rows)
        return Batch(batch.size, values, {name: counts for name, counts in batch.host.items() if name != "bucket"})


def _ragged_rows(text: ResidentText, name: str, distinct: Indices) -> tuple[Tensor, Tensor]:
    """Return the rows of a ragged column [B, T], those of padding zero, and the lengths."""
    first = text.starts[name][distinct]
    lengths = text.starts[name][distinct + 1] - first
    position = np.arange(int(lengths.max()))
    rows = np.where(position < lengths[:, None], first[:, None] + position, text.zero_row(name))
    return _rows(rows), torch.from_numpy(lengths)


def _masks(bucket: ResidentBucket, samples: Tensor, mirrored: Tensor) -> Tensor:
    assert bucket.masks is not None
    masks = _select(bucket.masks, samples)
    return torch.where(mirrored.bool()[:, None, None], masks.flip(-1), masks)


def _rows(rows: Indices) -> Tensor:
    return torch.from_numpy(rows.astype(np.int32))


def _select(table: Tensor, rows: Tensor, empty: AllocateTensor | None = None) -> Tensor:
    """Return the rows of a table, for an index of any shape."""
    shape = (*rows.shape, *table.shape[1:])
    if empty is None:
        return table.index_select(0, rows.flatten()).view(shape)
    out = empty(shape, table.dtype)
    torch.index_select(table, 0, rows.flatten(), out=out.view(rows.numel(), *table.shape[1:]))
    return out
