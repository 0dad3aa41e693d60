"""The judge: near perfect on rendered and damaged images, at chance on other captions, and strict."""

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from sd3_light.world import draw_scene, judge, render_scene
from sd3_light.world.judge import compare, detect_scene
from sd3_light.world.scene import COLOURS, SCENE_KINDS, SHAPES, Item, Scene, canonical_scene
from tests.cases import combinations

IMAGE_SIZES = [(64, 64), (80, 48), (48, 80)]


def _images(per_kind: int, kind: str, seed: int = 0) -> list[tuple[Image.Image, Scene]]:
    rng = np.random.default_rng([seed, SCENE_KINDS.index(kind)])
    images = []
    for index in range(per_kind):
        scene = draw_scene(rng, held_out=index % 5 == 0, kind=kind)
        images.append((render_scene(scene, *IMAGE_SIZES[index % 3], rng), scene))
    return images


def _blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(0.7))


def _noisy(image: Image.Image) -> Image.Image:
    pixels = np.asarray(image)
    noise = np.random.default_rng(pixels.sum()).normal(0, 6, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _compressed(image: Image.Image) -> Image.Image:
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=85)
    return Image.open(packed).convert("RGB")


def _damaged(image: Image.Image) -> Image.Image:
    return _compressed(_noisy(_blurred(image)))


@pytest.mark.parametrize("kind", SCENE_KINDS)
def test_rendered_images_are_judged_correctly(kind: str) -> None:
    verdicts = [judge(image, scene) for image, scene in _images(510, kind)]
    assert np.mean([verdict.all for verdict in verdicts]) >= 0.99


@pytest.mark.parametrize("damage", [lambda image: image, _blurred, _noisy, _compressed])
def test_large_images_are_judged_correctly(damage: Callable[[Image.Image], Image.Image]) -> None:
    rng = np.random.default_rng(0)
    for index in range(6):
        scene = draw_scene(rng, held_out=index % 2 == 0)
        assert judge(damage(render_scene(scene, 512, 512, rng)), scene).all


@pytest.mark.parametrize(
    ("damage", "kind"),
    combinations(
        (_blurred, _noisy, _compressed, _damaged), SCENE_KINDS, fast=[(_damaged, kind) for kind in SCENE_KINDS]
    ),
)
def test_damaged_images_are_judged_correctly(kind: str, damage: Callable[[Image.Image], Image.Image]) -> None:
    verdicts = [judge(damage(image), scene) for image, scene in _images(150, kind, seed=1)]
    assert np.mean([verdict.all for verdict in verdicts]) >= 0.97


@pytest.mark.parametrize("kind", SCENE_KINDS)
def test_captions_of_other_images_match_only_by_chance(kind: str) -> None:
    images = _images(300, kind, seed=2)
    detected = [detect_scene(image) for image, _ in images]
    scenes = [canonical_scene(scene) for _, scene in images]
    others = [(index, other) for index in range(300) for other in range(300) if index != other]
    coincidence = np.mean([scenes[index] == scenes[other] for index, other in others])
    judged = np.mean([compare(detected[index], scenes[other]).all for index, other in others])
    assert judged == pytest.approx(coincidence, abs=1e-4)
    assert judged < 0.01


def _single(shape: str = "square", colour: str = "blue", size: str = "large", background: str = "white") -> Scene:
    return Scene("single", (Item(shape, colour, size),), None, 1, background)


def _fields(drawn: Scene, expected: Scene) -> dict[str, bool | None]:
    verdict = judge(render_scene(drawn, 64, 64, np.random.default_rng(0)), expected)
    return {**vars(verdict), "all": verdict.all}


@pytest.mark.parametrize(
    ("drawn", "wrong"),
    [
        (_single(), set()),
        (_single(background="black"), {"background"}),
        (_single(colour="red"), {"colour", "shape"}),
        (_single(shape="diamond"), {"shape"}),
        (_single(size="small"), {"size"}),
        (Scene("count", (Item("square", "blue"),), None, 2, "white"), {"size", "count"}),
    ],
)
def test_a_wrong_attribute_of_a_single_is_detected(drawn: Scene, wrong: set[str]) -> None:
    fields = _fields(drawn, _single())
    assert {name for name, holds in fields.items() if holds is False} == wrong | ({"all"} if wrong else set())
    assert fields["relation"] is None


def test_wrong_counts_colours_and_shapes_are_detected() -> None:
    expected = Scene("count", (Item("star", "green"),), None, 3, "grey")
    for count in (2, 4):
        fields = _fields(replace(expected, count=count), expected)
        assert fields["count"] is False
        assert fields["all"] is False
        assert fields["size"] is None
    expected = Scene("pair", (Item("star", "orange"), Item("ring", "cyan")), "left of", 2, "white")
    drawn = Scene("pair", (Item("star", "cyan"), Item("ring", "orange")), "left of", 2, "white")
    fields = _fields(drawn, expected)
    assert (fields["colour"], fields["shape"], fields["relation"]) == (True, False, False)
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        for size in ("small", "large"):
            detected = detect_scene(render_scene(_single(shape=shape, size=size), 64, 64, rng))
            matches = {other for other in SHAPES if compare(detected, _single(shape=other, size=size)).shape}
            assert matches == {shape}


@pytest.mark.parametrize("other", [Item("ring", "cyan"), Item("ring", "orange"), Item("square", "orange")])
def test_a_wrong_relation_is_detected(other: Item) -> None:
    first = Item("star", "orange")
    expected = Scene("pair", (first, other), "above", 2, "black")
    assert _fields(expected, expected)["all"]
    assert _fields(Scene("pair", (other, first), "below", 2, "black"), expected)["all"]
    for relation in ("below", "left of", "right of"):
        fields = _fields(replace(expected, relation=relation), expected)
        assert {name for name, holds in fields.items() if holds is False} == {"relation", "all"}


def _drawn(draw_shape: Callable[[ImageDraw.ImageDraw], object]) -> Image.Image:
    canvas = Image.new("RGB", (256, 256), "white")
    draw_shape(ImageDraw.Draw(canvas))
    return canvas.reduce(4)


def test_what_is_not_of_the_world_is_unknown() -> None:
    blue = COLOURS["blue"]
    images = [
        _drawn(lambda d: d.ellipse((90, 40, 150, 200), fill=blue)),
        _drawn(lambda d: d.rectangle((40, 100, 210, 150), fill=blue)),
        _drawn(lambda d: d.pieslice((60, 60, 190, 190), 0, 150, fill=blue)),
        _drawn(lambda d: d.line((60, 60, 60, 190, 190, 190), fill=blue, width=40)),
    ]
    for image in images:
        assert [(o.colour, o.shape) for o in detect_scene(image).objects] == [("blue", "unknown")]
    brown = _drawn(lambda d: d.ellipse((60, 60, 190, 190), fill=(110, 60, 30)))
    assert [o.colour for o in detect_scene(brown).objects] == ["unknown"]
    split = _drawn(lambda d: d.rectangle((0, 0, 127, 255), fill="black"))
    assert detect_scene(split).background == "unknown"
    blank = detect_scene(np.full((48, 80, 3), 255, dtype=np.uint8))
    assert (blank.background, blank.objects) == ("white", ())
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    assert not any(judge(noise, scene).all for _, scene in _images(20, "single"))
    image, _ = _images(1, "pair")[0]
    assert detect_scene(np.asarray(image)) == detect_scene(image)
