"""Parameter groups: weight decay applies to weights of matrix products, not to norms, biases and embeddings."""

from collections.abc import Iterable
from typing import Any

from torch import nn

EMBEDDINGS = ("pos_embed.", "time_text_embed.", "context_embedder.")
BLOCKS = "transformer_blocks."


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter of the denoiser, by its canonical name."""
    return parameter.dim() >= 2 and not name.startswith(EMBEDDINGS)


def is_block_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix inside a joint block."""
    return parameter.dim() == 2 and name.startswith(BLOCKS)


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer groups with and without decay; empty ones are left out."""
    groups: dict[float, list[nn.Parameter]] = {weight_decay: []} if weight_decay == 0 else {weight_decay: [], 0.0: []}
    for name, parameter in named:
        groups[weight_decay if decays(name, parameter) else 0.0].append(parameter)
    return [{"params": members, "weight_decay": decay} for decay, members in groups.items() if members]
