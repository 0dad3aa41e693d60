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
    (the features of the empty caption), or zeros where that is None.

    Real tokens come with ``ENCODER.length``. Dropping T5 takes its tokens away, dropping a CLIP leaves zeros in their
    place; a sample that lost all three has the lengths of ``uncond``, or is one token of zeros.
    """
    dropped = np.asarray(drops, dtype=bool)
    gone = torch.from_numpy(dropped.all(axis=1))
    result = {}
    for name, values in features.items():
        encoder, _, part = name.partition(".")
        lost = torch.from_numpy(dropped[:, ENCODERS.index(encoder)].copy())
        if part == "length":
            result[name] = _lengths(encoder, values, lost, gone, uncond)
            continue
        wanted = None if uncond is None else uncond[name].to(values.dtype)
        if wanted is not None and not part:
            longest = max(wanted.shape[-2], values.shape[-2])
            wanted, values = _filled(wanted, longest), _filled(values, longest)
        shape = (-1, *[1] * (values.dim() - 1))
        kept = values.masked_fill(lost.view(shape), 0)
        result[name] = kept if wanted is None else torch.where(gone.view(shape), wanted, kept)
    return result


def _lengths(encoder: str, lengths: Tensor, lost: Tensor, gone: Tensor, uncond: Mapping[str, Tensor] | None) -> Tensor:
    """Tokens of one encoder that each sample still has."""
    is_t5 = encoder == "t5"
    kept = lengths.masked_fill(lost, 0) if is_t5 else lengths
    of_gone = len(uncond[encoder]) if uncond is not None else int(not is_t5)
    return kept.masked_fill(gone, of_gone)


def _filled(tokens: Tensor, rows: int) -> Tensor:
    """Tokens [..., L, W] with zeros behind them up to ``rows``; the same tensor where it has so many."""
    missing = rows - tokens.shape[-2]
    return torch.nn.functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens
