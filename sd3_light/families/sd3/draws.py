"""Random choices per sample (law 1): tokens that run through routed blocks, crops of the position table, dropped text.

A dropped encoder loses its tokens and its pooled vector together.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config.schema_blocks import num_kept
from sd3_light.randomness import first_words, streams, uniforms

ENCODERS = ("clip_l", "clip_g", "t5")


def draw_kept(seed: int, occurrences: NDArray[np.int64], tokens: int, share: float) -> NDArray[np.int64]:
    """Return the image tokens [B, K] that are kept when a share of them is routed past blocks, in their order.

    Each token has a word of its sample's stream, whose last bits are replaced by its number; the tokens with the lowest
    words are kept.
    """
    count = num_kept(tokens, share)
    bits = np.uint64((tokens - 1).bit_length())
    words = np.empty((len(occurrences), tokens), dtype=np.uint64)
    for at, draw in enumerate(streams(seed, "token-routing", occurrences)):
        words[at] = draw.bit_generator.random_raw(tokens)
    words = (words >> bits << bits) | np.arange(tokens, dtype=np.uint64)  # no two are equal
    lowest = np.partition(words, count - 1, axis=1)[:, :count]  # `argsort` takes 20 times longer
    kept: NDArray[np.int64] = np.sort(lowest.view(np.int64) & ((1 << int(bits)) - 1), axis=1)
    return kept


def draw_corners(
    seed: int, occurrences: NDArray[np.int64], grid: tuple[int, int], side: int, num_positions: int
) -> NDArray[np.int64]:
    """Return the first row and column [B, 2] of a crop of the position table for ``grid`` rows and columns.

    Crops are within the central square of ``side`` places, and centred, as in sampling, where that is too small. The
    table has ``num_positions`` places per side.
    """
    size = np.array(grid)
    square = np.maximum(size, side)
    chosen = uniforms(first_words(seed, "position-crop", occurrences)[:2]).T * (square - size + 1)
    corners: NDArray[np.int64] = (num_positions - square) // 2 + chosen.astype(np.int64)
    return corners


def draw_drops(
    seed: int, occurrences: NDArray[np.int64], probability: float, joint: bool = False
) -> list[tuple[bool, ...]]:
    """Return which encoders are dropped for each occurrence of a sample (law 1).

    There is one independent draw per encoder, or with ``joint`` one for all.
    """
    draws = uniforms(first_words(seed, "text-dropout", occurrences)[: 1 if joint else len(ENCODERS)])
    dropped = [tuple(of_sample) for of_sample in (draws < probability).T.tolist()]
    return [of_sample * len(ENCODERS) for of_sample in dropped] if joint else dropped


def drop_text(
    texts: Mapping[str, Sequence[Tensor]],
    drops: Sequence[Sequence[bool]],
    uncond: Mapping[str, Tensor] | None,
    real: bool = False,
) -> dict[str, list[Tensor]]:
    """Return the texts (one tensor per part and sample) with tokens and pooled vectors of dropped encoders zeroed.

    A sample without any encoder gets ``uncond`` (the features of the empty caption), or zeros if that is None. Nothing
    is copied. With ``real`` tokens, dropping T5 removes its tokens and dropping a CLIP zeroes its tokens; a sample
    without any encoder has the tokens of ``uncond``, or one zero token.
    """
    result: dict[str, list[Tensor]] = {}
    for name, values in texts.items():
        encoder, _, pooled = name.partition(".")
        column = ENCODERS.index(encoder)
        empty = None if uncond is None else uncond[name].to(values[0].dtype)
        zero = values[0].new_zeros(())
        result[name] = []
        for value, dropped in zip(values, drops, strict=True):
            if not dropped[column]:
                result[name].append(value)
            elif empty is not None and all(dropped):
                result[name].append(empty)
            elif pooled or not real:
                result[name].append(zero.expand(value.shape))
            else:
                rows = 0 if encoder == "t5" else 1 if all(dropped) else len(value)
                result[name].append(zero.expand(rows, value.shape[-1]))
    return result
