"""The cost of training a denoiser without formulas: a pass is counted, see `check.denoiser_count`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from peft.tuners.lycoris_utils import LycorisLayer
from torch import Tensor, nn

from sd3_light.check.denoiser_count import NOTHING, Counts, FewOfEachBlock, copy_of_few
from sd3_light.config import AdapterConfig, TrainConfig
from sd3_light.core.cost import FLASH_BACKWARD, Compute, Cost, Layout, SampleBytes, Tokens
from sd3_light.core.model import denoiser_blocks
from sd3_light.model.adapter_layers import add_adapter
from sd3_light.model.linears import adapter_weights, match_targets
from sd3_light.model.loading import kept_in_float32
from sd3_light.model.lora_layers import target_layers
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

    ``denoiser`` is on the meta device and belongs to this object. ``compiled_share`` is what compiled blocks save, as a
    share of what stock ones save: if all weights are trained, and below an adapter. 1 is more than they save.
    """

    compiled_share = (1.0, 1.0)

    def __init__(self, denoiser: nn.Module, title: str) -> None:
        self._denoiser = denoiser
        self._title = title
        self._weights = _read_weights(denoiser)
        self._reduced: dict[AdapterConfig | None, FewOfEachBlock] = {}

    def reduced(self, adapter: AdapterConfig | None) -> FewOfEachBlock:
        """Return the denoiser as it is counted, all of whose weights train, or only an adapter's."""
        if adapter not in self._reduced:
            self._reduced[adapter] = self._few_blocks(adapter)
        return self._reduced[adapter]

    def _few_blocks(self, adapter: AdapterConfig | None) -> FewOfEachBlock:
        if adapter is None:
            return FewOfEachBlock(copy_of_few(self._denoiser, 1))
        targets = target_layers(self._denoiser, adapter.target_modules)
        denoiser = copy_of_few(self._denoiser, 2, targets)
        kept = [name for name, _ in denoiser.named_modules() if name in set(targets)]
        few_targets = adapter.model_copy(update={"target_modules": kept})
        add_adapter(denoiser.requires_grad_(False), few_targets, seed=0)
        few = FewOfEachBlock(denoiser, most=2)
        for module in few.denoiser.modules():
            if isinstance(module, LycorisLayer):
                module.eval()  # in training it draws a number to drop the layer, which has no value here
        return few

    @abstractmethod
    def counts(self, tokens: Tokens, dtype: str, adapter: AdapterConfig | None = None) -> Counts:
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
        counts = self.counts(tokens, compute.dtype, compute.adapter)
        share = self.compiled_share[compute.adapter is not None] if compute.kind == "compiled" else 1.0
        counted = [replace(block, saved=round(share * block.saved)) for block in counts.blocks]
        blocks = counted or NOTHING.blocks
        return SampleBytes(
            features=counts.features,
            target=counts.target,
            before=counts.before,
            blocks=tuple(counted[kind] for kind in self.block_kinds(compute.adapter)),
            after=counts.after,
            stream=max(kind.inputs for kind in blocks),
            largest=max(blocks, key=lambda kind: kind.saved),
            # the gradients of its largest tensor and of what that was made of, and what attention needs in its kernel
            work=round(2 * counts.tensor + FLASH_BACKWARD * self.width * tokens.joint),
        )

    def block_kinds(self, adapter: AdapterConfig | None) -> Sequence[int]:
        """Return for every block the position of its counts in `Counts.blocks`."""
        return self.reduced(adapter).kinds

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
