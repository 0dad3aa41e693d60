"""The judge: near perfect on true pictures, also on damaged ones, at chance on others, and strict."""

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from sd3_light.world import (
    COLOURS,
    SCENE_KINDS,
    SHAPES,
    Item,
    Scene,
    canonical_scene,
    compare,
    detect_scene,
    draw_scene,
    judge,
    render_scene,
)

IMAGE_SIZES = [(64, 64), (80, 48), (48, 80)]


def _pictures(per_kind: int, kind: str, seed: int = 0) -> list[tuple[Image.Image, Scene]]:
    rng = np.random.default_rng([seed, SCENE_KINDS.index(kind)])
    pictures = []
    for index in range(per_kind):
        scene = draw_scene(rng, held_out=index % 5 == 0, kind=kind)
        pictures.append((render_scene(scene, *IMAGE_SIZES[index % 3], rng), scene))
    return pictures


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


@pytest.mark.parametrize("kind", SCENE_KINDS)
def test_true_pictures_are_read_right(kind: str) -> None:
    verdicts = [judge(image, scene) for image, scene in _pictures(510, kind)]
    assert np.mean([verdict.all for verdict in verdicts]) >= 0.99


@pytest.mark.parametrize("damage", [_blurred, _noisy, _compressed, lambda i: _compressed(_noisy(_blurred(i)))])
@pytest.mark.parametrize("kind", SCENE_KINDS)
def test_damaged_pictures_are_read_right(kind: str, damage: Callable[[Image.Image], Image.Image]) -> None:
    verdicts = [judge(damage(image), scene) for image, scene in _pictures(150, kind, seed=1)]
    assert np.mean([verdict.all for verdict in verdicts]) >= 0.97


@pytest.mark.parametrize("kind", SCENE_KINDS)
def test_captions_of_other_pictures_are_true_by_coincidence_only(kind: str) -> None:
    pictures = _pictures(300, kind, seed=2)
    seen = [detect_scene(image) for image, _ in pictures]
    scenes = [canonical_scene(scene) for _, scene in pictures]
    others = [(one, other) for one in range(300) for other in range(300) if one != other]
    coincidence = np.mean([scenes[one] == scenes[other] for one, other in others])
    judged = np.mean([compare(seen[one], scenes[other]).all for one, other in others])
    assert judged == pytest.approx(coincidence, abs=1e-4)
    assert judged < 0.01


def _single(shape: str = "square", colour: str = "blue", size: str = "large", background: str = "white") -> Scene:
    return Scene("single", (Item(shape, colour, size),), None, 1, background)


def _fields(drawn: Scene, asked: Scene) -> dict[str, bool | None]:
    verdict = judge(render_scene(drawn, 64, 64, np.random.default_rng(0)), asked)
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
def test_a_wrong_attribute_of_a_single_is_told(drawn: Scene, wrong: set[str]) -> None:
    fields = _fields(drawn, _single())
    assert {name for name, holds in fields.items() if holds is False} == wrong | ({"all"} if wrong else set())
    assert fields["relation"] is None


def test_a_wrong_count_is_told() -> None:
    asked = Scene("count", (Item("star", "green"),), None, 3, "grey")
    for count in (2, 4):
        fields = _fields(replace(asked, count=count), asked)
        assert fields["count"] is False
        assert fields["all"] is False
        assert fields["size"] is None


@pytest.mark.parametrize("other", [Item("ring", "cyan"), Item("ring", "orange"), Item("square", "orange")])
def test_a_wrong_relation_is_told(other: Item) -> None:
    first = Item("star", "orange")
    asked = Scene("pair", (first, other), "above", 2, "black")
    assert _fields(asked, asked)["all"]
    assert _fields(Scene("pair", (other, first), "below", 2, "black"), asked)["all"]
    for relation in ("below", "left of", "right of"):
        fields = _fields(replace(asked, relation=relation), asked)
        assert {name for name, holds in fields.items() if holds is False} == {"relation", "all"}


def test_swapped_colours_of_a_pair_are_told_as_shape() -> None:
    asked = Scene("pair", (Item("star", "orange"), Item("ring", "cyan")), "left of", 2, "white")
    drawn = Scene("pair", (Item("star", "cyan"), Item("ring", "orange")), "left of", 2, "white")
    fields = _fields(drawn, asked)
    assert (fields["colour"], fields["shape"], fields["relation"]) == (True, False, False)


def test_every_wrong_shape_is_told() -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        for size in ("small", "large"):
            seen = detect_scene(render_scene(_single(shape=shape, size=size), 64, 64, rng))
            told = {other for other in SHAPES if compare(seen, _single(shape=other, size=size)).shape}
            assert told == {shape}


def _drawn(draw_it: Callable[[ImageDraw.ImageDraw], object]) -> Image.Image:
    canvas = Image.new("RGB", (256, 256), "white")
    draw_it(ImageDraw.Draw(canvas))
    return canvas.reduce(4)


def test_shapes_that_are_none_of_ours_are_unknown() -> None:
    blue = COLOURS["blue"]
    images = [
        _drawn(lambda d: d.ellipse((90, 40, 150, 200), fill=blue)),
        _drawn(lambda d: d.rectangle((40, 100, 210, 150), fill=blue)),
        _drawn(lambda d: d.pieslice((60, 60, 190, 190), 0, 150, fill=blue)),
        _drawn(lambda d: d.line((60, 60, 60, 190, 190, 190), fill=blue, width=40)),
    ]
    for image in images:
        assert [(o.colour, o.shape) for o in detect_scene(image).objects] == [("blue", "unknown")]


def test_colours_and_backgrounds_that_are_none_of_ours_are_unknown() -> None:
    brown = _drawn(lambda d: d.ellipse((60, 60, 190, 190), fill=(110, 60, 30)))
    assert [o.colour for o in detect_scene(brown).objects] == ["unknown"]
    split = _drawn(lambda d: d.rectangle((0, 0, 127, 255), fill="black"))
    assert detect_scene(split).background == "unknown"


def test_empty_and_random_pictures_show_nothing() -> None:
    blank = detect_scene(np.full((48, 80, 3), 255, dtype=np.uint8))
    assert (blank.background, blank.objects) == ("white", ())
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    assert not any(judge(noise, scene).all for _, scene in _pictures(20, "single"))


def test_an_array_is_read_as_the_picture_is() -> None:
    image, _ = _pictures(1, "pair")[0]
    assert detect_scene(np.asarray(image)) == detect_scene(image)
