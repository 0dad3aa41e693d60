"""Harder scenes and their judge: right on rendered and damaged images, at chance on other captions, and strict."""

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from common.hard import scene as hard_scene
from common.hard.captions import ZH_HARD_WORDS, hard_captions, parse_hard_caption
from common.hard.dataset import draw_hard_prompts, draw_square_image
from common.hard.judge import compare_hard, detect_hard_scene, judge_hard
from common.hard.rendering import place_hard_objects, render_hard_scene
from common.hard.scene import DEPTH_RELATIONS, HARD_KINDS, Group, HardScene, canonical_hard_scene, draw_hard_scene
from PIL import Image, ImageFilter

from sd3_light.config.faults import UserError
from sd3_light.parts.tokenizers import learn_tokenizers
from sd3_light.world.scene import HELD_OUT_PAIRS

_STAR = Group("star", "green", "striped", "large")
_SCENE = HardScene((_STAR, Group("square", "blue", size="small")), "white", "in front of")


def _scenes(count: int, held_out: bool = False) -> list[HardScene]:
    rng = np.random.default_rng(0)
    return [draw_hard_scene(rng, held_out) for _ in range(count)]


def test_scenes_cover_all_kinds_textures_and_counts() -> None:
    scenes = _scenes(1500)
    assert {scene.kind for scene in scenes} == set(HARD_KINDS)
    assert {scene.num_objects for scene in scenes} == {1, 2, 3, 4, 5, 6}
    assert {group.texture for scene in scenes for group in scene.groups} == set(hard_scene.TEXTURES)
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
    own = hard_captions(scene)
    assert own["en"] == "two small striped red circles and an orange star on a white background"
    assert own["zh"] == "白色背景上有两个小的条纹红色圆形和一个橙色星形"
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
    orders = [HardScene(groups, "white") for groups in ((second, first), (first, second))]
    assert canonical_hard_scene(orders[0]) == canonical_hard_scene(orders[1])


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
    image = render_hard_scene(swapped, 128, 128, np.random.default_rng(0))
    verdict = judge_hard(image, HardScene((circles, stars), "grey"))
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
