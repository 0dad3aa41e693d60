"""The cost of training a stock denoiser of diffusers, without formulas: its passes are counted.

Bytes grow linearly with image and text tokens, and so do FLOPs, except those of attention: with its queries times its
keys, which grow linearly. Three small shapes determine them for all; buckets and captions then cost nothing.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sd3_light.check.counted_cost import DenoiserCost
from sd3_light.check.denoiser_count import Counts
from sd3_light.config import AdapterConfig
from sd3_light.core.batch import Batch
from sd3_light.core.columns import REFERENCE, Column
from sd3_light.core.cost import BlockBytes, TextTokens, Tokens
from sd3_light.families.stock.latents import LatentShape

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily

TEXT = "text"
"""The column of captions whose rows are tokens of the denoiser."""
_UNIT = 64  # tokens of the smallest shape; some denoisers pad to a multiple of 32
_GRIDS = {1: (8, 8), 2: (8, 16)}  # units of image tokens -> their rows and columns
_SHAPES = ((1, 1), (2, 1), (1, 2))  # image and text tokens, in units: they determine what grows linearly
_Kind = tuple[str, AdapterConfig | None]  # the dtype, and the adapter if only it is trained


class CountedCost(DenoiserCost):
    """A cost for all numbers of tokens. A family adds its batches, and how they run through its denoiser."""

    fixed_tokens = 0
    """Tokens of references that have the same size for all images."""

    def __init__(self, denoiser: nn.Module, title: str) -> None:
        super().__init__(denoiser, title)
        self._counts: dict[_Kind, tuple[Counts, ...]] = {}
        self._interpolated: dict[tuple[Tokens, _Kind], Counts] = {}

    @abstractmethod
    def batch(self, rows: int, columns: int, text: int) -> Batch:
        """Return what a denoiser gets for one sample of rows x columns image tokens, in the dtypes of a batch.

        The values of tensors do not matter.
        """

    @abstractmethod
    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        """Return the velocity of a batch, as in training."""

    def counts(self, tokens: Tokens, dtype: str, adapter: AdapterConfig | None = None) -> Counts:
        """See `DenoiserCost.counts`."""
        kind = (dtype, adapter)
        if (tokens, kind) not in self._interpolated:
            self._interpolated[tokens, kind] = self._at(tokens, self._counted(kind), kind)
        return self._interpolated[tokens, kind]

    def _at(self, tokens: Tokens, counted: Sequence[Counts], kind: _Kind) -> Counts:
        # what does not grow with tokens: matrices of an adapter's updates; of references, each sample has its own
        has_fixed = kind[1] is not None and not self.fixed_tokens
        at = partial(_on_plane, tokens)
        names = ("input_flops", "features", "target", "before", "after")
        numbers = {name: at([getattr(counts, name) for counts in counted]) for name in names}
        kinds = []
        for number in range(len(counted[0].blocks)):
            sizes = [astuple(counts.blocks[number]) for counts in counted]
            inputs, saved, selective, _ = map(at, zip(*sizes, strict=True))
            at_none = _on_plane(Tokens(0, 0), [counts.blocks[number].saved for counts in counted])
            fixed = max(0, at_none) if has_fixed else 0
            kinds.append(BlockBytes(inputs, saved - fixed, selective, fixed))
        more = self.fixed_tokens
        largest = zip(_SHAPES, [counts.tensor for counts in counted], strict=True)
        shares = [Fraction(tensor) / (_UNIT * sum(shape) + more) for shape, tensor in largest]
        tensor = max(shares) * (tokens.joint + more)
        flops = _forward_flops(tokens, counted)
        return Counts(forward_flops=flops, tensor=tensor, blocks=tuple(kinds), attention=(), **numbers)

    def _counted(self, kind: _Kind) -> tuple[Counts, ...]:
        """Return the counts of `_SHAPES`."""
        if kind not in self._counts:
            self._counts[kind] = tuple(self._count(shape, kind) for shape in _SHAPES)
        return self._counts[kind]

    def _count(self, shape: tuple[int, int], kind: _Kind) -> Counts:
        image, text = shape
        dtype, adapter = kind
        batch = self.batch(*_GRIDS[image], text * _UNIT)
        return self.reduced(adapter).count(self.denoise, batch, dtype)


def _is_seen(column: Column) -> bool:
    """Return whether a column is that of a reference's latents."""
    return column.name.startswith(REFERENCE)


