"""Picture -> what it shows, read without knowing the caption, and whether that is what a scene asks for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sd3_light.world.rendering import REFERENCE_SIDE, scale_of, shape_mask
from sd3_light.world.scene import SHAPES, Item, Scene
from sd3_light.world.segment import UNKNOWN, Floats, Region, find_background, find_regions, sharpen

Picture = Image.Image | NDArray[np.uint8]

_MIN_AREA = 9.0  # inner pixels of an object in a 64x64 picture
_SIZE_BORDER = 24.5  # the diameter between small and large, in the same pixels
_MIN_OVERLAP = 0.70  # the least soft IoU with a template; true renderings have 0.87 and more
_MIN_LEAD = 0.01  # by how much the best template must beat the second
MIN_EACH = 0.1  # the least share of what is not background that an asked colour must have
# The lines of the grid on which masks are compared, in radii of the disc of equal area.
_STEPS = np.linspace(-1.45, 1.45, 32)


@dataclass(frozen=True)
class DetectedObject:
    """An object found in a picture; colour and shape may be `unknown`, lengths are pixels."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    diameter: float
    overlap: float


@dataclass(frozen=True)
class DetectedScene:
    """What a picture shows (the background may be `unknown`), and each colour's share of what is not background."""

    background: str
    objects: tuple[DetectedObject, ...]
    areas: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """Which of a scene's demands a picture meets; None where the scene does not demand it.

    `colour`: the asked colours are the picture's main ones, whatever the form (the largest by area besides the
    background, each at least `MIN_EACH` of it); `shape`: the objects' (colour, shape) pairs; `count`: how many there
    are; `relation`: how the centres of the objects lie that have the named colours (and shapes, if the colours agree).
    """

    background: bool
    colour: bool
    shape: bool
    size: bool | None
    count: bool
    relation: bool | None

    @property
    def all(self) -> bool:
        """Whether everything that is demanded holds."""
        fields = (self.background, self.colour, self.shape, self.size, self.count, self.relation)
        return all(field for field in fields if field is not None)


def detect_scene(image: Picture) -> DetectedScene:
    """What the picture shows."""
    array = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    assert array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8, (array.shape, array.dtype)
    pixels = array.astype(np.float32)
    scale = scale_of(array.shape[1], array.shape[0])
    background, ground = find_background(pixels)
    regions = find_regions(pixels, ground, _MIN_AREA * scale**2)
    objects = tuple(_recognise(r.colour, r.left, r.top, r.cover, scale) for r in regions)
    return DetectedScene(background, objects, _areas(regions))


def _areas(regions: Sequence[Region]) -> dict[str, float]:
    total = sum(float(region.cover.sum()) for region in regions)
    shares: dict[str, float] = {}
    for region in regions:
        shares[region.colour] = shares.get(region.colour, 0.0) + float(region.cover.sum()) / total
    return shares


def judge(image: Picture, scene: Scene) -> Verdict:
    """Whether the picture shows what the scene asks for, field by field."""
    return compare(detect_scene(image), scene)


def compare(seen: DetectedScene, scene: Scene) -> Verdict:
    """Whether what was seen is what the scene asks for, field by field."""
    asked, found = scene.objects, seen.objects
    size = scene.items[0].size
    return Verdict(
        background=seen.background == scene.background,
        colour=_coloured_as({item.colour for item in asked}, seen.areas),
        # a set: how often each is there is the count's business, and together they leave no gap
        shape={(i.colour, i.shape) for i in asked} == {(o.colour, o.shape) for o in found},
        size=None if size is None else len(found) == 1 and found[0].size == size,
        count=len(found) == len(asked),
        relation=None if scene.relation is None else _related(found, scene),
    )


def _coloured_as(asked: set[str], areas: Mapping[str, float]) -> bool:
    largest = sorted(areas, key=lambda colour: -areas[colour])[: len(asked)]
    return set(largest) == asked and min(areas[colour] for colour in asked) >= MIN_EACH


def _related(found: tuple[DetectedObject, ...], scene: Scene) -> bool:
    """Whether two of the objects are the scene's items and lie as it says; shapes matter only for equal colours."""
    first, second = scene.items
    twins = first.colour == second.colour

    def fits(seen: DetectedObject, item: Item) -> bool:
        return seen.colour == item.colour and (not twins or seen.shape == item.shape)

    assert scene.relation is not None
    return any(
        fits(a, first) and fits(b, second) and _lies(b.x - a.x, b.y - a.y, scene.relation)
        for a, b in permutations(found, 2)
    )


def _lies(dx: float, dy: float, relation: str) -> bool:
    """Whether a thing is in the relation to another that is (dx, dy) away from it: along that axis above all."""
    ahead = {"left of": dx, "right of": -dx, "above": dy, "below": -dy}[relation]
    across = dy if relation in ("left of", "right of") else dx
    return ahead > abs(across)


def _recognise(colour: str, left: int, top: int, cover: Floats, scale: float) -> DetectedObject:
    """The object of a region, its shape that of the template it overlaps best, at its own place and scale."""
    area, cx, cy = _moments(cover)
    templates, areas = _templates(_reference_diameter(area, scale))
    mine = _normalise(cover)
    overlaps = np.minimum(templates, mine).sum(axis=(1, 2)) / np.maximum(templates, mine).sum(axis=(1, 2))
    order = np.argsort(overlaps)
    best = int(order[-1])
    diameter = math.sqrt(area / float(areas[best]))
    sure = overlaps[best] >= _MIN_OVERLAP and overlaps[best] - overlaps[order[-2]] >= _MIN_LEAD
    return DetectedObject(
        colour=colour,
        shape=SHAPES[best] if sure else UNKNOWN,
        size="small" if diameter < _SIZE_BORDER * scale else "large",
        x=left + cx + 0.5,
        y=top + cy + 0.5,
        diameter=diameter,
        overlap=float(overlaps[best]),
    )


def _moments(cover: Floats) -> tuple[float, float, float]:
    """The area of a soft mask and its centre, in the coordinates of pixel middles."""
    area = float(cover.sum())
    cx = float(cover.sum(axis=0) @ np.arange(cover.shape[1])) / area
    cy = float(cover.sum(axis=1) @ np.arange(cover.shape[0])) / area
    return area, cx, cy


def _normalise(cover: Floats) -> Floats:
    """The mask on a grid centred on its centre of mass and scaled by its area, bilinearly interpolated."""
    area, cx, cy = _moments(cover)
    steps = _STEPS * math.sqrt(area / math.pi)
    rows, columns = _hats(cy + steps, cover.shape[0]), _hats(cx + steps, cover.shape[1])
    return np.asarray(rows @ cover @ columns.T, dtype=np.float32)


def _hats(places: NDArray[np.float64], length: int) -> Floats:
    """The matrix that interpolates a line of pixels, zero outside, at the given places."""
    hats: Floats = np.maximum(1 - np.abs(places[:, None] - np.arange(length)), 0).astype(np.float32)
    return hats


def _reference_diameter(area: float, scale: float) -> int:
    """The drawn diameter, roughly, whose templates have rims as soft as this region's."""
    return 18 if area < 350 * scale**2 else 32


@cache
def _templates(diameter: int) -> tuple[Floats, Floats]:
    """For every shape its normalised mask, and its area as a share of the square of its diameter."""
    masks = [sharpen(shape_mask(shape, diameter, REFERENCE_SIDE)) for shape in SHAPES]
    areas = np.array([mask.sum() / diameter**2 for mask in masks], dtype=np.float32)
    return np.stack([_normalise(mask) for mask in masks]), areas
