"""The cost of training a denoiser without formulas: a pass is counted, see `check.denoiser_count`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor, nn

from sd3_light.check.denoiser_count import NOTHING, Counts, OneOfEachBlock
from sd3_light.config import AdapterConfig, TrainConfig
from sd3_light.core.cost import FLASH_BACKWARD, Compute, Cost, Layout, SampleBytes, Tokens
from sd3_light.core.model import denoiser_blocks
from sd3_light.model.linears import adapter_weights, match_targets
from sd3_light.model.loading import kept_in_float32
from sd3_light.optim.groups import WeightKinds

FLOPS_DTYPE = "bfloat16"
"""The dtype in which FLOPs are counted; they do not depend on it."""


class _Weights(NamedTuple):
    """What the weights of a denoiser are: parameters per layer, those kept in float32, those in matrices of blocks,
    and linear layers."""

    layers: tuple[int, ...]
    float32: tuple[int, ...]
    block_matrices: int
    linears: dict[str, tuple[int, int]]
    layer_of: dict[str, int]


class DenoiserCost(Cost):
    """See `Cost`. A subclass counts passes, and says how many tokens there are.

    ``denoiser`` is on the meta device and belongs to this object. Compiled blocks count as much as stock ones, which is
    more than they save. On a GPU nothing of this was measured.
    """

    def __init__(self, denoiser: nn.Module, title: str) -> None:
        self._denoiser = denoiser
        self._title = title
        self._weights = _read_weights(denoiser)

    @cached_property
    def reduced(self) -> OneOfEachBlock:
        """The denoiser as it is counted."""
        return OneOfEachBlock(self.reduced_copy())

    @property
    def block_kinds(self) -> Sequence[int]:
        """The kind of every block, a position in `Counts.blocks`."""
        return self.reduced.kinds

    def reduced_copy(self) -> nn.Module:
        """Return a denoiser on the meta device, whose blocks are left out."""
        return self._denoiser

    @abstractmethod
    def counts(self, tokens: Tokens, dtype: str) -> Counts:
        """Return what a pass of one sample costs in ``dtype``."""

    @property
    def description(self) -> str:
        """See `Cost.description`."""
        return f"{self._title}: {self.num_blocks} blocks, width {self.width}"

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """See `Cost.layer_parameters`; everything outside of the blocks counts as before them."""
        return self._weights.layers

    @property
    def float32_parameters(self) -> tuple[int, ...]:
        """See `Cost.float32_parameters`."""
        return self._weights.float32

    @property
    def block_matrices(self) -> int:
        """See `Cost.block_matrices`."""
        return self._weights.block_matrices

    @cached_property
    def width(self) -> int:
        """See `Cost.width`: the commonest number of inputs of the blocks' linear layers."""
        inputs = [shape[0] for name, shape in self._weights.linears.items() if self._weights.layer_of[name]]
        return max(set(inputs), key=inputs.count, default=0)

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
        return f"{self._title} was never recorded"

    def forward_flops(self, tokens: Tokens) -> int:
        """See `Cost.forward_flops`."""
        return self.counts(tokens, FLOPS_DTYPE).forward_flops

    def input_flops(self, tokens: Tokens) -> int:
        """See `Cost.input_flops`."""
        return self.counts(tokens, FLOPS_DTYPE).input_flops

    def sample_bytes(self, tokens: Tokens, compute: Compute) -> SampleBytes:
        """See `Cost.sample_bytes`."""
        assert compute.kind != "fast", f"{self._title} has no fast blocks"
        counts = self.counts(tokens, compute.dtype)
        blocks = counts.blocks or NOTHING.blocks
        return SampleBytes(
            features=counts.features,
            target=counts.target,
            before=counts.before,
            blocks=tuple(counts.blocks[kind] for kind in self.block_kinds),
            after=counts.after,
            stream=max(kind.inputs for kind in blocks),
            largest=max(blocks, key=lambda kind: kind.saved),
            # the gradients of its largest tensor and of what that was made of, and what attention needs in its kernel
            work=round(2 * counts.tensor + FLASH_BACKWARD * self.width * tokens.joint),
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


def _read_weights(denoiser: nn.Module) -> _Weights:
    """Return what the weights of a denoiser are, before blocks are left out."""
    names = {id(module): name for name, module in denoiser.named_modules()}
    blocks = denoiser_blocks(denoiser)
    kinds = WeightKinds(denoiser)
    matrices = sum(weight.numel() for weight in denoiser.parameters() if kinds.is_block_matrix(weight))
    linears = {}
    layer_of = {}
    for number, module in enumerate((denoiser, *blocks)):  # a block replaces what the denoiser says about its layers
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                linears[names[id(layer)]] = (layer.in_features, layer.out_features)
                layer_of[names[id(layer)]] = number
    is_kept = kept_in_float32(denoiser)
    kept = {id(weight) for name, weight in denoiser.named_parameters() if is_kept(name)}
    float32 = layer_sizes(denoiser, lambda weight: id(weight) in kept)
    return _Weights(layer_sizes(denoiser), float32, matrices, linears, layer_of)


def layer_sizes(denoiser: nn.Module, is_counted: Callable[[Tensor], bool] = lambda _: True) -> tuple[int, ...]:
    """Return the parameters of each layer, as in `Cost.layer_parameters`, of those that are counted."""

    def size(module: nn.Module) -> int:
        return sum(weight.numel() for weight in module.parameters() if is_counted(weight))

    blocks = [size(block) for block in denoiser_blocks(denoiser)]
    return (size(denoiser) - sum(blocks), *blocks, 0)
