"""Edges: where they are, from which contrast on, and how far they continue."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sd3_light.cache.edges import draw_edges


def step(contrast: float, side: int = 64, row: bool = False) -> Image.Image:
    """Black beside grey, at the middle column or row."""
    plane = np.zeros((side, side), dtype=np.uint8)
    plane[:, side // 2 :] = round(255 * contrast)
    return Image.fromarray(plane.T if row else plane).convert("RGB")


def edges(image: Image.Image, threshold: float = 0.2) -> np.ndarray:
    found = np.asarray(draw_edges(image, threshold))
    assert set(np.unique(found)) <= {0, 255}
    assert found.shape == (image.height, image.width)
    return found == 255


@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
def test_a_step_is_a_line_of_one_pixel_at_its_place(row: bool) -> None:
    found = edges(step(1.0, row=row))
    found = found.T if row else found
    (columns,) = np.nonzero(found.any(0))
    assert found.sum() == 64
    assert len(columns) == 1
    assert columns[0] in (31, 32)


@pytest.mark.parametrize("contrast", [0.1, 0.3, 0.8])
def test_the_threshold_is_the_contrast_of_a_step(contrast: float) -> None:
    image = step(contrast)
    assert edges(image, 0.9 * contrast).sum() == 64
    assert not edges(image, 1.1 * contrast).any()


def test_an_edge_continues_above_half_of_the_threshold_and_nothing_begins_there() -> None:
    plane = np.zeros((64, 96), dtype=np.uint8)
    plane[:, 48:] = np.linspace(220, 80, 64).astype(np.uint8)[:, None]  # a step that fades from 0.86 to 0.31
    image = Image.fromarray(plane).convert("RGB")
    strong = edges(image, 0.5)
    assert strong[:, 40:56].any(1).all(), "the weak end is joined to the strong one"
    plane[:32] = 0
    assert not edges(Image.fromarray(plane[36:]).convert("RGB"), 0.6).any(), "a weak edge alone is none"


def test_a_circle_is_closed() -> None:
    image = Image.new("RGB", (200, 160), (230, 220, 210))
    ImageDraw.Draw(image).ellipse((40, 20, 140, 120), fill=(30, 60, 160))
    found = edges(image)
    rows, columns = np.nonzero(found)
    radii = np.hypot(rows - 70, columns - 90)
    assert abs(radii - 50).max() < 2
    angles = np.sort(np.arctan2(rows - 70, columns - 90))
    assert np.diff(angles).max() < 0.05


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3, 2)])
def test_tiny_and_plain_images_have_no_edge(size: tuple[int, int]) -> None:
    assert not edges(Image.new("RGB", size, (90, 10, 200))).any()
