"""Groups of images: united by names and thumbnails, also through others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd3_light.sources.earlier_images import are_similar
from sd3_light.sources.groups import group_images, group_positions, image_hash
from sd3_light.sources.preprocess import THUMBNAIL_SIDE


def flat(colour: int) -> bytes:
    return bytes([colour]) * (3 * THUMBNAIL_SIDE**2)


def test_names_and_thumbnails_unite_through_others() -> None:
    lone = (["a"], b"")
    images = [lone, (["b"], flat(0)), (["b", "c"], flat(40)), (["d"], flat(52)), (["e"], flat(90)), lone]
    assert group_images(images).tolist() == [0, 1, 1, 1, 4, 0]
    assert group_images([*images, (["e", "a"], b"")]).tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert group_images([]).tolist() == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([12, 24, 60]))
def test_groups_are_those_of_comparing_all(seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.choice([0, 40, 128, 255], (4, 3 * THUMBNAIL_SIDE**2))
    pixels = (centres[rng.integers(0, 4, 40)] + rng.integers(-spread, spread + 1, (40, 1)) // 2).clip(0, 255)
    thumbnails = pixels.astype(np.uint8)
    names = [f"name {number}" for number in rng.integers(0, 60, 40)]
    expected = list(range(40))
    for one in range(40):
        for other in range(one):
            if names[one] == names[other] or are_similar(thumbnails[one], thumbnails[other][None])[0]:
                low, high = sorted((expected[one], expected[other]))
                expected = [low if root == high else root for root in expected]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("sd3_light.sources.thumbnail_tree.LEAF_ROWS", 4)
        monkeypatch.setattr("sd3_light.sources.thumbnail_tree._MIN_FREE", 2)
        images = [([name], thumbnail.tobytes()) for name, thumbnail in zip(names, thumbnails, strict=True)]
        assert group_images(images).tolist() == expected


def test_positions_are_uniform_over_groups_of_any_size() -> None:
    sizes = np.random.default_rng(0).integers(1, 60, 2000)
    groups = np.repeat(np.cumsum(sizes) - sizes, sizes)
    hashes = np.array([image_hash(str(number)) for number in range(len(groups))], np.uint64)
    positions = group_positions(groups, hashes)
    firsts = np.unique(groups)
    assert all(len(set(positions[groups == first])) == 1 for first in firsts[:50])
    large = sizes > 40
    for some in (large, ~large):
        assert abs(positions[firsts[some]].mean() - 0.5) < 0.03, "a large group is not more likely to be held out"
    # the same groups in another sequence of images
    order = np.random.default_rng(1).permutation(len(groups))
    _, first, number = np.unique(groups[order], return_index=True, return_inverse=True)
    assert (group_positions(first[number], hashes[order]) == positions[order]).all()
