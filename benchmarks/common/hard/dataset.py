"""Images and prompts of the benchmarks, with scenes of the demo or harder ones; both are functions of a seed."""

from functools import partial

from PIL import Image

from common.hard.captions import hard_captions
from common.hard.judge import judge_hard
from common.hard.rendering import render_hard_scene
from common.hard.scene import HARD_KINDS, HardScene, canonical_hard_scene, draw_hard_scene
from sd3_light.randomness import stream
from sd3_light.world import Prompt, draw_scene, render_scene, scene_captions
from sd3_light.world.captions import LANGUAGES
from sd3_light.world.dataset import draw_unseen, purpose
from sd3_light.world.judge import ImageLike, Verdict
from sd3_light.world.scene import Scene


class HardPrompt(Prompt):
    """A caption of a harder scene, and the scene."""

    @property
    def english(self) -> str:
        """The caption in English."""
        return hard_captions(self.scene)["en"]

    def judge(self, image: ImageLike) -> Verdict:
        """Return which requirements of the scene an image meets."""
        return judge_hard(image, self.scene)


def captions_of(scene: Scene | HardScene) -> dict[str, str]:
    """Return the caption of a scene of either difficulty, by language."""
    return hard_captions(scene) if isinstance(scene, HardScene) else scene_captions(scene)


def draw_square_image(
    index: int, seed: int, side: int, hard: bool, held_out: bool = False
) -> tuple[Image.Image, Scene | HardScene]:
    """Return image `index` of a benchmark's dataset: square, with a scene of the demo or a harder one."""
    rng = stream(seed, purpose(f"{'hard' if hard else 'square'}-{side}", held_out), 0, 0, index)
    if hard:
        hard_scene = draw_hard_scene(rng, held_out)
        return render_hard_scene(hard_scene, side, side, rng), hard_scene
    scene = draw_scene(rng, held_out)
    return render_scene(scene, side, side, rng), scene


def draw_hard_prompts(count: int, seed: int, held_out: bool, language: str = "en") -> list[HardPrompt]:
    """Return `count` prompts of harder scenes, alternating kinds (`mixed`: languages too)."""
    seen: set[HardScene] = set()
    drawn = []
    for index in range(count):
        rng = stream(seed, purpose("hard-prompt", held_out), 0, 0, index)
        draw = partial(draw_hard_scene, rng, held_out, HARD_KINDS[index % len(HARD_KINDS)])
        scene = draw_unseen(draw, canonical_hard_scene, seen)
        turn = LANGUAGES[index // len(HARD_KINDS) % len(LANGUAGES)]
        drawn.append(HardPrompt(hard_captions(scene)[turn if language == "mixed" else language], scene))
    return drawn
