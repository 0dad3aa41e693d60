"""Listing, building and reading use memory for one part, one shard and the list of shards, not per sample (law 10).

Counts Python's allocations. Parts and shards are small and of equal size, so that the results do not depend on chance.
"""

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sd3_light.cache import dataset_build
from sd3_light.cache import verb as cache
from sd3_light.cache.sorted_array import SortedArray
from sd3_light.data import cache_plan
from sd3_light.families.sd3 import encoders as frozen_parts
from sd3_light.sources import catalogue
from tests import data_path

COLUMNS = dict.fromkeys(("moments", "mask", "clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"), "0")
FEW, MANY = 200, 2000
SHARD_BYTES = 4 << 10
"""Allowed bytes per entry of plan and manifest; a sample with its captions takes several hundred."""
FREE_LISTS = 512 << 10
"""Bytes of small objects that the interpreter keeps for reuse: a constant, but more than the smaller run needs."""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, int]]]:
    """Peak bytes of each stage for few and for many samples."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (catalogue, cache_plan):
            patch.setattr(module, "is_end", lambda count, identity, most: count >= most)
        for module in (catalogue, cache_plan):
            patch.setattr(module, "PART_ROWS", data_path.ROWS)
        patch.setattr(cache_plan, "_SHARDS_PER_BATCH", 2)
        patch.setattr(frozen_parts, "FrozenParts", data_path.ZeroEncoders)
        # hashing the encoders uses a buffer that would hide the memory of planning
        for module in (cache, dataset_build):
            patch.setattr(module, "make_identity", lambda *_: {"format": 0, "text_tokens": "real", "columns": COLUMNS})
        folder = tmp_path_factory.mktemp("memory")
        measure(folder / "warm", data_path.ROWS)  # warm-up: one-time allocations
        grow_intern_table()
        yield {count: measure(folder / str(count), count) for count in (FEW, MANY)}


def grow_intern_table() -> None:
    """Grow the interpreter's table of interned strings now: several MB that would distort a later measurement."""
    strings: list[str] = []
    tracemalloc.start()
    try:
        grown = False
        while not grown:
            before = tracemalloc.get_traced_memory()[0]
            strings.append(sys.intern(f"grow the table {len(strings)}"))
            grown = tracemalloc.get_traced_memory()[0] - before > 1 << 20
    finally:
        tracemalloc.stop()


def measure(folder: Path, count: int) -> dict[str, int]:
    data_path.write_samples(folder, count)
    peaks = {}
    for part in data_path.PARTS:
        gc.collect()
        tracemalloc.start()
        try:
            data_path.run_part(part, folder)
            peaks[part] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return peaks


@pytest.mark.parametrize("part", data_path.PARTS)
def test_memory_grows_only_with_the_list_of_shards(peaks: dict[int, dict[str, int]], part: str) -> None:
    growth = peaks[MANY][part] - peaks[FEW][part]
    allowed = FREE_LISTS + SHARD_BYTES * (MANY - FEW) // data_path.ROWS
    assert growth < allowed, f"{growth / (MANY - FEW):.0f} additional bytes per additional sample"


def test_a_number_set_contains_exactly_the_added_numbers() -> None:
    random = np.random.default_rng(0)
    known, others = np.split(random.permutation(1 << 16), 2)
    numbers = SortedArray(np.int64)
    for chunk in np.array_split(known, 7):
        numbers.add(chunk)
    assert numbers.contains(known).all()
    assert not numbers.contains(others).any()
    assert numbers.contains([others[0], known[0], -1, 1 << 62]).tolist() == [False, True, False, False]
    assert not SortedArray(np.int64).contains([0, 1]).any()
