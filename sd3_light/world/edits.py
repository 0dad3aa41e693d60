"""Edits of demo images: a layout, an instruction, and the layout after one change, with a judge of both halves.

A layout has an object or none in each quarter of a square image. An edit keeps the pixels of everything else, so that
the image after it is known exactly. What an edit must change and what it must keep are judged apart.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from sd3_light.randomness import stream
from sd3_light.world.judge import DetectedObject, ImageLike, recognise, to_pixels
from sd3_light.world.rendering import PlacedObject, render_objects, scale_of
from sd3_light.world.scene import ALL_PAIRS, BACKGROUNDS, COLOURS, HELD_OUT_LIST, HELD_OUT_PAIRS, SEEN_PAIRS, Item, pick
from sd3_light.world.segment import find_background, find_regions

BEFORE = "before"
AFTER = "after"
"""The folders of a dataset: references, and the images that are trained on."""
_SIDE = 64  # the lengths below are pixels in an image with this side
_DIAMETERS = {"small": 16.0, "large": 25.0}
_SIZE_THRESHOLD = 20.5
_JITTER = 2.0
_NEAR = 5.0  # maximum distance between the centres of an object and of what is drawn in its place
_MIN_AREA = 9.0
_STEPS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
_BESIDE = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
Place = tuple[int, int]
"""Column and row of a quarter."""
_PLACES: tuple[Place, ...] = ((0, 0), (1, 0), (0, 1), (1, 1))


@dataclass(frozen=True)
class Layout:
    """A background and objects in quarters of the image; ``offsets`` are their distances from a quarter's centre."""

    background: str
    objects: tuple[tuple[Place, Item], ...]
    offset: tuple[float, float]

    def at(self, place: Place) -> Item | None:
        """Return the object in a quarter."""
        return dict(self.objects).get(place)

    def with_object(self, place: Place, item: Item | None) -> "Layout":
        """Return the layout with another object in a quarter, or with none."""
        others = [(own, kept) for own, kept in self.objects if own != place]
        return replace(self, objects=tuple(sorted(others + ([] if item is None else [(place, item)]), key=_order)))

    def placed(self, place: Place, item: Item, side: int) -> PlacedObject:
        """Return an object of a quarter in pixels of an image with this side."""
        assert item.size is not None
        scale = side / _SIDE
        x, y = (self.centre(axis, place) * scale for axis in (0, 1))
        return PlacedObject(item, x, y, _DIAMETERS[item.size] * scale)

    def centre(self, axis: int, place: Place) -> float:
        """Return where an object of a quarter is along an axis."""
        return _SIDE * (0.25 + 0.5 * place[axis]) + self.offset[axis]

    def render(self, side: int) -> Image.Image:
        """Return the image."""
        placed = [self.placed(place, item, side) for place, item in self.objects]
        return render_objects(self.background, placed, side, side)


def _order(entry: tuple[Place, Item]) -> Place:
    return entry[0]


@dataclass(frozen=True)
class Edit:
    """One change of a layout and the instruction that asks for it."""

    kind: str
    before: Layout
    after: Layout
    instruction: str


@dataclass(frozen=True)
class EditVerdict:
    """Whether an image shows what an edit changes, and everything that it keeps."""

    changed: bool
    kept: bool

    @property
    def all(self) -> bool:
        """Whether the edit is right."""
        return self.changed and self.kept


# --- drawing -------------------------------------------------------------------------------------


def draw_edits(count: int, seed: int, held_out: bool) -> list[Edit]:
    """Return edits of all kinds in turn; edit i depends only on (seed, held_out, i).

    Without ``held_out`` no layout has a held-out pair of colour and shape. With it the object that changes has one,
    before or after the change; the background changes under one.
    """
    purpose = f"world-edit-{'held-out' if held_out else 'train'}"
    return [
        _draw_edit(stream(seed, purpose, 0, 0, index), EDIT_KINDS[index % len(EDIT_KINDS)], held_out)
        for index in range(count)
    ]


def write_edits(folder: Path, edits: Sequence[Edit], side: int) -> Path:
    """Write the images before and after edits and `after/captions.json` ({file: instruction}); returns the folder."""
    for name in (BEFORE, AFTER):
        (folder / name).mkdir(parents=True, exist_ok=True)
    captions = {}
    for number, edit in enumerate(edits):
        file = f"{number:06d}.png"
        edit.before.render(side).save(folder / BEFORE / file)
        edit.after.render(side).save(folder / AFTER / file)
        captions[file] = edit.instruction
    (folder / AFTER / "captions.json").write_text(json.dumps(captions, indent=0), encoding="utf-8")
    return folder


def _draw_edit(rng: np.random.Generator, kind: str, held_out: bool) -> Edit:
    while True:
        edit = _try_edit(rng, kind, held_out)
        if edit is not None:
            return edit


@dataclass(frozen=True)
class _Draw:
    """A random layout and the object in it that changes; ``held_out`` as in `draw_edits`."""

    rng: np.random.Generator
    layout: Layout
    place: Place
    item: Item
    held_out: bool

    @property
    def without(self) -> Layout:
        return self.layout.with_object(self.place, None)

    def changed(self, item: Item) -> Layout:
        return self.layout.with_object(self.place, item)


