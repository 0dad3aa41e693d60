"""Rendering: sizes, determinism, objects inside and apart, clear relations."""

from itertools import combinations

import numpy as np
import pytest

from sd3_light.world import draw_scene, render_scene
from sd3_light.world.rendering import PlacedObject, place_objects
from sd3_light.world.scene import BACKGROUNDS, COLOURS, SCENE_KINDS, Item, Scene

IMAGE_SHAPES = [(64, 64), (80, 48), (48, 80), (128, 96), (32, 48)]


@pytest.mark.parametrize(("width", "height"), IMAGE_SHAPES)
def test_objects_stay_inside_and_apart(width: int, height: int) -> None:
    rng = np.random.default_rng(0)
    scale = (width * height) ** 0.5 / 64
    for index in range(200):
        placed = place_objects(draw_scene(rng, held_out=False, kind=SCENE_KINDS[index % 3]), width, height, rng)
        for item in placed:
            radius = item.diameter / 2 + scale
            assert radius <= item.x <= width - radius
            assert radius <= item.y <= height - radius
        for first, second in combinations(placed, 2):
            gap = max(abs(first.x - second.x), abs(first.y - second.y)) - (first.diameter + second.diameter) / 2
            assert gap >= 2.5 * scale


@pytest.mark.parametrize(("width", "height"), IMAGE_SHAPES)
def test_relations_are_clear(width: int, height: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        scene = draw_scene(rng, held_out=False, kind="pair")
        first, second = place_objects(scene, width, height, rng)
        assert scene.relation is not None
        along, across = _offset(first, second, scene.relation)
        assert along > 2 * abs(across)


def _offset(first: PlacedObject, second: PlacedObject, relation: str) -> tuple[float, float]:
    dx, dy = second.x - first.x, second.y - first.y
    return {"left of": (dx, dy), "right of": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[relation]


@pytest.mark.parametrize(("width", "height"), IMAGE_SHAPES)
def test_a_rendering_has_its_size_and_flat_colours_and_large_is_larger(width: int, height: int) -> None:
    scene = Scene("single", (Item("square", "blue", "large"),), None, 1, "pink")
    image = render_scene(scene, width, height, np.random.default_rng(0))
    assert (image.mode, image.size) == ("RGB", (width, height))
    assert image.getpixel((0, 0)) == BACKGROUNDS["pink"]
    assert image.getpixel((width // 2, height // 2)) == COLOURS["blue"]
    scenes = [Scene("single", (Item("star", "red", size),), None, 1, "white") for size in ("small", "large")]
    placed = [place_objects(scene, width, height, np.random.default_rng(n))[0] for n, scene in enumerate(scenes)]
    assert placed[1].diameter > 1.5 * placed[0].diameter
