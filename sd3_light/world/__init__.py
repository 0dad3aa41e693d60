"""The demo's world: procedural pictures of simple shapes, their captions, and a judge that reads pictures back."""

from sd3_light.world.captions import LANGUAGES, captions, parse
from sd3_light.world.dataset import PICTURE_SIZES, Prompt, picture, prompts, write_dataset
from sd3_light.world.judge import Seen, SeenObject, Verdict, compare, judge, look
from sd3_light.world.render import Placed, layout, render
from sd3_light.world.scene import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    HELD_OUT_PAIRS,
    KINDS,
    RELATIONS,
    SHAPES,
    SIZES,
    Item,
    Scene,
    canonical,
    draw_scene,
    is_held_out,
    num_compositions,
)

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "COUNTS",
    "HELD_OUT_PAIRS",
    "KINDS",
    "LANGUAGES",
    "PICTURE_SIZES",
    "RELATIONS",
    "SHAPES",
    "SIZES",
    "Item",
    "Placed",
    "Prompt",
    "Scene",
    "Seen",
    "SeenObject",
    "Verdict",
    "canonical",
    "captions",
    "compare",
    "draw_scene",
    "is_held_out",
    "judge",
    "layout",
    "look",
    "num_compositions",
    "parse",
    "picture",
    "prompts",
    "render",
    "write_dataset",
]
