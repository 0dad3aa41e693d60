"""Choose batch size, activation checkpointing and the storage of weights by the memory of a GPU.

All weights of a model train with AdamW if that fits. Otherwise, on one GPU, moments have 8 bits and gradients are
released; then weights are stored in bfloat16, then there is no running average.

An adapter whose denoiser does not fit gets frozen weights in 8 bits, and then as many blocks in host memory as needed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sd3_light.check.verb import RunEstimate
from sd3_light.config import TrainConfig
from sd3_light.config.base import Checkpointing
from sd3_light.core.cost import Layout
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.graph_choice import why_no_graphs
from sd3_light.cost.residence import USABLE
from sd3_light.cost.training_flops import training_flops
from sd3_light.cost.training_setup import SWAP_BUFFERS
from sd3_light.new.kinds import Kind
from sd3_light.system import Gpu

CPU_MICRO_BATCH = 4
_LEVELS: tuple[Checkpointing, ...] = (False, "selective", True)  # from the fastest to the smallest
_COMPILED_LEVELS: tuple[Checkpointing, ...] = (False, 0.25, 0.5, 0.75, True)
_STORED = ((4, 1), (2, 1), (4, 0), (2, 0))  # bytes per weight, and averages, from the most memory to the least
_ROOMY = 8  # samples of a micro-batch below which a smaller denoiser learns more per hour; not measured
_ENOUGH = 4  # a quarter of the largest micro-batch is nearly as fast: no need to recompute activations for more


@dataclass(frozen=True)
class MemoryChoice:
    """Sizes of a run per GPU. ``needed`` and ``available`` are bytes, None on a CPU.

    The weights of ``swap_blocks`` blocks are in host memory: ``host`` bytes, with their moments if they train.
    """

    micro_batch: int
    accumulation: int
    checkpointing: Checkpointing
    processes: int = 1
    needed: int | None = None
    available: int | None = None
    release: bool = False
    """Whether gradients are released and moments have 8 bits."""
    narrow: bool = False
    """Whether weights are stored in bfloat16."""
    averages: bool = True
    """Whether there is room for the recipe's running average."""
    needed_by_adamw: int | None = None
    """Bytes that AdamW would need, if it does not fit and gradients are released instead."""
    base_bits: int = 16
    swap_blocks: int = 0
    host: int = 0

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step, of all processes."""
        return self.micro_batch * self.accumulation * self.processes

    @property
    def fits(self) -> bool:
        """Whether the run fits; unknown on a CPU."""
        return self.needed is None or self.available is None or self.needed <= USABLE * self.available

    @property
    def is_roomy(self) -> bool:
        """Whether the run fits without computing all activations again, and with micro-batches of some size."""
        return self.fits and self.checkpointing is not True and self.micro_batch >= _ROOMY


def choose_memory(estimate: RunEstimate, train: TrainConfig, kind: Kind, gpus: Sequence[Gpu]) -> MemoryChoice:
    """Return the fastest choice that fits, or the smallest one if none does."""
    processes = max(1, len(gpus))
    largest = min(kind.largest_micro_batch, max(1, kind.batch // processes))
    sizes = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    if not sizes:
        if kind.cpu is not None and not gpus:
            return MemoryChoice(kind.cpu.batch, 1, False, processes)
        micro_batch = min(CPU_MICRO_BATCH, largest)
        return MemoryChoice(micro_batch, max(1, kind.batch // (micro_batch * processes)), False, processes)
    search = _Search(estimate, train, kind.batch, processes, min(sizes))
    choice = search.fastest(largest)
    if choice.fits:
        return choice
    if train.adapter is not None:
        search = replace(search, base_bits=8)
        choice = search.fastest(largest)
        return choice if choice.fits else search.swapping()
    if processes > 1 or not kind.continues:
        return choice
    return _released(replace(search, batch=1), largest, choice.needed)


def _released(search: "_Search", largest: int, needed: int | None) -> MemoryChoice:
    """Return the choice that changes least of those that release gradients and fit; ``needed`` are AdamW's bytes.

    Where the smallest weights and moments do not fit, some blocks are in host memory.
    """
    choice = MemoryChoice(1, 1, True)
    for weight_bytes, tracks, hosted in (*((*stored, False) for stored in _STORED), (*_STORED[-1], True)):
        setup = search.estimate.setup
        setup = replace(
            setup,
            weight_bytes=weight_bytes,
            release=True,
            optimizer="adamw8bit",
            fast=False,
            ema_tracks=tracks * setup.ema_tracks,
        )
        train = search.train.model_copy(update={"gradient_release": True})
        narrowed = replace(search, estimate=replace(search.estimate, setup=setup), train=train)
        choice = narrowed.swapping() if hosted else narrowed.fastest(largest)
        choice = replace(choice, release=True, narrow=weight_bytes == 2, averages=bool(tracks), needed_by_adamw=needed)
        if choice.fits:
            break
    return choice


@dataclass(frozen=True)
class _Search:
    """Looks for choices of ``processes`` GPUs with ``available`` bytes each, for ``batch`` samples per step."""

    estimate: RunEstimate
    train: TrainConfig
    batch: int
    processes: int
    available: int
    base_bits: int = 16

    def fastest(self, largest: int) -> MemoryChoice:
        """Return the fastest choice without swapped blocks that fits, or the smallest one."""
        choices = _COMPILED_LEVELS if self.estimate.setup.block_kind == "compiled" else _LEVELS
        levels = [self._fitting(largest, level) for level in choices]
        fitting = [choice for choice in levels if choice.fits]
        enough = [choice for choice in fitting if choice.micro_batch * _ENOUGH >= largest]
        return enough[0] if enough else max(fitting, key=lambda choice: choice.micro_batch, default=levels[-1])

    def swapping(self) -> MemoryChoice:
        """Return the choice of one sample with the fewest swapped blocks that fits, or with all of them."""
        blocks = self.estimate.setup.cost.num_blocks
        # fewer than the buffers save nothing, and from then on each one saves memory
        count = bisect_left(range(blocks), True, SWAP_BUFFERS, key=lambda count: self._choice(1, True, count).fits)
        return self._choice(1, True, count)

    def _fitting(self, micro_batch: int, level: Checkpointing) -> MemoryChoice:
        """Return the choice with the largest micro-batch that fits, at most ``micro_batch``, or with one sample."""
        choice = self._choice(micro_batch, level)
        while not choice.fits and choice.micro_batch > 1:
            choice = self._choice(choice.micro_batch // 2, level)
        return choice

    def _choice(self, micro_batch: int, level: Checkpointing, swapped: int = 0) -> MemoryChoice:
        costliest = max(self.estimate.data.rows, key=lambda row: row.tokens.image)
        tokens = costliest.tokens
        cost = self.estimate.setup.cost
        flops = micro_batch * training_flops(cost.unrouted, tokens).value
        config = self.train.model_copy(update={"activation_checkpointing": level, "swap_blocks": swapped})
        accumulation = max(1, self.batch // (micro_batch * self.processes))
        setup = replace(
            self.estimate.setup,
            tokens=tokens,
            graphs=why_no_graphs(config, cost, flops, Layout(self.processes)) is None,
            batch=micro_batch,
            accumulation=accumulation,
            checkpointing=level,
            base_bits=self.base_bits,
            swapped=swapped,
        )
        needed = gpu_memory(setup).total
        choice = MemoryChoice(micro_batch, accumulation, level, self.processes, needed, self.available)
        return replace(choice, base_bits=self.base_bits, swap_blocks=swapped, host=setup.host_bytes)
