"""Law 1: a sample's randomness belongs to the sample.

Every draw is a pure function of ``(seed, purpose, epoch, repeat, sample id)``. The generator is counter-based (Philox
4x64): seed and purpose form its key; epoch, repeat and sample id form its counter. Streams never overlap, and no state
has to be saved.
"""

from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_MASK_32 = (1 << 32) - 1
_MASK_63 = (1 << 63) - 1


def sample_id(key: str) -> int:
    """Return the stable 63-bit id of a source key (63 bits, so that it fits a signed tensor)."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") & _MASK_63


def stream(seed: int, purpose: str, epoch: int, repeat: int, sample_id: int) -> np.random.Generator:
    """Return the generator of one purpose for one occurrence of one sample in one epoch."""
    assert 0 <= epoch <= _MASK_32, epoch
    assert 0 <= repeat <= _MASK_32, repeat
    key = _Key(seed & ((1 << 64) - 1), _purpose_key(purpose))
    # the lowest word counts the draws; the others identify the sample
    counter = np.array([0, 0, (epoch << 32) | repeat, sample_id], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key, counter))  # type: ignore[arg-type]  # numpy's stubs are narrower


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
