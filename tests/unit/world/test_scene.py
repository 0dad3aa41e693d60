"""Scenes: the held-out rule and the drawing of compositions."""

from collections import Counter

import numpy as np
import pytest

from sd3_light.world import (
    COLOURS,
    HELD_OUT_PAIRS,
    SCENE_KINDS,
    SHAPES,
    Item,
    Scene,
    canonical_scene,
    draw_scene,
    is_held_out,
    num_compositions,
)


def test_held_out_pairs_leave_every_word_in_much_company() -> None:
    assert len(HELD_OUT_PAIRS) == 7
    assert Counter(colour for colour, _ in HELD_OUT_PAIRS) == Counter(COLOURS.keys())
    assert Counter(shape for _, shape in HELD_OUT_PAIRS) == Counter(SHAPES)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("kind", SCENE_KINDS)
def test_a_drawn_scene_is_on_its_side_of_the_rule(kind: str, held_out: bool) -> None:
    rng = np.random.default_rng(0)
    scenes = [draw_scene(rng, held_out, kind) for _ in range(500)]
    assert all(scene.kind == kind and is_held_out(scene) == held_out for scene in scenes)


def test_all_kinds_words_and_places_of_the_held_out_item_are_drawn() -> None:
    rng = np.random.default_rng(0)
    scenes = [draw_scene(rng, held_out=False) for _ in range(2000)]
    assert {scene.kind for scene in scenes} == set(SCENE_KINDS)
    looks = {(item.colour, item.shape) for scene in scenes for item in scene.items}
    assert looks == {(colour, shape) for colour in COLOURS for shape in SHAPES} - HELD_OUT_PAIRS
    pairs = [draw_scene(rng, held_out=True, kind="pair") for _ in range(200)]
    first = np.mean([(scene.items[0].colour, scene.items[0].shape) in HELD_OUT_PAIRS for scene in pairs])
    assert 0.4 < first < 0.75


def test_drawing_is_a_function_of_the_generator() -> None:
    first, second = (draw_scene(np.random.default_rng(7), held_out=False) for _ in range(2))
    assert first == second


def test_num_compositions_counts_equal_meanings_once() -> None:
    assert num_compositions() == 19796
    red, blue = Item("circle", "red"), Item("square", "blue")
    left = Scene("pair", (red, blue), "left of", 2, "white")
    right = Scene("pair", (blue, red), "right of", 2, "white")
    assert canonical_scene(left) == canonical_scene(right) == left
    assert canonical_scene(Scene("pair", (red, blue), "right of", 2, "white")) != left


def test_a_scene_must_make_sense() -> None:
    red = Item("circle", "red")
    for kind, items, relation, count in [
        ("single", (red,), None, 1),
        ("count", (red,), None, 5),
        ("pair", (red, red), "above", 2),
        ("pair", (red, Item("ring", "red")), None, 2),
    ]:
        with pytest.raises(AssertionError):
            Scene(kind, items, relation, count, "white")
