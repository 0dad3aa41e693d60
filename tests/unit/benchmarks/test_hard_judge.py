"""The judge of harder scenes: right on rendered and damaged images, at chance on other captions, and strict."""

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from common.hard.dataset import draw_hard_prompts, draw_square_image
from common.hard.judge import compare_hard, detect_hard_scene, judge_hard
from common.hard.rendering import render_hard_scene
from common.hard.scene import HARD_KINDS, Group, HardScene, draw_hard_scene
from PIL import Image, ImageFilter


def _images(kind: str, count: int, side: int = 128, seed: int = 0) -> list[tuple[Image.Image, HardScene]]:
    rng = np.random.default_rng([seed, HARD_KINDS.index(kind)])
    scenes = [draw_hard_scene(rng, index % 5 == 0, kind) for index in range(count)]
    return [(render_hard_scene(scene, side, side, rng), scene) for scene in scenes]


def _blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(1))


def _noisy_jpeg(image: Image.Image) -> Image.Image:
    pixels = np.asarray(image)
    noise = np.random.default_rng(0).normal(0, 6, pixels.shape)
    packed = io.BytesIO()
    Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)).save(packed, "JPEG", quality=85)
    return Image.open(packed).convert("RGB")


@pytest.mark.parametrize("kind", HARD_KINDS)
def test_rendered_images_are_judged_correctly(kind: str) -> None:
    verdicts = [judge_hard(image, scene) for image, scene in _images(kind, 60)]
    assert np.mean([verdict.all for verdict in verdicts]) >= 0.98


@pytest.mark.parametrize(("side", "count"), [(256, 8), (512, 4)])
def test_large_images_are_judged_correctly(side: int, count: int) -> None:
    verdicts = [judge_hard(image, scene) for kind in HARD_KINDS for image, scene in _images(kind, count, side)]
    assert all(verdict.all for verdict in verdicts)


@pytest.mark.parametrize("damage", [_blurred, _noisy_jpeg])
def test_damaged_images_are_judged_correctly(damage: Callable[[Image.Image], Image.Image]) -> None:
    images = [pair for kind in HARD_KINDS for pair in _images(kind, 20, seed=1)]
    assert np.mean([judge_hard(damage(image), scene).all for image, scene in images]) >= 0.95


_STAR = Group("star", "green", "striped", "large")
_SCENE = HardScene((_STAR, Group("square", "blue", size="small")), "white", "in front of")


@pytest.mark.parametrize(
    ("drawn", "wrong"),
    [
        (_SCENE, set()),
        (HardScene(_SCENE.groups[::-1], "white", "behind"), set()),
        (replace(_SCENE, background="pink"), {"background"}),
        (replace(_SCENE, relation="behind"), {"relation"}),
        (replace(_SCENE, relation="left of"), {"relation"}),
        (replace(_SCENE, groups=(replace(_STAR, texture="dotted"), _SCENE.groups[1])), {"texture"}),
        (replace(_SCENE, groups=(replace(_STAR, size="small"), _SCENE.groups[1])), {"size"}),
        (replace(_SCENE, groups=(replace(_STAR, shape="diamond"), _SCENE.groups[1])), {"shape", "size", "texture"}),
        (replace(_SCENE, groups=(replace(_STAR, colour="red"), _SCENE.groups[1])), {"colour"}),
    ],
)
def test_a_wrong_attribute_is_detected(drawn: HardScene, wrong: set[str]) -> None:
    verdict = judge_hard(render_hard_scene(drawn, 128, 128, np.random.default_rng(0)), _SCENE)
    failed = {name for name, holds in vars(verdict).items() if holds is False}
    assert wrong <= failed
    assert verdict.all == (not wrong) == (not failed)


def test_wrong_counts_and_other_captions_do_not_match() -> None:
    circles, stars = Group("circle", "red", count=2), Group("star", "blue", count=3)
    swapped = HardScene((replace(circles, count=3), replace(stars, count=2)), "grey")
    verdict = judge_hard(
        render_hard_scene(swapped, 128, 128, np.random.default_rng(0)), HardScene((circles, stars), "grey")
    )
    assert (verdict.shape, verdict.count, verdict.all) == (True, False, False)
    images = [pair for kind in HARD_KINDS for pair in _images(kind, 20, seed=2)]
    detected = [detect_hard_scene(image) for image, _ in images]
    matches = [
        compare_hard(seen, scene).all
        for index, seen in enumerate(detected)
        for other, (_, scene) in enumerate(images)
        if index != other
    ]
    assert np.mean(matches) < 0.002
    assert detect_hard_scene(np.full((128, 128, 3), 255, dtype=np.uint8)).objects == ()
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3)).astype(np.uint8)
    assert not judge_hard(noise, _SCENE).all


def test_datasets_and_prompts_of_harder_scenes() -> None:
    (first, scene), (again, _) = draw_square_image(3, 1, 128, hard=True), draw_square_image(3, 1, 128, hard=True)
    assert isinstance(scene, HardScene)
    assert first.tobytes() == again.tobytes()
    prompts = draw_hard_prompts(24, seed=1, held_out=True, language="mixed")
    assert [prompt.scene.kind for prompt in prompts[:4]] == list(HARD_KINDS)
    assert len({prompt.text for prompt in prompts}) == 24
    rng = np.random.default_rng(0)
    for prompt in prompts[:8]:
        assert isinstance(prompt.scene, HardScene)
        assert prompt.judge(render_hard_scene(prompt.scene, 128, 128, rng)).all
