"""Decide whether a run compiles its stock blocks; `check` and training share these rules."""

from sd3_light.config import TrainConfig
from sd3_light.core.cost import Cost, Layout

ENOUGH_PASSES = 400
"""Micro-batches from which compiling pays: it takes about as long as it saves in that many."""
WARM_PASSES = 100
"""The same if an earlier run left the code: tracing and loading took 10 of 50 s (docs/evidence/LOG.md)."""
MAX_SHAPES = 8
"""Shapes of micro-batches that blocks are compiled for one by one; code for any shape serves where there are more."""


def why_uncompiled(config: TrainConfig, layout: Layout, steps: int | None) -> str | None:
    """Return why blocks without hand-written kernels run as they are on a GPU, or None if they are compiled.

    ``steps`` are those of the whole run, None if they are unknown: a resumed run computes as it did before.
    """
    if config.compile is False:
        return "compile = false"
    if config.compile is True:
        return None
    if layout.by_deepspeed:
        return "DeepSpeed wraps the layers"
    if config.activation_checkpointing == "selective":
        return 'activation_checkpointing = "selective" needs the single operations of a block'
    passes = None if steps is None else steps * config.gradient_accumulation_steps
    if passes is not None and passes < ENOUGH_PASSES:
        return f"compiling pays from about {ENOUGH_PASSES} micro-batches on, and this run has {passes}"
    return None


def compiled_text_step(config: TrainConfig, cost: Cost, shapes: int, steps: int, longest: int) -> int | None:
    """Return the multiple to which text is padded if blocks are compiled for each shape: one, or few that each pay.

    Otherwise, None, they are compiled for the first shape, then for any. ``shapes`` are those of a run's images,
    ``longest`` are the tokens of its longest caption.
    """
    passes = steps * config.gradient_accumulation_steps
    most = max(1, min(MAX_SHAPES, passes // ENOUGH_PASSES))
    text = cost.text
    for step in (text.most,) if text.is_padded else text.steps:
        if shapes * -(-longest // step) <= most:
            return step
    return None
