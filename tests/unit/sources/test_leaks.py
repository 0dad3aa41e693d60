"""Training images in evaluation sets: found by bytes and by thumbnails, each counted once."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from sd3_light.config import DirectoryConfig
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.leaks import Leak, colours, is_used, open_evaluation_images
from sd3_light.sources.preprocess import THUMBNAIL_SIDE


def row(number: int, colour: int | None = None, digest: str = "") -> InputRow:
    thumbnail = b"" if colour is None else bytes([colour]) * (3 * THUMBNAIL_SIDE**2)
    digest = digest or f"digest {number}"
    return InputRow(f"set#0/{number}.png", digest=digest, thumbnail=thumbnail, width=64, height=64)


def test_equal_and_similar_images_are_counted_once_each_and_a_few_pairs_shown() -> None:
    with open_evaluation_images() as images:
        assert not images
        for number, colour in enumerate((10, 50, 90, 130)):
            images.add("held", row(number, colour))
        images.add("other", row(9, 250))
        assert images
        images.compare(row(100, 51))
        images.compare(row(101, 52))
        images.compare(row(102, 12, "digest 0"))
        images.compare(row(103, 170))
        pairs = (("set#0/1.png", "set#0/100.png"), ("set#0/0.png", "set#0/102.png"))
        assert images.leaks() == [Leak("held", 4, 1, 1, pairs)]
        images.compare(row(104, digest="digest 1"))
        (leak,) = images.leaks()
        assert (leak.equal, leak.similar) == (2, 0), "equal bytes say more than similar ones"
    with open_evaluation_images() as images:
        for number in range(10):
            images.add("held", row(number))
        for number in range(10):
            images.compare(row(number))
        (leak,) = images.leaks()
    assert (leak.equal, len(leak.pairs)) == (10, 3)


def test_masks_are_not_compared() -> None:
    pixels = np.full((THUMBNAIL_SIDE, THUMBNAIL_SIDE, 4), 77, np.uint8)
    pixels[..., 3] = 200
    assert colours(pixels.tobytes()) == row(0, 77).thumbnail
    with open_evaluation_images() as images:
        images.add("held", replace(row(0), thumbnail=pixels.tobytes()))
        images.compare(row(1, 77))
        assert images.leaks()[0].similar == 1


def test_rows_that_are_left_out_do_not_count() -> None:
    directory = DirectoryConfig(path=Path("images"), resolutions=[64], where="width >= 64", min_side=32)
    assert is_used(row(0), directory)
    assert not is_used(replace(row(0), reason="unreadable"), directory)
    assert not is_used(replace(row(0), width=63), directory)
    assert not is_used(replace(row(0), height=16), directory)
