"""Choose batch size and activation checkpointing by the memory of a GPU, with the formula of `check`."""

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
    levels = [_fitting(estimate, train, kind.batch, largest, level, processes, min(sizes)) for level in _LEVELS]
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
