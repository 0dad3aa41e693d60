"""Captions: fixed sentences, parsing, and error messages for other sentences."""

import numpy as np
import pytest

from sd3_light.world import draw_scene, scene_captions
from sd3_light.world.captions import parse_caption
from sd3_light.world.scene import BACKGROUNDS, COLOURS, OBJECT_SIZES, RELATIONS, SCENE_KINDS, SHAPES, Item, Scene
from tests.refusals import refused


@pytest.mark.parametrize(
    ("scene", "english", "chinese"),
    [
        (
            Scene("single", (Item("circle", "red", "large"),), None, 1, "white"),
            "a large red circle on a white background",
            "白色背景上有一个大的红色圆形",
        ),
        (
            Scene("count", (Item("star", "blue"),), None, 3, "black"),
            "three blue stars on a black background",
            "黑色背景上有三个蓝色星形",
        ),
        (
            Scene("count", (Item("cross", "orange"),), None, 2, "pink"),
            "two orange crosses on a pink background",
            "粉色背景上有两个橙色十字形",
        ),
        (
            Scene("pair", (Item("circle", "orange"), Item("square", "blue")), "left of", 2, "grey"),
            "an orange circle left of a blue square on a grey background",
            "灰色背景上，橙色圆形在蓝色正方形的左边",
        ),
    ],
)
def test_captions(scene: Scene, english: str, chinese: str) -> None:
    assert scene_captions(scene) == {"en": english, "zh": chinese}


def test_captions_make_a_round_trip() -> None:
    scenes = [
        scene
        for shape in SHAPES
        for colour in COLOURS
        for background in BACKGROUNDS
        for scene in (
            *(Scene("single", (Item(shape, colour, size),), None, 1, background) for size in OBJECT_SIZES),
            *(Scene("count", (Item(shape, colour),), None, count, background) for count in (2, 3, 4)),
        )
    ]
    assert all(parse_caption(text) == scene for scene in scenes for text in scene_captions(scene).values())
    assert len({text for scene in scenes for text in scene_captions(scene).values()}) == 2 * len(scenes)
    rng = np.random.default_rng(0)
    scenes = [draw_scene(rng, bool(index % 2), kind) for kind in SCENE_KINDS for index in range(300)]
    assert {scene.relation for scene in scenes} == {None, *RELATIONS}
    assert all(parse_caption(text) == scene for scene in scenes for text in scene_captions(scene).values())
    expected = parse_caption("a small red ring on a white background")
    assert parse_caption("  A small  red ring on a White background. ") == expected
    assert parse_caption("白色背景上有一个小的红色圆环。") == expected
    english = "a red circle left of a blue square on a grey background"
    assert parse_caption("灰色背景上, 红色圆形在蓝色正方形的左边") == parse_caption(english)


@pytest.mark.parametrize(
    ("caption", "message_part"),
    [
        ("a large red circel on a white background", "unknown word 'circel', nearest: circle"),
        ("a large read circle on a white backgrund", "nearest: background"),
        ("a red circle on a white background", "write it as 'a large red circle on a white background'"),
        ("", "write it as"),
        ("白色背景上有一个大的红色六角形", "unknown word '六角形', nearest: 三角形"),
        ("白色背景上有红色圆形", "write it as '白色背景上有一个大的红色圆形'"),
        ("a red circle above a red circle on a white background", "two equal objects"),
    ],
)
def test_error_messages_for_other_sentences(caption: str, message_part: str) -> None:
    message = refused("", parse_caption, caption)
    assert message_part in message
    assert repr(caption) in message
