"""Content-defined chunks: bounded sizes, and a change affects only nearby chunks."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from sd3_light.sources.catalogue import chunks

COUNT, MOST = 20_000, 200
IDS = np.random.default_rng(0).integers(0, 2**63, COUNT).tolist()


def cut(ids: Sequence[int], most: int = MOST) -> list[tuple[int, ...]]:
    return [tuple(chunk) for chunk in chunks(ids, int, most)]


def test_items_keep_their_order() -> None:
    assert [item for chunk in cut(IDS) for item in chunk] == IDS
    assert cut([]) == []
    assert cut(IDS[:1]) == [(IDS[0],)]


@pytest.mark.parametrize(
    ("most", "low", "high"),
    [(1, 1, 1), (2, 1.2, 1.8), (3, 1.4, 2), (4, 1.6, 2.2), (5, 1.7, 2.3), (8, 2.7, 3.3), (30, 14, 18), (200, 95, 125)],
)
def test_sizes_are_bounded_and_average_about_half(most: int, low: float, high: float) -> None:
    sizes = [len(chunk) for chunk in cut(IDS, most)]
    assert max(sizes) <= most
    assert min(sizes[:-1]) >= most // 4
    assert len(sizes) > 1
    # about half: neither many small chunks nor most of them cut at the limit
    assert low <= np.mean(sizes[:-1]) <= high


@pytest.mark.parametrize("repeated", [0, 1, 2**63 - 1])
def test_sizes_are_bounded_for_any_ids(repeated: int) -> None:
    sizes = {len(chunk) for chunk in cut([repeated] * 1000, 100)[:-1]}
    assert sizes <= {25, 100}


def test_chunks_are_yielded_as_they_are_complete() -> None:
    """The iterable is not read beyond the requested chunk."""
    taken = []

    def items() -> object:
        for item in IDS:
            taken.append(item)
            yield item

    results = chunks(items(), int, MOST)  # type: ignore[arg-type, var-annotated]
    first, second = next(results), next(results)
    assert taken == first + second


@pytest.mark.parametrize("kind", ["insert", "remove"])
def test_a_change_affects_only_nearby_chunks(kind: str) -> None:
    draws = np.random.default_rng(1)
    before = set(cut(IDS))
    changed = []
    for _ in range(50):
        at = int(draws.integers(1, COUNT - 1))
        rest = IDS[at + 1 :] if kind == "remove" else [int(draws.integers(0, 2**63)), *IDS[at:]]
        changed.append(len(set(cut([*IDS[:at], *rest])) - before))
    assert min(changed) >= 1
    assert np.mean(changed) < 3
    assert max(changed) < 15, "of more than 150"


def test_a_changed_item_with_the_same_id_and_appended_ones_change_one_chunk() -> None:
    items = [(identity, "old") for identity in IDS]
    before = list(chunks(items, lambda item: item[0], MOST))
    items[7000] = (IDS[7000], "new")
    after = list(chunks(items, lambda item: item[0], MOST))
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    earlier = cut(IDS[:-500])
    assert cut(IDS)[: len(earlier) - 1] == earlier[:-1]
    assert all(first[-1] % (MOST // 3) == 0 or len(first) == MOST for first, _ in pairwise(earlier))
