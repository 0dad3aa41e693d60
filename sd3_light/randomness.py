"""Law 1: a sample's randomness belongs to the sample.

Every draw is a pure function of ``(seed, purpose, epoch, repeat, sample id)``. The generator is counter-based (Philox
4x64): seed and purpose form its key; epoch, repeat and sample id form its counter. Streams never overlap, and no state
has to be saved.

`stream` returns one sample's generator. `first_words` computes the first words of many streams at once, and `philox`
any words on any device: the same bits.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

_MASK_32 = (1 << 32) - 1
_MASK_63 = (1 << 63) - 1

WORDS_PER_BLOCK = 4
"""Words that `philox` returns for one counter."""
NORMALS_PER_WORD = 2
_TABLE_SIZE = 1 << 16
_FEW = 64
"""Below this number of streams, one generator each is faster than arithmetic on arrays."""


def sample_id(key: str) -> int:
    """Return the stable 63-bit id of a source key (63 bits, so that it fits a signed tensor)."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") & _MASK_63


def stream(seed: int, purpose: str, epoch: int, repeat: int, sample_id: int) -> np.random.Generator:
    """Return the generator of one purpose for one occurrence of one sample in one epoch."""
    assert 0 <= epoch <= _MASK_32, epoch
    assert 0 <= repeat <= _MASK_32, repeat
    key = _Key(*_stream_key(seed, purpose))
    # the lowest word counts the draws; the others identify the sample
    counter = np.array([0, 0, (epoch << 32) | repeat, sample_id], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key, counter))  # type: ignore[arg-type]  # numpy's stubs are narrower


def _stream_key(seed: int, purpose: str) -> tuple[int, int]:
    """Return the Philox key of a purpose."""
    return seed & ((1 << 64) - 1), _purpose_key(purpose)


class _Key(ISeedSequence):
    """Provides a fixed Philox key. Passing ``key=`` gives the same stream, but numpy then also gathers entropy from the
    system and discards it, which costs more than all draws of a small sample."""

    def __init__(self, *words: int) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Return the key."""
        assert n_words == len(self.words) and dtype == np.uint64, (n_words, dtype)
        return np.array(self.words, dtype=np.uint64)


@cache
def _purpose_key(purpose: str) -> int:
    return sample_id(f"purpose/{purpose}")


# --- many streams at once ----------------------------------------------------------------------

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10


def round_keys(seed: int, purpose: str) -> list[list[int]]:
    """Return the two words [10, 2] that each round of `philox` adds to a purpose's streams."""
    key = _stream_key(seed, purpose)
    return [
        [signed(word + number * step) for word, step in zip(key, _KEY_STEPS, strict=True)] for number in range(ROUNDS)
    ]


def philox(counter: Sequence[Any], keys: Any) -> tuple[Any, Any, Any, Any]:
    """Return the four words of Philox 4x64-10 (Salmon et al. 2011) for each element of the four counter words.

    Words are arrays or tensors of int64 with the bits of unsigned numbers, because tensors have no unsigned arithmetic.
    Products wrap. ``keys`` are `round_keys`, as numbers or a tensor. The first words of a `stream` have the counter
    (1, 0, epoch << 32 | repeat, sample id), the next (2, ...).
    """
    a, b, c, d = counter
    for number in range(ROUNDS):
        first_high, first_low = _product(a, MULTIPLIERS[0])
        second_high, second_low = _product(c, MULTIPLIERS[1])
        a = second_high ^ b ^ keys[number][0]
        b = second_low
        c = first_high ^ d ^ keys[number][1]
        d = first_low
    return a, b, c, d


def _product(word: Any, factor: int) -> tuple[Any, Any]:
    """Return the high and low words of the unsigned 128-bit product."""
    low_factor = factor & _MASK_32
    high_factor = factor >> 32
    low = word & _MASK_32
    high = _high(word)
    middle = high * low_factor + _high(low * low_factor)  # at most 2**64 - 2**32: no carry is lost
    cross = low * high_factor + (middle & _MASK_32)
    return high * high_factor + _high(middle) + _high(cross), word * signed(factor)


