"""The demo world: procedural images of simple shapes, their captions, and a judge that detects what images show."""

from sd3_light.world.captions import scene_captions
from sd3_light.world.dataset import Prompt, draw_image, draw_prompts, write_dataset
from sd3_light.world.judge import judge
from sd3_light.world.rendering import render_scene
from sd3_light.world.scene import draw_scene

__all__ = [
    "Prompt",
    "draw_image",
    "draw_prompts",
    "draw_scene",
    "judge",
    "render_scene",
    "scene_captions",
    "write_dataset",
]
