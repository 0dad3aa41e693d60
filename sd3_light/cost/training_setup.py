"""Everything that the memory of a training run depends on: model, batch, engine and layout."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sd3_light.config import AdapterConfig
from sd3_light.config.base import Checkpointing
from sd3_light.config.optimizers import CHUNK_ELEMENTS, OPTIMIZERS
from sd3_light.core.cost import BlockKind, Compute, Cost, SampleBytes, Tokens
from sd3_light.cost.partition import stage_bounds

SWAP_BUFFERS = 2
"""Buffers on the GPU for blocks in host memory. Tests compare it with `model/block_swap.py`."""


def swapped_blocks(setting: int | Literal["all"], total: int) -> list[int]:
    """Return the blocks that `swap_blocks` keeps in host memory, evenly spread over all.

    A block is copied while those since the previous swapped one compute: the more of them, the likelier it is that the
    copy ends before it is needed.
    """
    count = total if setting == "all" else min(setting, total)
    return [block for block in range(total) if (block + 1) * count // total > block * count // total]


@dataclass(frozen=True)
class TrainingSetup:
    """How a denoiser is trained. ``world`` is the number of GPUs.

    With ``deepspeed`` they form pipelines of ``stages`` with ZeRO stage ``zero``. The numbers are those of stage
    ``stage``, whose layers follow from ``bounds`` (empty: as even in parameters as DeepSpeed makes them).
    """

    cost: Cost
    tokens: Tokens
    batch: int
    ema_tracks: int = 0
    checkpointing: Checkpointing = False
    compiled: bool = False
    fast: bool = False
    graphs: bool = False  # CUDA graphs: gradients, and the memory of a step, stay allocated
    graph_shapes: int = 1  # recorded shapes of micro-batches; each has its own inputs
    compute_dtype: str = "bfloat16"
    accumulation: int = 1
    optimizer: str = "adamw"
    world_size: int = 1
    parallel: str = "ddp"
    evaluates: bool = False
    other_models: int = 0  # bytes of other models that stay on the GPU, such as the VAE that decodes samples
    cache: int = 0  # bytes of the training cache, if it is in GPU memory
    adapter: tuple[int, ...] | None = None  # trained parameters per layer; the denoiser's own are frozen then
    adapter_config: AdapterConfig | None = None
    weight_bytes: int = 4  # of a trained weight and its gradient: 2 in bfloat16
    release: bool = False  # gradients are freed in the backward pass
    base_bits: int = 16  # bits of a frozen weight in the matrices of the blocks; under 16, one GPU holds all of them
    swapped: int | Literal["all"] = 0  # blocks in host memory: frozen weights under an adapter, or all with their state
    deepspeed: bool = False
    zero: int = 1
    stages: int = 1
    bounds: tuple[int, ...] = ()
    stage: int = 0

    # --- the layout ----------------------------------------------------------------------------

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's effective ZeRO stage; None with the torch engine."""
        if not self.deepspeed:
            return None
        return 0 if self.world_size == 1 and self.zero == 1 else self.zero  # one process has nothing to shard

    @property
    def replicas(self) -> int:
        """Pipelines that train on different micro-batches."""
        return self.world_size // self.stages

    @property
    def shards(self) -> int:
        """GPUs over which weights and averages are sharded."""
        sharded = self.zero_stage == 3 or (self.zero_stage is None and self.parallel == "fsdp2")
        return self.world_size if sharded else 1

    @property
    def moment_shards(self) -> int:
        """GPUs over which the optimizer state is sharded."""
        return self.replicas if self.zero_stage in (1, 2) else self.shards

    @property
    def uses_ddp(self) -> bool:
        """Whether torch's DDP averages gradients, in buckets that stay allocated."""
        return self.zero_stage is None and self.world_size > 1 and self.shards == 1

    @property
    def in_flight(self) -> int:
        """Micro-batches of this stage that wait for their backward pass (one-forward-one-backward schedule)."""
        return min(self.accumulation, self.stages - self.stage)

    @property
    def block_kind(self) -> BlockKind:
        """The kind of the blocks on GPUs."""
        return "fast" if self.fast else "compiled" if self.compiled else "stock"

    @property
    def recomputes_all(self) -> bool:
        """Whether every block recomputes some or all of its activations in the backward pass."""
        return bool(self.checkpointing) and not isinstance(self.checkpointing, float)

    # --- the layers of this stage --------------------------------------------------------------

    @cached_property
    def layer_bounds(self) -> tuple[int, ...]:
        """Bounds of the stages in the list of layers."""
        weights = self.cost.layer_parameters if self.adapter is None else self.adapter
        return self.bounds or stage_bounds(weights, self.stages, "parameters")

    @cached_property
    def layers(self) -> range:
        """The layers of this stage."""
        return range(self.layer_bounds[self.stage], self.layer_bounds[self.stage + 1])

    @property
    def blocks(self) -> range:
        """The blocks of this stage, counted from 0."""
        return range(max(self.layers.start - 1, 0), min(self.layers.stop - 1, self.cost.num_blocks))

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the inputs."""
        return 0 in self.layers

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.cost.num_blocks + 1 in self.layers

    @cached_property
    def parameters(self) -> int:
        """All parameters of this stage, P."""
        return sum(self.cost.layer_parameters[self.layers.start : self.layers.stop])

    @cached_property
    def trained_parameters(self) -> int:
        """The trained parameters of this stage: P, or those of the adapter."""
        return self.parameters if self.adapter is None else sum(self.adapter[self.layers.start : self.layers.stop])

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the frozen weights under an adapter on the GPU, with the buffers for those in host memory."""
        if self.adapter is None:
            return 0
        swapped = self._swapped_bytes
        buffers = min(SWAP_BUFFERS, len(swapped)) * max(swapped, default=0)
        return round(sum(map(self._frozen_layer_bytes, self.layers)) - sum(swapped) + buffers)

    @property
    def host_bytes(self) -> int:
        """Bytes of weights in host memory, and of the optimizer state of those that train."""
        moments = sum(term.bytes_per_parameter for term in OPTIMIZERS[self.optimizer].state)
        return round(sum(self._swapped_bytes) + (self.weight_bytes + moments) * sum(self.hosted_parameters))

    @cached_property
    def hosted_parameters(self) -> list[int]:
        """Trained parameters of each block in host memory."""
        numbers = swapped_blocks(self.swapped, self.cost.num_blocks) if self.adapter is None else []
        return [self.cost.layer_parameters[number + 1] for number in numbers]

    @property
    def host_input_bytes(self) -> int:
        """Bytes of a micro-batch's inputs of blocks in host memory."""
        return self.batch * sum(block.inputs for block in self.sample.blocks) if self.checkpointing == "host" else 0

    @property
    def resident_parameters(self) -> int:
        """The trained parameters of this stage that are not in host memory."""
        return self.trained_parameters - sum(self.hosted_parameters)

    @property
    def buffered_parameters(self) -> int:
        """Parameters for which the buffers of trained blocks in host memory have room."""
        return min(SWAP_BUFFERS, len(self.hosted_parameters)) * max(self.hosted_parameters, default=0)

    @cached_property
    def _swapped_bytes(self) -> list[float]:
        numbers = swapped_blocks(self.swapped, self.cost.num_blocks) if self.adapter is not None else []
        return [self._frozen_layer_bytes(number + 1) for number in numbers]

    def _frozen_layer_bytes(self, layer: int) -> float:
        """Return the bytes of a layer's weights: in the compute dtype, in float32 as in the stock class, or quantized.

        All blocks have the same share of matrices, which are quantized with their scales.
        """
        parameters = self.cost.layer_parameters[layer]
        width = 4 if self.compute_dtype == "float32" else 2
        quantized = 0.0
        if self.base_bits < 16 and 0 < layer <= self.cost.num_blocks:
            quantized = parameters * self.cost.block_matrices / sum(self.cost.layer_parameters[1:-1])
        scales = quantized / 64 * (1 + 4 / 256) if self.base_bits == 4 else 0  # 8-bit rows' scales are negligible
        kept = (4 - width) * self.cost.float32_parameters[layer]
        return (parameters - quantized) * width + kept + quantized * self.base_bits / 8 + scales

    @property
    def chunk_parameters(self) -> int:
        """Parameters that are updated together, if not all of them are."""
        return min(self.trained_parameters, max(CHUNK_ELEMENTS, 9 * self.cost.width**2))  # the largest matrix, of SD3.5

    @property
    def block_parameters(self) -> int:
        """Parameters of the largest block of this stage."""
        return max((self.cost.layer_parameters[block + 1] for block in self.blocks), default=0)

    @cached_property
    def sample(self) -> SampleBytes:
        """The memory of one sample."""
        return self.cost.sample_bytes(self.tokens, Compute(self.block_kind, self.compute_dtype, self.adapter_config))
