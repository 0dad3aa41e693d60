"""The demo world: procedural images of simple shapes, their captions, and a judge that detects what images show."""

from sd3_light.world.captions import LANGUAGES, parse_caption, scene_captions
from sd3_light.world.dataset import IMAGE_SIZES, Prompt, draw_image, draw_prompts, write_dataset
from sd3_light.world.judge import DetectedObject, DetectedScene, Verdict, compare, detect_scene, judge
from sd3_light.world.rendering import PlacedObject, place_objects, render_scene
from sd3_light.world.scene import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    HELD_OUT_PAIRS,
    OBJECT_SIZES,
    RELATIONS,
    SCENE_KINDS,
    SHAPES,
    Item,
    Scene,
    canonical_scene,
    draw_scene,
    is_held_out,
)

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "COUNTS",
    "HELD_OUT_PAIRS",
    "IMAGE_SIZES",
    "LANGUAGES",
    "OBJECT_SIZES",
    "RELATIONS",
    "SCENE_KINDS",
    "SHAPES",
    "DetectedObject",
    "DetectedScene",
    "Item",
    "PlacedObject",
    "Prompt",
    "Scene",
    "Verdict",
    "canonical_scene",
    "compare",
    "detect_scene",
    "draw_image",
    "draw_prompts",
    "draw_scene",
    "is_held_out",
    "judge",
    "parse_caption",
    "place_objects",
    "render_scene",
    "scene_captions",
    "write_dataset",
]
