"""Writers get balanced shares."""

import pytest

from sd3_light.config import SIZES
from sd3_light.engines.protocol import assign_writers


@pytest.mark.parametrize("writers", [1, 2, 8])
def test_writers_get_about_the_same_size(writers: int) -> None:
    """Weights and biases alternate in a model: by index, one of two writers would write nearly everything."""
    layers = SIZES["sd3_light"].linear_layers().values()
    sizes = [size for inputs, outputs in layers for size in (inputs * outputs, outputs)]
    assigned = assign_writers(sizes, writers)
    totals = [0] * writers
    for size, writer in zip(sizes, assigned, strict=True):
        totals[writer] += size
    assert max(totals) < 1.05 * sum(sizes) / writers
    assert assigned == assign_writers(sizes, writers)
    assert sorted(assign_writers([5, 1], 4)) == [0, 1]
    assert assign_writers([], 2) == []
