"""Scan, build and read hold memory for a part, a shard and the list of shards, not for samples (law 10).

The parts of `benchmarks/memory.py` at a small size, where Python's own allocations are counted exactly; parts and
shards of the data path are made small and equal, so that what is held of one of them does not hang on chance.
"""

import gc
import importlib.util
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sd3_light.data.building import cache_plan, catalogue, chunks
from sd3_light.stages import cache
from sd3_light.stages.cache.number_set import NumberSet

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory.py"
FEW, MANY, ROWS = 200, 2000, 50
A_UNIT = 4 << 10
"""Bytes that an entry of the plan and of the manifest may take; a sample with its texts takes several hundred."""
FREE_LISTS = 512 << 10
"""Bytes of small objects that the interpreter keeps for later use: a constant, but more than the smaller run needs."""


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    """The benchmark as a module, with tars and shards as small as the test's."""
    spec = importlib.util.spec_from_file_location("memory_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.A_TAR = 100
    small = f"sd3_shard_size = {ROWS}\nshuffle_window = 1\n[model]"
    module.TRAIN = module.TRAIN.replace("num_workers = 2", "num_workers = 0").replace("[model]", small)
    return module


@pytest.fixture(scope="module")
def peaks(memory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, int]]]:
    """Peak bytes of each part over few and over many samples."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chunks, cache_plan):
            patch.setattr(module, "is_end", lambda count, identity, most: count >= most)
        for module in (catalogue, cache_plan):
            patch.setattr(module, "PART_ROWS", ROWS)
        patch.setattr(cache_plan, "_UNITS_PER_BATCH", 2)
        patch.setattr(cache, "FrozenParts", memory.NoParts)
        # hashing the frozen parts takes a buffer that would hide what planning holds
        patch.setattr(cache, "make_recipe", lambda *_: {"text_tokens": "real"})
        place = tmp_path_factory.mktemp("memory")
        measure(memory, place / "warm", ROWS)  # what is made once a process
        yield {count: measure(memory, place / str(count), count) for count in (FEW, MANY)}


def measure(memory: ModuleType, folder: Path, count: int) -> dict[str, int]:
    """The peak of each part's own allocations."""
    memory.lay(folder, count)
    found = {}
    for part in (part for part in memory.PARTS if part != "read2"):
        (folder / "data.toml").write_text(memory.data_toml(part), encoding="utf-8")
        gc.collect()
        tracemalloc.start()
        try:
            memory.run_part(part, folder)
            found[part] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return found


@pytest.mark.parametrize("part", ["list", "look", "plan", "build", "again", "stale", "read0"])
def test_memory_grows_with_the_list_of_shards_alone(peaks: dict[int, dict[str, int]], part: str) -> None:
    growth = peaks[MANY][part] - peaks[FEW][part]
    allowed = FREE_LISTS + A_UNIT * (MANY - FEW) // ROWS
    assert growth < allowed, f"{growth / (MANY - FEW):.0f} bytes more for each sample more"


def test_numbers_are_found_among_others() -> None:
    random = np.random.default_rng(0)
    known, others = np.split(random.permutation(1 << 16), 2)
    with NumberSet() as numbers:
        for piece in np.array_split(known, 7):
            numbers.add(piece)
        assert numbers.holds(known).all()
        assert not numbers.holds(others).any()
        assert numbers.holds([others[0], known[0], -1, 1 << 62]).tolist() == [False, True, False, False]


def test_a_set_of_no_numbers_holds_none() -> None:
    with NumberSet() as numbers:
        numbers.add([])
        assert not numbers.holds([0, 1]).any()
