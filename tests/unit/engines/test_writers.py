"""Replicas share the writing evenly."""

import pytest

from sd3_light.config import SIZES
from sd3_light.engines.writers import assign_writers
from sd3_light.model.linears import linear_layers


@pytest.mark.parametrize("writers", [1, 2, 8])
def test_everyone_writes_about_as_much(writers: int) -> None:
    """Weights and biases take turns in a model, so that by their numbers one of two would write everything."""
    sizes = [count for one in linear_layers(SIZES["sd3_light"]).values() for count in (one[0] * one[1], one[1])]
    who = assign_writers(sizes, writers)
    totals = [sum(size for size, writer in zip(sizes, who, strict=True) if writer == one) for one in range(writers)]
    assert max(totals) < 1.05 * sum(sizes) / writers
    assert who == assign_writers(sizes, writers)


def test_more_writers_than_tensors() -> None:
    assert sorted(assign_writers([5, 1], 4)) == [0, 1]
    assert assign_writers([], 2) == []
