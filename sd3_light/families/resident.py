"""Micro-batches of a cache in memory: indices on the host, tensors gathered where the cache is.

A batch of indices has rows of tables instead of their content: ``image_rows`` [B], those of the family's texts, and
``mask_rows`` [2, B], if there are masks: the samples' numbers and whether their images are mirrored. ``bucket`` is a
number of the host. The rest is as in other batches.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.data.order import Picks
from sd3_light.data.prepare import KEPT, Conditioning, FlowPreparer, Occurrences
from sd3_light.data.resident import ResidentCache, ResidentText, index_rows, select_masks, select_rows
from sd3_light.data.slots import AllocateTensor
from sd3_light.randomness import choices, occurrence_words

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ResidentBatches(ABC):
    """Prepares the micro-batches of a preparer from a cache in memory: the same numbers. A family adds its texts.

    ``seed`` is that of the order: captions and flips are drawn from it, as by `CachedDataset.read`.
    """

    preparer: FlowPreparer
    cache: ResidentCache
    seed: int

    @abstractmethod
    def text_rows(self, text: ResidentText, distinct: Indices, occurrences: Occurrences) -> Conditioning:
        """Return the rows of these distinct captions, with dropout, and the counts of the host."""

    @abstractmethod
    def gather_texts(self, text: ResidentText, batch: Batch, empty: AllocateTensor | None) -> dict[str, Tensor]:
        """Return the values of texts for a batch with `text_rows`."""

    def indices(self, picks: Picks) -> Batch:
        """See `ResidentPreparer.indices`."""
        bucket = self.cache.buckets[picks.bucket]
        sample = bucket.numbers(picks.segment, picks.index)
        ids = bucket.ids[sample]
        occurrences = occurrence_words(picks.epoch, picks.repeat, ids)
        first_caption = bucket.first_caption[sample]
        first_image = bucket.first_image[sample]
        caption = self.cache.pick_captions(picks, self.seed, ids, bucket.first_caption[sample + 1] - first_caption)
        variant = choices(self.seed, "flip", occurrences, bucket.first_image[sample + 1] - first_image)
        texts = self.text_rows(bucket.text, bucket.captions[first_caption + caption], occurrences)
        shape = bucket.images["moments"].shape
        values = {"image_rows": index_rows(first_image + variant), "t": self.preparer.times(occurrences, shape)}
        values |= {**texts.values, **self.preparer.image_draws(occurrences, shape)}
        values |= self.preparer.reference_draws(occurrences)
        values["words"] = torch.from_numpy(occurrences).view(torch.int32)
        if bucket.masked[sample].any():
            values["mask_rows"] = index_rows(np.stack([sample, variant]))
        return Batch(len(sample), values, {"bucket": torch.tensor(picks.bucket), **texts.host})

    def gather(self, batch: Batch, empty: AllocateTensor | None = None) -> Batch:
        """See `ResidentPreparer.gather`."""
        bucket = self.cache.buckets[int(batch.host["bucket"])]
        values = {"moments": select_rows(bucket.images["moments"], batch["image_rows"], empty), "t": batch["t"]}
        values |= self.gather_texts(bucket.text, batch, empty)
        values |= batch.select(("kept", "corners", KEPT)).values
        for names in (self.preparer.references, ("words",), self.preparer.columns):
            rows = {name: select_rows(bucket.images[name], batch["image_rows"]) for name in names if name != "words"}
            values |= rows or batch.select(names).values
        mask_rows = batch.get("mask_rows")
        if mask_rows is not None:
            values["mask"] = select_masks(bucket, *mask_rows)
        return Batch(batch.size, values, {name: counts for name, counts in batch.host.items() if name != "bucket"})
