"""How a denoiser trains, in all that memory depends on: model, batch, engine and layout."""

from dataclasses import dataclass
from functools import cached_property

from sd3_light.budget.activations import BFLOAT16, COMPILED, FAST, FAST_SELECTIVE, FLOAT32, SELECTIVE, ActivationBytes
from sd3_light.budget.flops import Tokens, block_weights
from sd3_light.budget.partition import stage_bounds
from sd3_light.config import ModelSize
from sd3_light.config.base import Checkpointing


@dataclass(frozen=True)
class TrainingSetup:
    """How a denoiser trains: all that its memory depends on. ``world`` is the number of GPUs.

    By ``deepspeed`` they form pipelines of ``stages`` with ZeRO stage ``zero``; the numbers are those of stage
    ``stage``, whose layers ``bounds`` tell (empty: as even in parameters as DeepSpeed makes them).
    """

    size: ModelSize
    tokens: Tokens
    batch: int
    ema_tracks: int = 0
    checkpointing: Checkpointing = False
    compiled: bool = False
    fast: bool = False
    compute: str = "bfloat16"
    accumulation: int = 1
    optimizer: str = "adamw"
    world: int = 1
    parallel: str = "ddp"
    evaluates: bool = False
    beside: int = 0  # bytes of other models that stay on the GPU, such as the VAE that decodes samples
    adapter: tuple[int, ...] | None = None  # its weights by layer, which train; the denoiser's own are frozen then
    base_bits: int = 16  # of a frozen weight in the matrices of the blocks, which are then all on one GPU
    deepspeed: bool = False
    zero: int = 1
    stages: int = 1
    bounds: tuple[int, ...] = ()
    stage: int = 0

    # --- the layout ----------------------------------------------------------------------------

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's ZeRO stage that is in force; None with torch's own engine."""
        if not self.deepspeed:
            return None
        return 0 if self.world == 1 and self.zero == 1 else self.zero  # alone there is nobody to share with

    @property
    def replicas(self) -> int:
        """Pipelines that learn from different micro-batches."""
        return self.world // self.stages

    @property
    def shards(self) -> int:
        """GPUs over which weights and averages are cut."""
        cut = self.zero_stage == 3 or (self.zero_stage is None and self.parallel == "fsdp2")
        return self.world if cut else 1

    @property
    def moment_shards(self) -> int:
        """GPUs over which the optimizer's state is cut."""
        return self.replicas if self.zero_stage in (1, 2) else self.shards

    @property
    def by_ddp(self) -> bool:
        """Whether torch's DDP averages gradients, in buckets that stay."""
        return self.zero_stage is None and self.world > 1 and self.shards == 1

    @property
    def in_flight(self) -> int:
        """Micro-batches that wait on this stage for their backward pass: one forward, one backward in turns."""
        return min(self.accumulation, self.stages - self.stage)

    # --- the layers of this stage --------------------------------------------------------------

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """Bounds of the stages in the list of layers."""
        weights = self.size.layer_parameters() if self.adapter is None else self.adapter
        return self.bounds or stage_bounds(weights, self.stages, "parameters")

    @cached_property
    def layers(self) -> range:
        """Of all layers (embed, blocks, output) those of this stage."""
        return range(self.cut[self.stage], self.cut[self.stage + 1])

    @property
    def blocks(self) -> range:
        """The joint blocks of this stage, from 0 on."""
        last = self.size.num_layers
        return range(max(self.layers.start - 1, 0), min(self.layers.stop - 1, last))

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds."""
        return 0 in self.layers

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.size.num_layers + 1 in self.layers

    @cached_property
    def parameters(self) -> int:
        """P, all of them."""
        return sum(self.size.layer_parameters()[self.layers.start : self.layers.stop])

    @cached_property
    def trained(self) -> int:
        """Parameters that train: P, or those of the adapter."""
        return self.parameters if self.adapter is None else sum(self.adapter[self.layers.start : self.layers.stop])

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the weights under an adapter: in the type that they compute in, or in few bits and their scales."""
        if self.adapter is None:
            return 0
        few = sum(vars(block_weights(self.size)).values()) if self.base_bits < 16 else 0
        scales = few / 64 * (1 + 4 / 256) if self.base_bits == 4 else 0  # rows' scales in 8 bits weigh nothing
        wide = 4 if self.compute == "float32" else 2
        return round((self.parameters - few) * wide + few * self.base_bits / 8 + scales)

    @property
    def block_parameters(self) -> int:
        """Parameters of the largest block of this stage."""
        return max((self.size.layer_parameters()[block + 1] for block in self.blocks), default=0)

    # --- activations ---------------------------------------------------------------------------

    @property
    def saved(self) -> ActivationBytes:
        """What a block keeps while it is computed."""
        if self.compute == "float32":
            # compiled or fast float32 keeps the same tensors as in bf16, twice as wide
            return FLOAT32 if not (self.compiled or self.fast) else (FAST if self.fast else COMPILED).twice()
        if self.fast:
            return FAST
        return COMPILED if self.compiled else BFLOAT16

    @property
    def kept(self) -> ActivationBytes:
        """What a block keeps until the backward pass comes to it, where not only its inputs."""
        if self.checkpointing != "selective":
            return self.saved
        kept = FAST_SELECTIVE if self.fast else SELECTIVE
        return kept.twice() if self.compute == "float32" else kept
