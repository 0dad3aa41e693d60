"""Harder scenes: what they contain, their captions, and where their objects are."""

from collections import Counter

import numpy as np
import pytest
from common.hard.captions import ZH_HARD_WORDS, hard_captions, parse_hard_caption
from common.hard.rendering import place_hard_objects
from common.hard.scene import (
    DEPTH_RELATIONS,
    HARD_KINDS,
    TEXTURES,
    Group,
    HardScene,
    canonical_hard_scene,
    draw_hard_scene,
)

from sd3_light.config.faults import UserError
from sd3_light.parts.tokenizers import learn_tokenizers
from sd3_light.world.scene import HELD_OUT_PAIRS


def _scenes(count: int, held_out: bool = False) -> list[HardScene]:
    rng = np.random.default_rng(0)
    return [draw_hard_scene(rng, held_out) for _ in range(count)]


def test_scenes_cover_all_kinds_textures_and_counts() -> None:
    scenes = _scenes(1500)
    assert {scene.kind for scene in scenes} == set(HARD_KINDS)
    assert {scene.num_objects for scene in scenes} == {1, 2, 3, 4, 5, 6}
    assert {group.texture for scene in scenes for group in scene.groups} == set(TEXTURES)
    assert {len(scene.groups) for scene in scenes if scene.kind == "groups"} == {2, 3}
    relations = Counter(scene.relation for scene in scenes if scene.kind == "pair")
    assert all(relations[relation] > 50 for relation in DEPTH_RELATIONS)


@pytest.mark.parametrize("held_out", [False, True])
def test_training_and_held_out_scenes_share_no_pair(held_out: bool) -> None:
    pairs = [{group.pair for group in scene.groups} for scene in _scenes(500, held_out)]
    assert {bool(own & HELD_OUT_PAIRS) for own in pairs} == {held_out}


def test_every_scene_has_its_own_natural_caption() -> None:
    for scene in _scenes(800):
        for caption in hard_captions(scene).values():
            assert parse_hard_caption(caption) == scene
    captions = {caption: scene for scene in _scenes(800) for caption in hard_captions(scene).values()}
    assert len(captions) == 2 * len(set(captions.values()))
    scene = HardScene((Group("circle", "red", "striped", "small", 2), Group("star", "orange")), "white")
    assert hard_captions(scene) == {
        "en": "two small striped red circles and an orange star on a white background",
        "zh": "白色背景上有两个小的条纹红色圆形和一个橙色星形",
    }
    behind = HardScene((Group("cross", "blue", size="large"), Group("ring", "cyan")), "black", "in front of")
    assert hard_captions(behind)["en"] == "a large blue cross in front of a cyan ring on a black background"
    assert hard_captions(behind)["zh"] == "黑色背景上，一个大的蓝色十字形在一个青色圆环的前面"
    tokenizers = learn_tokenizers(sorted(captions), 8192, ZH_HARD_WORDS)
    assert tokenizers["tokenizer"].model_max_length == 24, "as common/world.py expects"
    with pytest.raises(UserError, match="write it as 'two small striped red circles"):
        parse_hard_caption("a dog on a white background")
    first, second = Group("circle", "red"), Group("star", "blue")
    left = HardScene((first, second), "white", "left of")
    assert canonical_hard_scene(HardScene((second, first), "white", "right of")) == left
    assert canonical_hard_scene(HardScene((second, first), "white")) == canonical_hard_scene(
        HardScene((first, second), "white")
    )


@pytest.mark.parametrize("side", [128, 256])
def test_objects_are_inside_and_only_depth_relations_overlap(side: int) -> None:
    rng = np.random.default_rng(1)
    for scene in _scenes(120):
        placed = [place for _, place in place_hard_objects(scene, side, side, rng)]
        for x, y, diameter in placed:
            assert all(0.55 * diameter < centre < side - 0.55 * diameter for centre in (x, y))
        for index, (x, y, diameter) in enumerate(placed):
            for other_x, other_y, other_diameter in placed[:index]:
                distance = max(abs(x - other_x), abs(y - other_y))
                assert (distance < 0.55 * (diameter + other_diameter)) <= (scene.relation in DEPTH_RELATIONS)
