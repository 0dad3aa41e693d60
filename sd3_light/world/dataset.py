"""Captioned training images and prompts for scoring, both functions of a seed."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.randomness import stream
from sd3_light.world.captions import LANGUAGES, scene_captions
from sd3_light.world.judge import ImageLike, Verdict, judge
from sd3_light.world.rendering import render_scene
from sd3_light.world.scene import SCENE_KINDS, Scene, canonical_scene, draw_scene

# (width, height) of the images in turn: half are square, a quarter each wide and tall.
IMAGE_SIZES: tuple[tuple[int, int], ...] = ((64, 64), (80, 48), (64, 64), (48, 80))

_MAX_TRIES = 50

T = TypeVar("T")
DrawCaptioned = Callable[[int, int, bool], tuple[Image.Image, Mapping[str, str]]]
"""(index, seed, held_out) -> an image, and its caption by language."""


@dataclass(frozen=True)
class Prompt:
    """A caption to sample from, and the scene that the image is compared with."""

    text: str
    scene: Scene

    @property
    def english(self) -> str:
        """The caption in English."""
        return scene_captions(self.scene)["en"]

    def judge(self, image: ImageLike) -> Verdict:
        """Return which requirements of the scene an image meets."""
        return judge(image, self.scene)


def draw_image(index: int, seed: int, held_out: bool = False) -> tuple[Image.Image, Scene]:
    """Return image `index` of the dataset of a seed, and its scene."""
    rng = stream(seed, purpose("picture", held_out), 0, 0, index)
    scene = draw_scene(rng, held_out)
    width, height = IMAGE_SIZES[index % len(IMAGE_SIZES)]
    return render_scene(scene, width, height, rng), scene


def _draw_captioned(index: int, seed: int, held_out: bool) -> tuple[Image.Image, Mapping[str, str]]:
    image, scene = draw_image(index, seed, held_out)
    return image, scene_captions(scene)


def write_dataset(
    folder: Path,
    count: int,
    seed: int,
    held_out: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    draw: DrawCaptioned = _draw_captioned,
) -> Path:
    """Write `count` images `000123.png` and `captions.json` ({file: [english, chinese]}); returns the folder.

    Image i depends only on (seed, held_out, i), so a longer dataset begins with the shorter one. Without `held_out` no
    image shows a held-out composition; with it all do. `on_progress(done, total)` is called after each image.
    `draw` may return images of another world.
    """
    if count < 1 or count > 1_000_000:
        raise UserError(f"a dataset cannot have {count} images; give 1 to 1000000")
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {}
    for index in range(count):
        image, by_language = draw(index, seed, held_out)
        name = f"{index:06d}.png"
        image.save(folder / name)
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
) -> list[Prompt]:
    """Return `count` prompts, alternating kinds (`mixed`: languages too); scenes repeat only if a kind has too few."""
    chosen = tuple(kinds or SCENE_KINDS)
    if unknown := [kind for kind in chosen if kind not in SCENE_KINDS]:
        raise UserError(f"unknown kind of scene {unknown[0]!r}; the kinds are {', '.join(SCENE_KINDS)}")
    if language not in (*LANGUAGES, "mixed"):
        raise UserError(f"unknown language {language!r}; give one of {', '.join(LANGUAGES)}, mixed")
    seen: set[Scene] = set()
    drawn = []
    for index in range(count):
        rng = stream(seed, purpose("prompt", held_out), 0, 0, index)
        scene = draw_unseen(partial(draw_scene, rng, held_out, chosen[index % len(chosen)]), canonical_scene, seen)
        caption_language = LANGUAGES[index // len(chosen) % len(LANGUAGES)] if language == "mixed" else language
        drawn.append(Prompt(scene_captions(scene)[caption_language], scene))
    return drawn


def draw_unseen(draw: Callable[[], T], canonical: Callable[[T], T], seen: set[T]) -> T:
    """Draw a scene that is not in `seen`, or the last one tried, and add it to `seen`."""
    scene = draw()
    for _ in range(_MAX_TRIES):
        if canonical(scene) not in seen:
            break
        scene = draw()
    seen.add(canonical(scene))
    return scene


def purpose(name: str, held_out: bool) -> str:
    """Return the purpose of a random stream: changing it changes every image."""
    return f"world-{name}-{'held-out' if held_out else 'train'}"
