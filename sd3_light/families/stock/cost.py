"""What training a family's stock denoiser costs, counted with the family's own batches and calls."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sd3_light.core.batch import Batch
from sd3_light.core.columns import Column
from sd3_light.core.cost import TextTokens, Tokens
from sd3_light.families.counted_cost import CountedCost

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily

TEXT = "text"
"""The column of captions whose rows are tokens of the denoiser."""


class StockCost(CountedCost):
    """See `Cost`. ``prepared`` are a batch's columns; an image token covers ``side`` x ``side`` pixels."""

    def __init__(self, family: "StockFamily", denoiser: nn.Module, prepared: Sequence[Column], side: int) -> None:
        self._family = family
        self._side = side
        self._prepared = [column for column in prepared if column.name not in ("target", "mask")]
        text = next(column for column in self._prepared if column.name == TEXT)
        kind = "at most, as captions are not padded" if text.ragged and not family.pads_text else "padded"
        self._text = TextTokens(text.shape[0], not text.ragged or family.pads_text, f"{text.shape[0]}, {kind}")
        super().__init__(denoiser, family.title)

    @property
    def text(self) -> TextTokens:
        """See `Cost.text`."""
        return self._text

    def image_tokens(self, width: int, height: int) -> int:
        """See `Cost.image_tokens`."""
        return (width // self._side) * (height // self._side)

    def batch_tokens(self, batch: Batch) -> Mapping[Tokens, int]:
        """See `Cost.batch_tokens`."""
        height, width = batch["noisy"].shape[-2:]
        image = (height // self._family.patch) * (width // self._family.patch)
        lengths = batch.lengths(TEXT)
        counts = {batch[TEXT].shape[1]: batch.size} if lengths is None else Counter(lengths.tolist())
        return {Tokens(image, text): count for text, count in counts.items()}

    def batch(self, rows: int, columns: int, text: int) -> Batch:
        """See `CountedCost.batch`."""
        sides = (rows * self._family.patch, columns * self._family.patch)
        values = {"t": torch.zeros(1)}
        for column in self._prepared:
            shape = (text, *column.shape[1:]) if column.name == TEXT else column.shape
            shape = (*column.shape[:-2], *sides) if column.name == "noisy" else shape
            values[column.name] = torch.zeros(1, *shape, dtype=getattr(torch, column.dtype))
        return Batch(1, values)

    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        """See `CountedCost.denoise`."""
        return self._family.denoise(denoiser, batch, 1.0)
