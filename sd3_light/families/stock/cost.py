"""The cost of training a stock denoiser of diffusers, without formulas: its passes are counted.

FLOPs are polynomials of second degree in image and text tokens, bytes of first degree. Six small shapes determine
them for all, in a few seconds; buckets and captions then cost nothing.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from sd3_light.config import AdapterConfig, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Column
from sd3_light.core.cost import FLASH_BACKWARD, BlockBytes, Compute, Cost, Layout, SampleBytes, TextTokens, Tokens
from sd3_light.core.model import denoiser_blocks
from sd3_light.families.stock.denoiser_count import Counts, OneOfEachBlock
from sd3_light.families.stock.latents import LatentShape
from sd3_light.model.linears import adapter_weights, match_targets
from sd3_light.optim.groups import WeightKinds

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily

TEXT = "text"
"""The column of captions whose rows are tokens of the denoiser."""
_UNIT = 64  # tokens of the smallest shape; some denoisers pad to a multiple of 32
_GRIDS = {1: (8, 8), 2: (8, 16), 3: (12, 16)}  # units of image tokens -> their rows and columns
_SHAPES = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))  # image and text tokens, in units
_LINEAR = _SHAPES[:2] + _SHAPES[3:4]  # those that determine what grows linearly
_DTYPE = "bfloat16"  # FLOPs do not depend on it


class _Weights(NamedTuple):
    """What the weights of a denoiser are: parameters per layer, those in matrices of blocks, and linear layers."""

    layers: tuple[int, ...]
    block_matrices: int
    linears: dict[str, tuple[int, int]]
    layer_of: dict[str, int]


class CountedCost(Cost):
    """See `Cost`. A family adds its batches, how they run through its denoiser, and its numbers of tokens.

    ``denoiser`` is on the meta device and belongs to this object. Compiled blocks count as much as stock ones, which is
    more than they save. On a GPU nothing of this was measured.
    """

    def __init__(self, denoiser: nn.Module, title: str) -> None:
        self._title = title
        self._weights = _read_weights(denoiser)
        self._reduced = OneOfEachBlock(denoiser)
        self._counts: dict[str, tuple[Counts, ...]] = {}

    @abstractmethod
    def batch(self, rows: int, columns: int, text: int) -> Batch:
        """Return what a denoiser gets for one sample of rows x columns image tokens, in the dtypes of a batch.

        The values of tensors do not matter.
        """

    @abstractmethod
    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        """Return the velocity of a batch, as in training."""

    @property
    def description(self) -> str:
        """See `Cost.description`."""
        return f"{self._title}: {self.num_blocks} blocks, width {self.width}"

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """See `Cost.layer_parameters`; everything outside of the blocks counts as before them."""
        return self._weights.layers

    @property
    def block_matrices(self) -> int:
        """See `Cost.block_matrices`."""
        return self._weights.block_matrices

    @cached_property
    def width(self) -> int:
        """See `Cost.width`: the commonest number of inputs of the blocks' linear layers."""
        inputs = [shape[0] for name, shape in self._weights.linears.items() if self._weights.layer_of[name]]
        return max(set(inputs), key=inputs.count)

    @property
    def longest_text(self) -> int:
        """See `Cost.longest_text`."""
        return self.text.most

    @property
    def flops_formula(self) -> str:
        """See `Cost.flops_formula`."""
        return "products and attention, counted in a pass without memory"

    @property
    def why_no_graphs(self) -> str | None:
        """See `Cost.why_no_graphs`."""
        return None if self.text.is_padded else "captions of their own lengths give every batch another shape"

    def forward_flops(self, tokens: Tokens) -> int:
        """See `Cost.forward_flops`."""
        return self._at(tokens, [counts.forward_flops for counts in self._counted(_DTYPE)])

    def input_flops(self, tokens: Tokens) -> int:
        """See `Cost.input_flops`."""
        one, two, _, text_two, _, _ = (counts.input_flops for counts in self._counted(_DTYPE))
        of_image = two - one
        of_text = text_two - one
        return self._at(tokens, (one, two, two + of_image, text_two, text_two + of_text, two + of_text))

    def sample_bytes(self, tokens: Tokens, compute: Compute) -> SampleBytes:
        """See `Cost.sample_bytes`."""
        assert compute.kind != "fast", f"{self._title} has no fast blocks"
        counted = self._counted(compute.dtype)
        at = partial(self._at, tokens)
        kinds = []
        for kind in range(len(counted[0].blocks)):
            sizes = zip(*(astuple(counts.blocks[kind]) for counts in counted), strict=True)
            kinds.append(BlockBytes(*map(at, sizes)))
        # the gradients of its largest tensor and of what that was made of, and what attention needs in its kernel
        counted_at = zip(counted, _SHAPES, strict=True)
        tensor = max(Fraction(counts.tensor, _UNIT * sum(shape)) for counts, shape in counted_at)
        return SampleBytes(
            features=at([counts.features for counts in counted]),
            target=at([counts.target for counts in counted]),
            before=at([counts.before for counts in counted]),
            blocks=tuple(kinds[kind] for kind in self._reduced.kinds),
            after=at([counts.after for counts in counted]),
            stream=max(kind.inputs for kind in kinds),
            largest=max(kinds, key=lambda kind: kind.saved),
            work=round((2 * tensor + FLASH_BACKWARD * self.width) * tokens.joint),
        )

    def adapter_parameters(self, adapter: AdapterConfig) -> tuple[int, ...]:
        """See `Cost.adapter_parameters`."""
        parameters = [0] * len(self.layer_parameters)
        for name in match_targets(self._weights.linears, adapter.target_modules):
            parameters[self._weights.layer_of[name]] += adapter_weights(self._weights.linears[name], adapter)
        return tuple(parameters)

    def why_stock(self, config: TrainConfig, layout: Layout) -> str | None:
        """See `Cost.why_stock`."""
        return f"{self._title} has no fast blocks"

    def why_no_fp8(self, capability: tuple[int, int] | None) -> str | None:
        """See `Cost.why_no_fp8`."""
        return f"{self._title} has no fast blocks"

    def _counted(self, dtype: str) -> tuple[Counts, ...]:
        """Return the counts of all `_SHAPES`."""
        if dtype not in self._counts:
            self._counts[dtype] = tuple(self._count(shape, dtype) for shape in _SHAPES)
        return self._counts[dtype]

    def _count(self, shape: tuple[int, int], dtype: str) -> Counts:
        image, text = shape
        batch = self.batch(*_GRIDS[image], text * _UNIT)
        return self._reduced.count(self.denoise, batch, dtype, backward=dtype == _DTYPE and shape in _LINEAR)

    @staticmethod
    def _at(tokens: Tokens, values: Sequence[int]) -> int:
        """Return the polynomial through the values at `_SHAPES`, in Newton's form."""
        one, two, three, text_two, text_three, both = values
        image = Fraction(tokens.image, _UNIT) - 1
        text = Fraction(tokens.text, _UNIT) - 1
        value = one + image * (two - one) + text * (text_two - one)
        value += image * (image - 1) / 2 * (three - 2 * two + one)
        value += text * (text - 1) / 2 * (text_three - 2 * text_two + one)
        return round(value + image * text * (both - two - text_two + one))


