"""`noise.draw_normals` as one Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from sd3_light.randomness import MULTIPLIERS, NORMALS_PER_WORD, ROUNDS, WORDS_PER_BLOCK, signed

_BLOCKS_PER_PROGRAM = 128
_NORMALS_PER_BLOCK = WORDS_PER_BLOCK * NORMALS_PER_WORD


@triton.jit
def _normals(out, keys, occurrences, table, count, FIRST: tl.constexpr, SECOND: tl.constexpr, ROUNDS: tl.constexpr,
             BLOCKS: tl.constexpr):  # fmt: skip
    """Draw the normals of some blocks of one sample. Words are int64 as in `randomness.philox`; umulhi is unsigned."""
    sample = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    nothing = tl.zeros([BLOCKS], dtype=tl.int64)
    first_factor = nothing + FIRST
    second_factor = nothing + SECOND
    a = nothing + block + 1
    b = nothing
    c = nothing + tl.load(occurrences + 2 * sample)
    d = nothing + tl.load(occurrences + 2 * sample + 1)
    for number in tl.static_range(ROUNDS):
        first_high = tl.umulhi(a, first_factor)
        first_low = a * first_factor
        second_high = tl.umulhi(c, second_factor)
        second_low = c * second_factor
        a = second_high ^ b ^ tl.load(keys + 2 * number)
        b = second_low
        c = first_high ^ d ^ tl.load(keys + 2 * number + 1)
        d = first_low
    row = out + sample * count
    at = 8 * block
    _store(row, at, a, table, count)
    _store(row, at + 2, b, table, count)
    _store(row, at + 4, c, table, count)
    _store(row, at + 6, d, table, count)


@triton.jit
def _store(row, at, word, table, count):
    """Store the two normals of each word."""
    first = tl.load(table + (word & 0xFFFF)) + tl.load(table + ((word >> 16) & 0xFFFF))
    second = tl.load(table + ((word >> 32) & 0xFFFF)) + tl.load(table + ((word >> 48) & 0xFFFF))
    tl.store(row + at, first, mask=at < count)
    tl.store(row + at + 1, second, mask=at + 1 < count)


def draw_normals(keys: Tensor, occurrences_B2: Tensor, count: int, table: Tensor) -> Tensor:
    """Return what `noise.draw_normals` returns."""
    assert occurrences_B2.is_contiguous() and keys.is_contiguous()
    out = torch.empty(len(occurrences_B2), count, device=table.device)
    grid = (len(occurrences_B2), triton.cdiv(count, _NORMALS_PER_BLOCK * _BLOCKS_PER_PROGRAM))
    _normals[grid](out, keys, occurrences_B2, table, count, *map(signed, MULTIPLIERS), ROUNDS, _BLOCKS_PER_PROGRAM)
    return out
