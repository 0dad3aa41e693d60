"""Connected pixels, compared with a simple flood fill."""

import numpy as np

from sd3_light.world.segment import Ints, connected


def _flood(colours: Ints) -> Ints:
    labels = np.full(colours.shape, -1)
    for number, start in enumerate(map(tuple, np.argwhere(colours >= 0))):
        if labels[start] >= 0:
            continue
        stack = [start]
        while stack:
            y, x = stack.pop()
            if labels[y, x] >= 0:
                continue
            labels[y, x] = number
            for pixel in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                inside = 0 <= pixel[0] < colours.shape[0] and 0 <= pixel[1] < colours.shape[1]
                if inside and colours[pixel] == colours[y, x]:
                    stack.append(pixel)
    return labels


def test_connected_agrees_with_a_flood_fill() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        colours = rng.integers(-1, 2, (int(rng.integers(2, 20)), int(rng.integers(2, 20))))
        labels, expected = connected(colours), _flood(colours)
        assert np.array_equal(labels < 0, expected < 0)
        pairs = {(int(a), int(b)) for a, b in zip(labels[labels >= 0], expected[expected >= 0], strict=True)}
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    colours = np.array([[0, -1, 0], [0, -1, 0], [1, 1, -1]])
    assert sorted(np.unique(connected(colours)).tolist()) == [-1, 0, 1, 2]
