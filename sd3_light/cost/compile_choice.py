"""Decide whether a run compiles its stock blocks; `check` and training share these rules."""

from sd3_light.config import TrainConfig
from sd3_light.core.cost import Layout

ENOUGH_PASSES = 400
"""Micro-batches from which compiling pays: it takes about as long as it saves in so many of them (docs/LOG.md)."""


def why_uncompiled(config: TrainConfig, layout: Layout) -> str | None:
    """Return why blocks without hand-written kernels run as they are on a GPU, or None if they are compiled."""
    if config.compile is False:
        return "compile = false"
    if config.compile is True:
        return None
    if layout.by_deepspeed:
        return "DeepSpeed wraps the layers"
    if config.activation_checkpointing == "selective":
        return "activation_checkpointing = 'selective' needs the single operations of a block"
    passes = config.gradient_accumulation_steps * (config.max_steps or ENOUGH_PASSES)
    if passes < ENOUGH_PASSES:
        return f"compiling pays from about {ENOUGH_PASSES} micro-batches on, and this run has {passes}"
    return None
