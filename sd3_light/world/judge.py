"""Detects the scene of an image without knowing the caption, and compares it with a requested scene."""

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

ImageLike = Image.Image | NDArray[np.uint8]

_MIN_AREA = 9.0  # minimum inner pixels of an object in a 64x64 image
_SIZE_THRESHOLD = 24.5  # diameter between small and large, in the same pixels
MIN_OVERLAP = 0.70  # minimum soft IoU with a template; true renderings reach at least 0.87
MIN_LEAD = 0.01  # minimum lead of the best template over the second
MIN_COLOUR_SHARE = 0.1  # minimum share of the foreground for each requested colour
# Grid coordinates on which masks are compared, in radii of the disc of equal area.
_STEPS = np.linspace(-1.45, 1.45, 32)


@dataclass(frozen=True)
class DetectedObject:
    """An object detected in an image; colour and shape may be `unknown`, lengths are in pixels."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    diameter: float
    overlap: float


@dataclass(frozen=True)
class DetectedScene:
    """What an image shows (the background may be `unknown`), and each colour's share of the foreground."""

    background: str
    objects: tuple[DetectedObject, ...]
    areas: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """Which requirements of a scene an image meets; None if the scene does not have the requirement.

    `colour`: the requested colours are the largest by area besides the background, each at least `MIN_COLOUR_SHARE` of
    the foreground, whatever the shapes; `shape`: the (colour, shape) pairs of the objects; `count`: their number;
    `relation`: the positions of the objects with the named colours (and shapes, if the colours are equal).
    """

    background: bool
    colour: bool
    shape: bool
    size: bool | None
    count: bool
    relation: bool | None
    texture: bool | None = None

    @property
    def all(self) -> bool:
        """Whether all requirements are met."""
        return False not in vars(self).values()


def detect_scene(image: ImageLike) -> DetectedScene:
    """Detect the scene that an image shows."""
    pixels = to_pixels(image)
    scale = scale_of(pixels.shape[1], pixels.shape[0])
    background, ground = find_background(pixels)
    regions = find_regions(pixels, ground, _MIN_AREA * scale**2)
    objects = tuple(recognise(region, scale) for region in regions)
    return DetectedScene(background, objects, _areas(regions))


def to_pixels(image: ImageLike) -> Floats:
    """Return the RGB values of an image as [height, width, 3]."""
    array = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    assert array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8, (array.shape, array.dtype)
    return array.astype(np.float32)


def _areas(regions: Sequence[Region]) -> dict[str, float]:
    total = sum(float(region.cover.sum()) for region in regions)
    shares: dict[str, float] = {}
    for region in regions:
        shares[region.colour] = shares.get(region.colour, 0.0) + float(region.cover.sum()) / total
    return shares


def judge(image: ImageLike, scene: Scene) -> Verdict:
    """Return which requirements of the scene an image meets."""
    return compare(detect_scene(image), scene)


def compare(detected: DetectedScene, scene: Scene) -> Verdict:
    """Return which requirements of the scene a detected scene meets."""
    expected = scene.objects
    objects = detected.objects
    size = scene.items[0].size
    return Verdict(
        background=detected.background == scene.background,
        colour=_has_colours({item.colour for item in expected}, detected.areas),
        # sets: the number of each is checked by `count`
        shape={(item.colour, item.shape) for item in expected} == {(item.colour, item.shape) for item in objects},
        size=None if size is None else len(objects) == 1 and objects[0].size == size,
        count=len(objects) == len(expected),
        relation=None if scene.relation is None else _has_relation(objects, scene),
    )


def _has_colours(colours: set[str], areas: Mapping[str, float]) -> bool:
    largest = sorted(areas, key=lambda colour: -areas[colour])[: len(colours)]
    return set(largest) == colours and min(areas[colour] for colour in colours) >= MIN_COLOUR_SHARE


def _has_relation(objects: tuple[DetectedObject, ...], scene: Scene) -> bool:
    """Return whether two objects match the scene's items and relation. Shapes matter only if the colours are equal."""
    first, second = scene.items
    same_colour = first.colour == second.colour

    def matches(detected: DetectedObject, item: Item) -> bool:
        return detected.colour == item.colour and (not same_colour or detected.shape == item.shape)

    assert scene.relation is not None
    return any(
        matches(a, first) and matches(b, second) and satisfies(b.x - a.x, b.y - a.y, scene.relation)
        for a, b in permutations(objects, 2)
    )


def satisfies(dx: float, dy: float, relation: str, clearly: float = 1.0) -> bool:
    """Return whether an offset of (dx, dy) to the other object fits the relation: mainly along its axis."""
    along = {"left of": dx, "right of": -dx, "above": dy, "below": -dy}[relation]
    across = dy if relation in ("left of", "right of") else dx
    return along > clearly * abs(across)


def recognise(region: Region, scale: float, size_threshold: float = _SIZE_THRESHOLD) -> DetectedObject:
    """Return the object of a region; its shape is that of the template with the largest overlap."""
    area, cx, cy = _moments(region.cover)
    # templates whose edges are about as soft as those of this region
    templates, areas = _templates(18 if area < 350 * scale**2 else 32)
    mask = _normalise(region.cover)
    overlaps = np.minimum(templates, mask).sum(axis=(1, 2)) / np.maximum(templates, mask).sum(axis=(1, 2))
    order = np.argsort(overlaps)
    best = int(order[-1])
    diameter = math.sqrt(area / float(areas[best]))
    is_certain = overlaps[best] >= MIN_OVERLAP and overlaps[best] - overlaps[order[-2]] >= MIN_LEAD
    return DetectedObject(
        colour=region.colour,
        shape=SHAPES[best] if is_certain else UNKNOWN,
        size="small" if diameter < size_threshold * scale else "large",
        x=region.left + cx + 0.5,
        y=region.top + cy + 0.5,
        diameter=diameter,
        overlap=float(overlaps[best]),
    )


def _moments(cover: Floats) -> tuple[float, float, float]:
    """Return the area and the centre of a soft mask, in pixel-centre coordinates."""
    area = float(cover.sum())
    cx = float(cover.sum(axis=0) @ np.arange(cover.shape[1])) / area
    cy = float(cover.sum(axis=1) @ np.arange(cover.shape[0])) / area
    return area, cx, cy


def _normalise(cover: Floats) -> Floats:
    """Resample a mask bilinearly on a grid centred on its centre of mass and scaled by its area."""
    area, cx, cy = _moments(cover)
    steps = _STEPS * math.sqrt(area / math.pi)
    rows = _hats(cy + steps, cover.shape[0])
    columns = _hats(cx + steps, cover.shape[1])
    return np.asarray(rows @ cover @ columns.T, dtype=np.float32)


def _hats(positions: NDArray[np.float64], length: int) -> Floats:
    """Return the matrix that interpolates a line of pixels, zero outside, at these positions."""
    hats: Floats = np.maximum(1 - np.abs(positions[:, None] - np.arange(length)), 0).astype(np.float32)
    return hats


@cache
def _templates(diameter: int) -> tuple[Floats, Floats]:
    """Return the normalised mask of every shape, and its area as a fraction of its squared diameter."""
    masks = [sharpen(shape_mask(shape, diameter, REFERENCE_SIDE)) for shape in SHAPES]
    areas = np.array([mask.sum() / diameter**2 for mask in masks], dtype=np.float32)
    return np.stack([_normalise(mask) for mask in masks]), areas
