"""Random choices per image (law 1): the tokens that run through routed blocks, and the crop of the position table."""

import numpy as np
from numpy.typing import NDArray

from sd3_light.config.schema_blocks import num_kept
from sd3_light.randomness import first_words, streams, uniforms


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
