"""Selective activation checkpointing: which results of a block stay in memory for its backward pass."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().removeprefix("aten::")
    is_saved = name.startswith(("mm", "addmm", "bmm", "_scaled_dot_product"))
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


save_products = partial(create_selective_checkpoint_contexts, _policy)
"""The `context_fn` of a checkpoint that keeps the results of matrix products and attention."""
