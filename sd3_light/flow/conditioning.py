"""Text dropout: one draw per encoder takes that encoder's tokens and its pooled vector away together."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sd3_light.randomness import stream

ENCODERS = ("clip_l", "clip_g", "t5")


def draw_drops(seed: int, epoch: int, repeat: int, sample_id: int, probability: float) -> tuple[bool, ...]:
    """Which encoders one occurrence of a sample goes without; independent draws, one an encoder (law 1)."""
    draws = stream(seed, "text-dropout", epoch, repeat, sample_id).random(len(ENCODERS))
    return tuple(bool(draw < probability) for draw in draws)


def drop_text(
    features: Mapping[str, Tensor], drops: Sequence[Sequence[bool]], uncond: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Features with dropped encoders zeroed, tokens and pooled alike. A sample that lost all three carries ``uncond``
    (the features of the empty caption), or zeros where that is None."""
    dropped = np.asarray(drops, dtype=bool)
    gone = torch.from_numpy(dropped.all(axis=1))
    result = {}
    for name, values in features.items():
        lost = torch.from_numpy(dropped[:, ENCODERS.index(name.removesuffix(".pooled"))].copy())
        shape = (-1, *[1] * (values.dim() - 1))
        kept = values.masked_fill(lost.view(shape), 0)
        if uncond is not None:
            kept = torch.where(gone.view(shape), uncond[name].to(values.dtype), kept)
        result[name] = kept
    return result
