"""Images that equal an earlier one or are similar to it: exactly the pairs that comparing all would find."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from sd3_light.config import DirectoryConfig
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.earlier_images import TOLERANCE, are_similar, open_earlier_images
from sd3_light.sources.preprocess import THUMBNAIL_SIDE, make_thumbnail
from tests.unit.sources.inputs import save

DIRECTORY = DirectoryConfig(path=Path("images"), resolutions=[64], duplicates="drop_similar")


def row(number: int, thumbnail: bytes) -> InputRow:
    return InputRow(f"images#0/{number}.png", f"{number}.png", digest=f"digest {number}", thumbnail=thumbnail)


def scene(number: int, size: tuple[int, int] = (192, 128)) -> Image.Image:
    """Return a smooth random background with a few shapes."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for left, top, red, green, blue in rng.integers(0, 100, (4, 5)).tolist():
        draw.ellipse((left, top, left + 40, top + 25), (2 * red, 2 * green, 2 * blue))
    return image


def thumbnail_of(image: Image.Image, suffix: str = "png", **options: int) -> bytes:
    return make_thumbnail(save(image, suffix, **options), None)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([2, 12, 13, 24, 25, 60]))
def test_the_tree_finds_the_same_pairs_as_comparing_all(seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    shape = THUMBNAIL_SIDE, THUMBNAIL_SIDE, 3
    centres = rng.choice([0, 31, 32, 128, 243, 255], (3, *shape))
    pixels = (centres[rng.integers(0, 3, 40)] + rng.integers(-spread, spread + 1, (40, *shape)) // 2).clip(0, 255)
    # differences of exactly the tolerance, and one more, over the whole image: the edge of a leaf's reach
    pixels[1], pixels[2] = (pixels[0] + TOLERANCE).clip(0, 255), (pixels[0] + TOLERANCE + 1).clip(0, 255)
    thumbnails = pixels.astype(np.uint8).reshape(40, -1)
    kept: list[int] = []
    with pytest.MonkeyPatch.context() as monkeypatch, open_earlier_images() as images:
        monkeypatch.setattr("sd3_light.sources.thumbnail_tree.LEAF_ROWS", 4)
        monkeypatch.setattr("sd3_light.sources.thumbnail_tree._MIN_FREE", 2)
        for number, thumbnail in enumerate(thumbnails):
            expected = next((other for other in kept if are_similar(thumbnail, thumbnails[other])), None)
            duplicate = images.add(row(number, thumbnail.tobytes()), DIRECTORY)
            assert (duplicate and duplicate.first) == (None if expected is None else row(expected, b"").key)
            kept += [number] if duplicate is None else []


def test_images_on_a_flat_background_are_compared_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As icons on white: most of their block means are equal."""
    rng, side, count = np.random.default_rng(0), THUMBNAIL_SIDE, 1500
    thumbnails = np.full((count, side, side, 3), 255, np.uint8)
    for thumbnail, row_, column, colour in zip(
        thumbnails, *rng.integers(0, side - 1, (2, count)), rng.integers(0, 200, (count, 3)), strict=True
    ):
        thumbnail[row_ : row_ + 2, column : column + 2] = colour
    compare = Mock(wraps=are_similar)
    monkeypatch.setattr("sd3_light.sources.earlier_images.are_similar", compare)
    with open_earlier_images() as images:
        for number, thumbnail in enumerate(thumbnails):
            images.add(row(number, thumbnail.tobytes()), DIRECTORY)
    assert sum(len(call.args[1]) for call in compare.call_args_list) < count * 350


def test_leaves_that_no_colour_divides_still_find_every_pair() -> None:
    """Noise on a flat background: no limit separates them, so leaves grow beyond their size."""
    rng = np.random.default_rng(0)
    thumbnails = rng.integers(120, 137, (700, 3 * THUMBNAIL_SIDE**2), dtype=np.uint8)
    with open_earlier_images() as images:
        assert {images.add(row(n, thumbnail.tobytes()), DIRECTORY) for n, thumbnail in enumerate(thumbnails)} == {None}
        copies = [images.add(row(1000 + n, thumbnails[n].tobytes()), DIRECTORY) for n in range(0, 700, 50)]
    assert [copy and copy.first for copy in copies] == [f"images#0/{n}.png" for n in range(0, 700, 50)]


def test_the_tolerance_applies_to_every_colour() -> None:
    thumbnail = np.full(3 * THUMBNAIL_SIDE**2, 100, np.uint8)
    others = np.stack([thumbnail, thumbnail + TOLERANCE, thumbnail - TOLERANCE, thumbnail])
    others[3, 5] += TOLERANCE + 1
    assert are_similar(thumbnail, others).tolist() == [True, True, True, False]


COPIES = {
    "half the size": lambda image: thumbnail_of(image.resize((96, 64), Image.Resampling.LANCZOS)),
    "an odd size": lambda image: thumbnail_of(image.resize((145, 97), Image.Resampling.BICUBIC)),
    "twice the size": lambda image: thumbnail_of(image.resize((384, 256), Image.Resampling.BILINEAR)),
    "JPEG": lambda image: thumbnail_of(image, "jpeg", quality=75),
    "WebP": lambda image: thumbnail_of(image, "webp", quality=75),
    "a large JPEG, decoded at an eighth": lambda image: thumbnail_of(image.resize((1536, 1024)), "jpeg", quality=85),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES.keys())
def test_resized_and_compressed_copies_are_similar(copy: object) -> None:
    with open_earlier_images() as images:
        for number in range(12):
            assert images.add(row(number, thumbnail_of(scene(number))), DIRECTORY) is None
        for number in range(12):
            duplicate = images.add(row(100 + number, copy(scene(number))), DIRECTORY)  # type: ignore[operator]
            assert duplicate is not None
            assert (duplicate.kind, duplicate.first) == ("similar", f"images#0/{number}.png")


def test_other_images_are_not_similar() -> None:
    image = scene(0)
    recoloured = Image.merge("RGB", image.split()[::-1])
    moved = Image.new("RGB", image.size)
    moved.paste(image, (12, 8))
    detail = image.copy()
    ImageDraw.Draw(detail).rectangle((90, 60, 105, 72), "white")
    others = [image, recoloured, moved, detail, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), scene(1)]
    with open_earlier_images() as images:
        assert [images.add(row(n, thumbnail_of(other)), DIRECTORY) for n, other in enumerate(others)] == [None] * 6


def test_equal_bytes_come_before_similarity_and_dropped_images_are_not_compared_with() -> None:
    thumbnail = thumbnail_of(scene(0))
    first, equal, similar = row(0, thumbnail), replace(row(1, thumbnail), digest="digest 0"), row(2, thumbnail)
    with open_earlier_images() as images:
        assert images.add(first, DIRECTORY) is None
        kinds = [images.add(each, DIRECTORY) for each in (equal, similar, replace(similar, key="images#0/3.png"))]
    assert [(each.kind, each.first, each.first_image) for each in kinds if each] == [
        ("drop", first.key, "0.png"),
        ("similar", first.key, "0.png"),
        ("similar", first.key, "0.png"),
    ]


def test_a_mask_is_compared_too() -> None:
    image, left, right = save(scene(0), "png"), Image.new("L", (192, 128)), Image.new("L", (192, 128))
    left.paste(255, (0, 0, 96, 128))
    right.paste(255, (96, 0, 192, 128))
    masks = None, save(left, "png"), save(right, "png"), save(left.resize((96, 64)), "png")
    with open_earlier_images() as images:
        duplicates = [images.add(row(n, make_thumbnail(image, mask)), DIRECTORY) for n, mask in enumerate(masks)]
    assert [duplicate and duplicate.first for duplicate in duplicates] == [None, None, None, "images#0/1.png"]
