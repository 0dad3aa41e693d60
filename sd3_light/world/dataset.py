"""Captioned training images and prompts for scoring, both functions of a seed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.randomness import stream
from sd3_light.world.captions import LANGUAGES, scene_captions
from sd3_light.world.hard.captions import hard_captions
from sd3_light.world.hard.judge import judge_hard
from sd3_light.world.hard.rendering import render_hard_scene
from sd3_light.world.hard.scene import HARD_KINDS, HardScene, canonical_hard_scene, draw_hard_scene
from sd3_light.world.judge import ImageLike, Verdict, judge
from sd3_light.world.rendering import render_scene
from sd3_light.world.scene import SCENE_KINDS, Scene, canonical_scene, draw_scene

# (width, height) of the images in turn: half are square, a quarter each wide and tall.
IMAGE_SIZES: tuple[tuple[int, int], ...] = ((64, 64), (80, 48), (64, 64), (48, 80))

_MAX_TRIES = 50


AnyScene = Scene | HardScene


@dataclass(frozen=True)
class Prompt:
    """A caption to sample from, and the scene that the image is compared with."""

    text: str
    scene: AnyScene

    @property
    def english(self) -> str:
        """The caption in English."""
        return any_captions(self.scene)["en"]

    def judge(self, image: ImageLike) -> Verdict:
        """Return which requirements of the scene an image meets."""
        return judge_hard(image, self.scene) if isinstance(self.scene, HardScene) else judge(image, self.scene)


def any_captions(scene: AnyScene) -> dict[str, str]:
    """Return the caption of a scene of either difficulty, by language."""
    return hard_captions(scene) if isinstance(scene, HardScene) else scene_captions(scene)


def draw_image(index: int, seed: int, held_out: bool = False) -> tuple[Image.Image, Scene]:
    """Return image `index` of the dataset of a seed, and its scene."""
    rng = stream(seed, _purpose("picture", held_out), 0, 0, index)
    scene = draw_scene(rng, held_out)
    width, height = IMAGE_SIZES[index % len(IMAGE_SIZES)]
    return render_scene(scene, width, height, rng), scene


def draw_square_image(
    index: int, seed: int, side: int, hard: bool, held_out: bool = False
) -> tuple[Image.Image, AnyScene]:
    """Return image `index` of a benchmark's dataset: square, with a scene of the demo or a harder one."""
    rng = stream(seed, _purpose(f"{'hard' if hard else 'square'}-{side}", held_out), 0, 0, index)
    if hard:
        hard_scene = draw_hard_scene(rng, held_out)
        return render_hard_scene(hard_scene, side, side, rng), hard_scene
    scene = draw_scene(rng, held_out)
    return render_scene(scene, side, side, rng), scene


def write_dataset(
    folder: Path,
    count: int,
    seed: int,
    held_out: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    draw: Callable[[int, int, bool], tuple[Image.Image, AnyScene]] | None = None,
) -> Path:
    """Write `count` images `000123.png` and `captions.json` ({file: [english, chinese]}); returns the folder.

    Image i depends only on (seed, held_out, i), so a longer dataset begins with the shorter one. Without `held_out` no
    image shows a held-out composition; with it all do. `on_progress(done, total)` is called after each image.
    `draw(index, seed, held_out)` replaces `draw_image`.
    """
    if count < 1 or count > 1_000_000:
        raise UserError(f"a dataset cannot have {count} images; give 1 to 1000000")
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {}
    for index in range(count):
        image, scene = (draw or draw_image)(index, seed, held_out)
        name = f"{index:06d}.png"
        image.save(folder / name)
        by_language = any_captions(scene)
        texts[name] = [by_language[language] for language in LANGUAGES]
        if on_progress is not None:
            on_progress(index + 1, count)
    (folder / "captions.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0), encoding="utf-8")
    return folder


def draw_prompts(
    count: int,
    seed: int,
    held_out: bool,
    kinds: Sequence[str] | None = None,
    language: str = "en",
    hard: bool = False,
) -> list[Prompt]:
    """Return `count` prompts, alternating kinds (`mixed`: languages too); scenes repeat only if a kind has too few."""
    known = HARD_KINDS if hard else SCENE_KINDS
    chosen = tuple(kinds or known)
    if unknown := [kind for kind in chosen if kind not in known]:
        raise UserError(f"unknown kind of scene {unknown[0]!r}; the kinds are {', '.join(known)}")
    if language not in (*LANGUAGES, "mixed"):
        raise UserError(f"unknown language {language!r}; give one of {', '.join(LANGUAGES)}, mixed")
    seen: set[AnyScene] = set()
    drawn = []
    for index in range(count):
        scene = _new_scene(index, seed, held_out, chosen[index % len(chosen)], seen, hard)
        caption_language = LANGUAGES[index // len(chosen) % len(LANGUAGES)] if language == "mixed" else language
        drawn.append(Prompt(any_captions(scene)[caption_language], scene))
    return drawn


def _new_scene(index: int, seed: int, held_out: bool, kind: str, seen: set[AnyScene], hard: bool) -> AnyScene:
    """Draw a scene that is not in `seen`, or the last one tried, and add it to `seen`."""
    rng = stream(seed, _purpose("hard-prompt" if hard else "prompt", held_out), 0, 0, index)
    draw: Callable[[np.random.Generator, bool, str], AnyScene] = draw_hard_scene if hard else draw_scene
    scene = draw(rng, held_out, kind)
    for _ in range(_MAX_TRIES):
        if _canonical(scene) not in seen:
            break
        scene = draw(rng, held_out, kind)
    seen.add(_canonical(scene))
    return scene


def _canonical(scene: AnyScene) -> AnyScene:
    return canonical_hard_scene(scene) if isinstance(scene, HardScene) else canonical_scene(scene)


def _purpose(name: str, held_out: bool) -> str:
    # part of the random streams: changing it changes every image
    return f"world-{name}-{'held-out' if held_out else 'train'}"
