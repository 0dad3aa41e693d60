"""Decide whether a run replays CUDA graphs; `check` and training share these rules."""

from sd3_light.config import TrainConfig
from sd3_light.core.cost import Cost, Layout

LAUNCH_BOUND_FLOPS = 1e12
"""FLOPs per block and micro-batch up to which a step is bound by launches: an H200 needs 2 to 3 ms for them, and the
host 8 ms to queue the kernels of a block (docs/evidence/LOG.md). Larger steps gain little, and graphs need memory."""
STOCK_FLOPS = 3e12
"""The same of stock blocks, compiled or not, which have more kernels: the host queues a compiled one of an adapter in
5.7 ms and one of all weights in 6.7 ms, and an H200 computes 1.2e12 in 2.5 and 5.1 ms (docs/evidence/LOG.md)."""
RECOMPUTED_FLOPS = 6e12
"""The same if blocks are computed again in the backward pass: the host queues one in 17 ms, and an H200 computes 5.6e12
in 15.7 ms (docs/evidence/LOG.md)."""
REAL_TEXT_FLOPS = 5e12
"""The same with real text: these are the FLOPs of the longest captions, a multiple of those of a usual batch."""
MAX_GRAPHS = 16
"""Graphs per run, one per shape of a micro-batch. Micro-batches of further shapes run as usual."""
REAL_TEXT_GRAPHS = 4
"""Graphs per shape of images with real text, whose length is rounded up: a guess for the estimate of memory."""


def why_no_graphs(config: TrainConfig, cost: Cost, flops: float, layout: Layout) -> str | None:
    """Return why a run on GPUs launches its kernels one by one, or None if it replays graphs.

    ``flops`` are those of its largest micro-batch.
    """
    if config.cuda_graphs is False:
        return "cuda_graphs = false"
    if layout.by_deepspeed or layout.world_size > 1:
        return "only one process with the torch engine records graphs"
    if cost.why_no_graphs is not None:
        return cost.why_no_graphs
    if config.model.text_tokens == "real" and config.terms.text_recon is not None:
        return "text_recon compares texts of all lengths"
    if config.adapter is not None and config.adapter.dropout > 0:
        return "an adapter with dropout draws numbers in each pass"
    if config.swap_blocks:
        return "blocks are swapped"
    if config.activation_checkpointing == "host":
        return "the inputs of blocks are in host memory"
    if config.gradient_release:
        return "gradient_release = true"
    if config.cuda_graphs == "auto" and flops > _launch_bound(config, cost, layout) * cost.num_blocks:
        return "its kernels take longer than their launches"
    return None


def _launch_bound(config: TrainConfig, cost: Cost, layout: Layout) -> float:
    """Return the FLOPs per block up to which a run is bound by launches."""
    if config.model.text_tokens == "real":
        return REAL_TEXT_FLOPS
    if cost.why_stock(config, layout) is None:
        return LAUNCH_BOUND_FLOPS
    return RECOMPUTED_FLOPS if config.activation_checkpointing else STOCK_FLOPS
