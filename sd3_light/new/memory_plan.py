"""Choose batch size, activation checkpointing and the storage of weights by the memory of a GPU.

All weights of a model train with AdamW if that fits. Otherwise, on one GPU, moments have 8 bits and gradients are
released; then weights are stored in bfloat16, then there is no running average.
"""

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
from sd3_light.new.kinds import Kind
from sd3_light.system import Gpu

CPU_MICRO_BATCH = 4
_LEVELS: tuple[Checkpointing, ...] = (False, "selective", True)  # from the fastest to the smallest
_STORED = ((4, 1), (2, 1), (4, 0), (2, 0))  # bytes per weight, and averages, from the most memory to the least
_ENOUGH = 4  # a quarter of the largest micro-batch is nearly as fast: no need to recompute activations for more


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of a run per GPU. ``needed`` and ``available`` are bytes, None on a CPU."""

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

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step, of all processes."""
        return self.micro_batch * self.accumulation * self.processes

    @property
    def fits(self) -> bool:
        """Whether the run fits; unknown on a CPU."""
        return self.needed is None or self.available is None or self.needed <= USABLE * self.available


def plan_memory(estimate: RunEstimate, train: TrainConfig, kind: Kind, gpus: Sequence[Gpu]) -> MemoryPlan:
    """Return the fastest plan that fits, or the smallest one if none does."""
    processes = max(1, len(gpus))
    largest = min(kind.largest_micro_batch, max(1, kind.batch // processes))
    sizes = [gpu.total_bytes for gpu in gpus if gpu.total_bytes is not None]
    if not sizes:
        if kind.cpu is not None and not gpus:
            return MemoryPlan(kind.cpu.batch, 1, False, processes)
        micro_batch = min(CPU_MICRO_BATCH, largest)
        return MemoryPlan(micro_batch, max(1, kind.batch // (micro_batch * processes)), False, processes)
    plan = _best(estimate, train, kind.batch, largest, processes, min(sizes))
    if plan.fits or processes > 1 or train.adapter is not None or not kind.continues:
        return plan
    needed = plan.needed
    for weight_bytes, tracks in _STORED:
        setup = replace(
            estimate.setup,
            weight_bytes=weight_bytes,
            release=True,
            optimizer="adamw8bit",
            fast=False,
            ema_tracks=tracks * estimate.setup.ema_tracks,
        )
        released = train.model_copy(update={"gradient_release": True})
        plan = _best(replace(estimate, setup=setup), released, 1, largest, 1, min(sizes))
        plan = replace(plan, release=True, narrow=weight_bytes == 2, averages=bool(tracks), needed_by_adamw=needed)
        if plan.fits:
            break
    return plan


def _best(
    estimate: RunEstimate, train: TrainConfig, batch: int, largest: int, processes: int, available: int
) -> MemoryPlan:
    """Return the fastest plan that fits, with micro-batches of at most ``largest``, or the smallest one."""
    levels = [_fitting(estimate, train, batch, largest, level, processes, available) for level in _LEVELS]
    fitting = [plan for plan in levels if plan.fits]
    enough = [plan for plan in fitting if plan.micro_batch * _ENOUGH >= largest]
    return enough[0] if enough else max(fitting, key=lambda plan: plan.micro_batch, default=levels[-1])


def _fitting(
    estimate: RunEstimate,
    train: TrainConfig,
    batch: int,
    micro_batch: int,
    level: Checkpointing,
    processes: int,
    available: int,
) -> MemoryPlan:
    """Return the plan with the largest micro-batch that fits, at most ``micro_batch``, or with one sample."""
    costliest = max(estimate.data.rows, key=lambda row: row.tokens.image)
    tokens = costliest.tokens
    cost = estimate.setup.cost
    flops = training_flops(cost.unrouted, tokens).value
    config = train.model_copy(update={"activation_checkpointing": level})
    while True:
        accumulation = max(1, batch // (micro_batch * processes))
        setup = replace(
            estimate.setup,
            tokens=tokens,
            graphs=why_no_graphs(config, cost, micro_batch * flops, Layout(processes)) is None,
            batch=micro_batch,
            accumulation=accumulation,
            checkpointing=level,
        )
        plan = MemoryPlan(micro_batch, accumulation, level, processes, gpu_memory(setup).total, available)
        if plan.fits or micro_batch == 1:
            return plan
        micro_batch //= 2