def _on_plane(tokens: Tokens, values: Sequence[int]) -> int:
    """Return the linear function through the values at `_SHAPES`."""
    return round(_linear(tokens, values))


def _linear(tokens: Tokens, values: Sequence[int]) -> Fraction:
    one, two, text_two = values
    image = Fraction(tokens.image, _UNIT) - 1
    text = Fraction(tokens.text, _UNIT) - 1
    return one + image * (two - one) + text * (text_two - one)


def _forward_flops(tokens: Tokens, counted: Sequence[Counts]) -> int:
    """Return the FLOPs of a forward pass, by the counts of `_SHAPES`."""
    rest = [counts.forward_flops - sum(products.flops for products in counts.attention) for counts in counted]
    value = _linear(tokens, rest)
    for same in zip(*(counts.attention for counts in counted), strict=True):
        queries = _linear(tokens, [products.queries for products in same])
        keys = _linear(tokens, [products.keys for products in same])
        value += same[0].flops * queries * keys / (same[0].queries * same[0].keys)
    return round(value)


class StockCost(CountedCost):
    """See `Cost`. ``prepared`` are a batch's columns, ``shape`` the latents that the denoiser cuts into patches."""

    def __init__(
        self, family: "StockFamily", denoiser: nn.Module, prepared: Sequence[Column], shape: LatentShape
    ) -> None:
        self._family = family
        self._shape = shape
        self.compiled_share = family.compiled_share
        self._side = shape.factor * family.patch
        self._prepared = [column for column in prepared if column.name not in ("target", "mask")]
        (noisy,) = (column for column in self._prepared if column.name == "noisy")
        # references of another size than the image have one of their own, nearly the same for all images
        self._sized = [column for column in self._prepared if _is_seen(column) and column.shape != noisy.shape]
        self.fixed_tokens = sum(math.prod(column.shape[1:]) // family.patch**2 for column in self._sized)
        text = next(column for column in self._prepared if column.name == TEXT)
        kind = "at most, as captions are not padded" if text.ragged and not family.pads_text else "padded"
        is_padded = not text.ragged or family.pads_text
        self._text = TextTokens(text.shape[0], is_padded, f"{text.shape[0]}, {kind}", family.text_steps)
        super().__init__(denoiser, family.title)

    @property
    def text(self) -> TextTokens:
        """See `Cost.text`."""
        return self._text

    @property
    def why_no_graphs(self) -> str | None:
        """See `Cost.why_no_graphs`."""
        if self.text.is_padded or self.text.steps:
            return None
        return "captions are not padded, as the mask that they would need slows attention down"

    @property
    def token_side(self) -> int:
        """See `Cost.token_side`."""
        return self._side

    def image_tokens(self, width: int, height: int) -> int:
        """See `Cost.image_tokens`."""
        return (width // self._side) * (height // self._side)

    def latent_frames(self, frames: int) -> int:
        """See `Cost.latent_frames`."""
        return self._shape.frames(frames)

    def batch_tokens(self, batch: Batch) -> Mapping[Tokens, int]:
        """See `Cost.batch_tokens`."""
        *frames, height, width = batch["noisy"].shape[2:]
        image = math.prod(frames) * (height // self._family.patch) * (width // self._family.patch)
        lengths = batch.lengths(TEXT)
        counts = {batch[TEXT].shape[1]: batch.size} if lengths is None else Counter(lengths.tolist())
        return {Tokens(image, text): count for text, count in counts.items()}

    def batch(self, rows: int, columns: int, text: int) -> Batch:
        """See `CountedCost.batch`."""
        sides = (rows * self._family.patch, columns * self._family.patch)
        values = {"t": torch.zeros(1)}
        for column in self._prepared:
            shape = (text, *column.shape[1:]) if column.name == TEXT else column.shape
            follows = column.name == "noisy" or (_is_seen(column) and column not in self._sized)
            shape = (*column.shape[:-2], *sides) if follows else shape
            values[column.name] = torch.zeros(1, *shape, dtype=getattr(torch, column.dtype))
        return Batch(1, values)

    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        """See `CountedCost.denoise`."""
        return self._family.denoise(denoiser, batch, 1.0)