def _try_edit(rng: np.random.Generator, kind: str, held_out: bool) -> Edit | None:
    """Return an edit of a random layout; None if that layout allows none."""
    place = pick(rng, _PLACES)
    pairs = ALL_PAIRS if held_out else SEEN_PAIRS
    is_old_held_out = held_out and (kind != "recolour" or rng.random() < 0.5)
    item = _item(rng, HELD_OUT_LIST if is_old_held_out else pairs)
    others = [other for other in _PLACES if other != place]
    chosen = rng.permutation(len(others))[: int(rng.integers(1 if kind == "add" else 0, 3))]
    objects = [(place, item), *((others[number], _item(rng, pairs)) for number in chosen)]
    if len({_name(own) for _, own in objects}) < len(objects):
        return None
    across, down = (float(shift) for shift in rng.uniform(-_JITTER, _JITTER, 2))
    ground = pick(rng, tuple(BACKGROUNDS))
    layout = Layout(ground, tuple(sorted(objects, key=_order)), (across, down))
    change = _CHANGES[kind](_Draw(rng, layout, place, item, held_out))
    if change is None:
        return None
    after, instruction = change
    before = layout.with_object(place, None) if kind == "add" else layout
    return Edit(kind, before, after, instruction)


Change = tuple[Layout, str]
"""The layout after an edit, and its instruction."""


def _add(draw: _Draw) -> Change | None:
    for word, step in _STEPS.items():
        beside = draw.layout.at((draw.place[0] - step[0], draw.place[1] - step[1]))
        if beside is not None:
            return draw.layout, f"add a {draw.item.size} {_name(draw.item)} {_BESIDE[word]} {_name(beside)}"
    return None


def _remove(draw: _Draw) -> Change:
    return draw.without, f"remove {_name(draw.item)}"


def _recolour(draw: _Draw) -> Change | None:
    colours = tuple(colour for colour in COLOURS if colour != draw.item.colour)
    item = replace(draw.item, colour=pick(draw.rng, colours))
    is_held_out = any((each.colour, each.shape) in HELD_OUT_PAIRS for each in (draw.item, item))
    names = [_name(own) for _, own in draw.layout.objects]
    if is_held_out != draw.held_out or _name(item) in names:
        return None
    return draw.changed(item), f"make {_name(draw.item)} {item.colour}"


def _resize(draw: _Draw) -> Change:
    size = "large" if draw.item.size == "small" else "small"
    return draw.changed(replace(draw.item, size=size)), f"make {_name(draw.item)} {size}"


def _move(draw: _Draw) -> Change | None:
    word = pick(draw.rng, tuple(_STEPS))
    target = (draw.place[0] + _STEPS[word][0], draw.place[1] + _STEPS[word][1])
    if target not in _PLACES or draw.layout.at(target) is not None:
        return None
    return draw.without.with_object(target, draw.item), f"move {_name(draw.item)} {word}"


def _background(draw: _Draw) -> Change:
    ground = pick(draw.rng, tuple(ground for ground in BACKGROUNDS if ground != draw.layout.background))
    return replace(draw.layout, background=ground), f"make background {ground}"


_CHANGES: dict[str, Callable[[_Draw], Change | None]] = {
    "add": _add,
    "remove": _remove,
    "recolour": _recolour,
    "resize": _resize,
    "move": _move,
    "background": _background,
}
EDIT_KINDS: tuple[str, ...] = tuple(_CHANGES)


def _item(rng: np.random.Generator, pairs: tuple[tuple[str, str], ...]) -> Item:
    colour, shape = pick(rng, pairs)
    return Item(shape, colour, pick(rng, tuple(_DIAMETERS)))


def _name(item: Item) -> str:
    return f"{item.colour} {item.shape}"


# --- judging -------------------------------------------------------------------------------------


def judge_edit(image: ImageLike, edit: Edit) -> EditVerdict:
    """Return whether an image shows what an edit changes, and all that it keeps.

    What an object keeps is its colour, shape and size, as far as the instruction does not change them, and its place,
    to `_NEAR` pixels. The image shows no other objects.
    """
    pixels = to_pixels(image)
    scale = scale_of(pixels.shape[1], pixels.shape[0])
    ground_name, ground = find_background(pixels)
    regions = find_regions(pixels, ground, _MIN_AREA * scale**2)
    shown = [recognise(region, scale, _SIZE_THRESHOLD) for region in regions]
    is_right = ground_name == edit.after.background
    changed = [is_right] if edit.before.background != edit.after.background else []
    kept = [is_right] if not changed else []
    for place in _PLACES:
        own_changed, own_kept = _judge_place(_taken(shown, edit.after, place, pixels.shape[0]), edit, place)
        changed += own_changed
        kept += own_kept
    return EditVerdict(all(changed), all(kept) and not shown)


def _judge_place(shown: DetectedObject | None, edit: Edit, place: Place) -> tuple[list[bool], list[bool]]:
    """Return what is right of what an edit changes in a quarter, and of what it keeps there."""
    before = edit.before.at(place)
    after = edit.after.at(place)
    if after is None:
        is_empty = [shown is None]
        return ([], is_empty) if before is None else (is_empty, [])
    if shown is None:
        return ([], [False]) if before == after else ([False], [before is None])
    source = before
    if edit.kind == "move" and before is None:
        source = replace(after, shape="", colour="")  # its size is kept
    changed: list[bool] = []
    kept: list[bool] = []
    for attribute in ("colour", "shape", "size"):
        is_right = getattr(shown, attribute) == getattr(after, attribute)
        is_kept = source is not None and getattr(source, attribute) == getattr(after, attribute)
        (kept if is_kept else changed).append(is_right)
    return changed, kept


def _taken(shown: list[DetectedObject], layout: Layout, place: Place, side: int) -> DetectedObject | None:
    """Take the object at a quarter's place out of what an image shows; None if there is none."""
    x, y = (layout.centre(axis, place) * side / _SIDE for axis in (0, 1))
    distances = [math.hypot(each.x - x, each.y - y) for each in shown]
    if not distances or min(distances) > _NEAR * side / _SIDE:
        return None
    return shown.pop(distances.index(min(distances)))