def _high(word: Any) -> Any:
    """Return the upper 32 bits; the shift alone would repeat the sign."""
    return (word >> 32) & _MASK_32


def signed(word: int) -> int:
    """Return the int64 with the bits of the lowest 64 of a number."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def occurrence_words(epoch: Any, repeat: Any, sample_id: Any) -> NDArray[np.int64]:
    """Return the counter words [N, 2] of N occurrences of samples: epoch and repeat, and the id."""
    occurrence = (np.asarray(epoch, dtype=np.int64) << 32) | np.asarray(repeat, dtype=np.int64)
    return np.stack(np.broadcast_arrays(occurrence, np.asarray(sample_id, dtype=np.int64)), axis=1)


def streams(seed: int, purpose: str, occurrences: NDArray[np.int64]) -> Iterator[np.random.Generator]:
    """Yield the `stream` of each occurrence."""
    for occurrence, identity in occurrences.tolist():
        yield stream(seed, purpose, (occurrence >> 32) & _MASK_32, occurrence & _MASK_32, identity)


def first_words(seed: int, purpose: str, occurrences: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the first words [4, N] of the streams of N occurrences."""
    if len(occurrences) < _FEW:
        return np.stack([draw.bit_generator.random_raw(4) for draw in streams(seed, purpose, occurrences)], axis=1)
    occurrence, identity = occurrences.T
    words = philox((np.ones_like(identity), np.zeros_like(identity), occurrence, identity), round_keys(seed, purpose))
    return np.stack(words).view(np.uint64)


def uniforms(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that `Generator.random` makes of words."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choices(seed: int, purpose: str, occurrences: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a choice below each of N counts, the same as `Generator.integers` of each stream."""
    if counts.max(initial=1) == 1:
        return np.zeros_like(counts)
    product = (first_words(seed, purpose, occurrences)[0].view(np.int64) & _MASK_32) * counts
    chosen: NDArray[np.int64] = product >> 32
    # Lemire's method rejects some products whose lower half is below the count: one in millions, left to numpy
    unsure = np.flatnonzero((product & _MASK_32) < counts)
    for number, draw in zip(unsure.tolist(), streams(seed, purpose, occurrences[unsure]), strict=True):
        chosen[number] = draw.integers(counts[number])
    return chosen


# --- normals -----------------------------------------------------------------------------------


@cache
def normal_table() -> NDArray[np.float32]:
    """Return 2**16 numbers such that the sum of two, each drawn uniformly, is standard normal.

    They are the means of 2**16 equally likely intervals of the normal distribution, scaled to variance 1/2. The sum's
    distribution function is exact to 8e-6 and its variance to 1e-9. Its excess kurtosis is -8e-5; values beyond 4 are
    0.5% rarer than normal ones, beyond 5 10%, and none is beyond 6.21. A lookup and one addition of float32 give the
    same bits on every device, which logarithms and cosines do not.
    """
    normal = NormalDist()
    edges = (normal.inv_cdf(number / _TABLE_SIZE) for number in range(_TABLE_SIZE // 2, _TABLE_SIZE))
    positive = -np.diff([*map(normal.pdf, edges), 0.0])
    both: NDArray[np.float64] = np.concatenate([-positive[::-1], positive])
    return np.asarray(both / np.sqrt(2 * (both**2).mean()), dtype=np.float32)


def fill_normals(draw: np.random.Generator, out: NDArray[np.float32]) -> None:
    """Fill a contiguous array with standard normals of a stream, two per word, from its lower and its upper half."""
    words: NDArray[np.uint64] = draw.bit_generator.random_raw(-(-out.size // NORMALS_PER_WORD))
    parts = normal_table().take(words.astype("<u8", copy=False).view("<u2"))
    np.add(parts[0::2][: out.size], parts[1::2][: out.size], out=out.reshape(-1))


def fill_rows(seed: int, purpose: str, words: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Fill row n of an array with the normals of a purpose for the occurrence with `occurrence_words` n."""
    for row, draw in zip(out, streams(seed, purpose, words), strict=True):
        fill_normals(draw, row[None])  # a row may be one number
