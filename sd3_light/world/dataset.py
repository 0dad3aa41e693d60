"""Folders of captioned pictures to train on, and prompts to score with; both functions of a seed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.randomness import stream
from sd3_light.world.captions import LANGUAGES, scene_captions
from sd3_light.world.rendering import render_scene
from sd3_light.world.scene import SCENE_KINDS, Scene, canonical_scene, draw_scene

# (width, height) of every fourth picture in turn: half are square, a quarter each wide and tall.
IMAGE_SIZES: tuple[tuple[int, int], ...] = ((64, 64), (80, 48), (64, 64), (48, 80))

_TRIES_FOR_A_NEW_SCENE = 50


@dataclass(frozen=True)
class Prompt:
    """A caption to sample from, and the scene that the picture is judged by."""

    text: str
    scene: Scene


def draw_image(index: int, seed: int, held_out: bool = False) -> tuple[Image.Image, Scene]:
    """Picture `index` of the dataset of a seed, and what it shows."""
    rng = stream(seed, _purpose("picture", held_out), 0, 0, index)
    scene = draw_scene(rng, held_out)
    width, height = IMAGE_SIZES[index % len(IMAGE_SIZES)]
    return render_scene(scene, width, height, rng), scene


def write_dataset(
    folder: Path,
    count: int,
    seed: int,
    held_out: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write `count` pictures `000123.png` and `captions.json` ({file: [english, chinese]}); the folder is returned.

    Picture i depends on (seed, held_out, i) alone, so a longer set begins with the shorter one. Without `held_out` no
    picture shows a held-out composition; with it all do. `on_progress(done, total)` is called after each picture.
    """
    if count < 1 or count > 1_000_000:
        raise UserError(f"a dataset of {count} pictures: count must be 1 to 1000000")
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {}
    for index in range(count):
        image, scene = draw_image(index, seed, held_out)
        name = f"{index:06d}.png"
        image.save(folder / name)
        by_language = scene_captions(scene)
        texts[name] = [by_language[language] for language in LANGUAGES]
        if on_progress is not None:
            on_progress(index + 1, count)
    (folder / "captions.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0), encoding="utf-8")
    return folder


def draw_prompts(
    count: int, seed: int, held_out: bool, kinds: Sequence[str] | None = None, language: str = "en"
) -> list[Prompt]:
    """`count` prompts with their scenes, the kinds in turn; `mixed` gives the languages in turn within each kind.

    Scenes do not repeat as long as there are enough of a kind.
    """
    chosen = tuple(kinds or SCENE_KINDS)
    if unknown := [kind for kind in chosen if kind not in SCENE_KINDS]:
        raise UserError(f"unknown kind of scene {unknown[0]!r}; the kinds are {', '.join(SCENE_KINDS)}")
    if language not in (*LANGUAGES, "mixed"):
        raise UserError(f"unknown language {language!r}; give one of {', '.join(LANGUAGES)}, mixed")
    seen: set[Scene] = set()
    drawn = []
    for index in range(count):
        scene = _new_scene(index, seed, held_out, chosen[index % len(chosen)], seen)
        spoken = LANGUAGES[index // len(chosen) % len(LANGUAGES)] if language == "mixed" else language
        drawn.append(Prompt(scene_captions(scene)[spoken], scene))
    return drawn


def _new_scene(index: int, seed: int, held_out: bool, kind: str, seen: set[Scene]) -> Scene:
    """A scene that is not among those seen, or the last one tried; it is added to them."""
    rng = stream(seed, _purpose("prompt", held_out), 0, 0, index)
    scene = draw_scene(rng, held_out, kind)
    for _ in range(_TRIES_FOR_A_NEW_SCENE):
        if canonical_scene(scene) not in seen:
            break
        scene = draw_scene(rng, held_out, kind)
    seen.add(canonical_scene(scene))
    return scene


def _purpose(what: str, held_out: bool) -> str:
    return f"world-{what}-{'held-out' if held_out else 'train'}"
