"""Scenes: the held-out rule and random compositions."""

from collections import Counter

import numpy as np
import pytest

from sd3_light.world import draw_scene
from sd3_light.world import scene as module
from sd3_light.world.scene import COLOURS, HELD_OUT_PAIRS, SCENE_KINDS, SHAPES, Item, Scene, canonical_scene


def test_scenes_are_consistent_and_cover_all_words() -> None:
    assert len(HELD_OUT_PAIRS) == 7
    assert Counter(colour for colour, _ in HELD_OUT_PAIRS) == Counter(COLOURS.keys())
    assert Counter(shape for _, shape in HELD_OUT_PAIRS) == Counter(SHAPES)
    rng = np.random.default_rng(0)
    scenes = [draw_scene(rng, held_out=False) for _ in range(2000)]
    assert {scene.kind for scene in scenes} == set(SCENE_KINDS)
    drawn_pairs = {(item.colour, item.shape) for scene in scenes for item in scene.items}
    assert drawn_pairs == {(colour, shape) for colour in COLOURS for shape in SHAPES} - HELD_OUT_PAIRS
    pair_scenes = [draw_scene(rng, held_out=True, kind="pair") for _ in range(200)]
    share_first = np.mean([(scene.items[0].colour, scene.items[0].shape) in HELD_OUT_PAIRS for scene in pair_scenes])
    assert 0.4 < share_first < 0.75
    red, blue = Item("circle", "red"), Item("square", "blue")
    left = Scene("pair", (red, blue), "left of", 2, "white")
    right = Scene("pair", (blue, red), "right of", 2, "white")
    assert canonical_scene(left) == canonical_scene(right) == left
    assert canonical_scene(Scene("pair", (red, blue), "right of", 2, "white")) != left
    red = Item("circle", "red")
    for kind, items, relation, count in [
        ("single", (red,), None, 1),
        ("count", (red,), None, 5),
        ("pair", (red, red), "above", 2),
        ("pair", (red, Item("ring", "red")), None, 2),
    ]:
        with pytest.raises(AssertionError):
            Scene(kind, items, relation, count, "white")


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("kind", SCENE_KINDS)
def test_a_drawn_scene_follows_the_held_out_rule(kind: str, held_out: bool) -> None:
    rng = np.random.default_rng(0)
    scenes = [draw_scene(rng, held_out, kind) for _ in range(500)]
    assert all(scene.kind == kind and module.is_held_out(scene) == held_out for scene in scenes)