class StockCost(CountedCost):
    """See `Cost`. ``prepared`` are a batch's columns, ``shape`` the latents that the denoiser cuts into patches."""

    def __init__(
        self, family: "StockFamily", denoiser: nn.Module, prepared: Sequence[Column], shape: LatentShape
    ) -> None:
        self._family = family
        self._shape = shape
        self._side = shape.factor * family.patch
        self._prepared = [column for column in prepared if column.name not in ("target", "mask")]
        text = next(column for column in self._prepared if column.name == TEXT)
        kind = "at most, as captions are not padded" if text.ragged and not family.pads_text else "padded"
        self._text = TextTokens(text.shape[0], not text.ragged or family.pads_text, f"{text.shape[0]}, {kind}")
        super().__init__(denoiser, family.title)

    @property
    def text(self) -> TextTokens:
        """See `Cost.text`."""
        return self._text

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
            shape = (*column.shape[:-2], *sides) if column.name == "noisy" else shape
            values[column.name] = torch.zeros(1, *shape, dtype=getattr(torch, column.dtype))
        return Batch(1, values)

    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        """See `CountedCost.denoise`."""
        return self._family.denoise(denoiser, batch, 1.0)


def _read_weights(denoiser: nn.Module) -> _Weights:
    """Return what the weights of a denoiser are, before blocks are left out."""
    names = {id(module): name for name, module in denoiser.named_modules()}
    blocks = denoiser_blocks(denoiser)
    sizes = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    outside = sum(weight.numel() for weight in denoiser.parameters()) - sum(sizes)
    kinds = WeightKinds(denoiser)
    matrices = sum(weight.numel() for weight in denoiser.parameters() if kinds.is_block_matrix(weight))
    linears = {}
    layer_of = {}
    for number, module in enumerate((denoiser, *blocks)):  # a block replaces what the denoiser says about its layers
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                linears[names[id(layer)]] = (layer.in_features, layer.out_features)
                layer_of[names[id(layer)]] = number
    return _Weights((outside, *sizes, 0), matrices, linears, layer_of)
