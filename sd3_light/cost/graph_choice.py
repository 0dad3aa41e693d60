"""Decide whether a run replays CUDA graphs; `check` and training share these rules."""

from sd3_light.config import TrainConfig
from sd3_light.core.cost import Cost, Layout

LAUNCH_BOUND_FLOPS = 1e12
"""FLOPs per block and micro-batch up to which a step is bound by launches: an H200 needs 2 to 3 ms for them, and the
host 8 ms to queue the kernels of a block (docs/LOG.md). Larger steps gain little, and graphs need memory."""


MAX_GRAPHS = 16
"""Graphs per run, one per shape of a micro-batch. Micro-batches of further shapes run as usual."""


def why_no_graphs(config: TrainConfig, cost: Cost, flops: float, layout: Layout) -> str | None:
    """Return why a run on GPUs launches its kernels one by one, or None if it replays graphs.

    ``flops`` are those of its largest micro-batch.
    """
    if config.cuda_graphs is False:
        return "cuda_graphs = false"
    if layout.by_deepspeed or layout.world > 1:
        return "only one process with the torch engine records graphs"
    if cost.why_no_graphs is not None:
        return cost.why_no_graphs
    if config.model.text_tokens == "real":
        return 'text_tokens = "real" gives every batch another shape'
    if config.adapter is not None:
        return "an adapter is trained"
    if config.swap_blocks:
        return "blocks are swapped"
    if config.compile:
        return "compile = true"
    if config.activation_checkpointing and cost.why_stock(config, layout) is not None:
        return "activation_checkpointing in stock blocks reads the state of the random generator"
    if config.cuda_graphs == "auto" and flops > LAUNCH_BOUND_FLOPS * cost.num_blocks:
        return "its kernels take longer than their launches"
    return None
