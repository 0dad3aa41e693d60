"""Batches of a stock denoiser: the cached columns of a caption as they are, dropped together or not at all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.core.batch import LENGTH, Batch
from sd3_light.data.batch import pad_rows
from sd3_light.data.prepare import Conditioning, FlowPreparer, Occurrences
from sd3_light.data.resident import ResidentCache, ResidentText, index_rows, select_rows
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch
from sd3_light.families.resident import Indices, ResidentBatches
from sd3_light.randomness import first_words, uniforms


@dataclass(frozen=True)
class StockPreparer(FlowPreparer):
    """Values have the names of the columns; ``NAME.length`` are the rows of each sample of a ragged one.

    ``ragged`` and ``fixed`` are the columns of captions. A ragged one is padded with zeros to the batch's longest, or
    to exactly as many rows as it names; it then has no lengths. A dropped sample gets ``empty_text``.
    """

    ragged: Mapping[str, int | None] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    empty_text: Mapping[str, Tensor] = field(default_factory=dict)

    def condition(
        self, rows: CachedBatch, occurrences: Occurrences, evaluation: bool, allocate: AllocateTensor | None
    ) -> Conditioning:
        """See `FlowPreparer.condition`."""
        dropped = np.zeros(len(occurrences), dtype=bool) if evaluation else self.drops(occurrences)
        values: dict[str, Tensor] = {}
        host: dict[str, Tensor] = {}
        for name, exact in self.ragged.items():
            texts = [text[:length] for text, length in zip(rows[name], rows[name + LENGTH].tolist(), strict=True)]
            texts = [self.empty_text[name] if drop else text for text, drop in zip(texts, dropped, strict=True)]
            lengths = [len(text) for text in texts]
            values[name] = pad_rows(texts, exact or max(lengths), allocate)
            if exact is None:
                host[name + LENGTH] = torch.tensor(lengths)
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

    def resident(self, cache: ResidentCache, seed: int) -> "ResidentColumns":
        """See `FlowPreparer.resident`."""
        return ResidentColumns(self, cache, seed)


@dataclass(frozen=True)
class ResidentColumns(ResidentBatches):
    """The batches of a `StockPreparer` from a cache in memory.

    A batch of indices has ``NAME.rows`` [B, T] of each ragged column of captions, ``caption_rows`` [B] of the others.
    """

    preparer: StockPreparer

    def text_rows(self, text: ResidentText, distinct: Indices, occurrences: Occurrences) -> Conditioning:
        """See `ResidentBatches.text_rows`."""
        distinct = np.where(self.preparer.drops(occurrences), text.empty, distinct)
        values: dict[str, Tensor] = {}
        host: dict[str, Tensor] = {}
        for name, exact in self.preparer.ragged.items():
            values[f"{name}.rows"], lengths = _ragged_rows(text, name, distinct, exact)
            if exact is None:
                host[name + LENGTH] = lengths
        if self.preparer.fixed:
            values["caption_rows"] = index_rows(distinct)
        return Conditioning(values, host)

    def gather_texts(self, text: ResidentText, batch: Batch, empty: AllocateTensor | None) -> dict[str, Tensor]:
        """See `ResidentBatches.gather_texts`."""
        ragged = {name: select_rows(text.tokens[name], batch[f"{name}.rows"], empty) for name in self.preparer.ragged}
        return ragged | {name: select_rows(text.fixed[name], batch["caption_rows"]) for name in self.preparer.fixed}


def _ragged_rows(text: ResidentText, name: str, distinct: Indices, exact: int | None) -> tuple[Tensor, Tensor]:
    """Return the rows of a ragged column [B, T], those of padding the row of zeros, and the lengths."""
    first = text.starts[name][distinct]
    lengths = text.starts[name][distinct + 1] - first
    position = np.arange(exact or int(lengths.max()))
    rows = np.where(position < lengths[:, None], first[:, None] + position, text.zero_row(name))
    return index_rows(rows), torch.from_numpy(lengths)
