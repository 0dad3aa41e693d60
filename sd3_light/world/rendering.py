"""Scene -> image: flat, antialiased shapes in slots that keep them apart and inside despite the jitter."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from sd3_light.world.scene import BACKGROUNDS, COLOURS, Item, Scene

Mask = NDArray[np.float32]

SUPERSAMPLE = 4
REFERENCE_SIDE = 64  # the lengths below are pixels in an image with this side; others scale with the root of the area

_DIAMETERS = {"small": 18.0, "large": 32.0, "pair": 20.0, "count": 18.5}
_DIAMETER_JITTER = 0.06
_CENTRE_JITTER = 3.0
_PAD = 2.0  # margin at each edge of a slot, so neighbours are at least twice this apart
_SLOT_SHARE = 0.78  # maximum share of a slot's side that an object may take


@dataclass(frozen=True)
class PlacedObject:
    """An object with its centre and diameter in pixels."""

    item: Item
    x: float
    y: float
    diameter: float


def scale_of(width: int, height: int) -> float:
    """Return the scale of lengths in an image of this size relative to a 64x64 image."""
    return math.sqrt(width * height) / REFERENCE_SIDE


def render_scene(scene: Scene, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Render a scene as an RGB image; the rng jitters the position and scale of its objects."""
    return render_objects(scene.background, place_objects(scene, width, height, rng), width, height)


def render_objects(background: str, objects: Iterable[PlacedObject], width: int, height: int) -> Image.Image:
    """Render objects on a background as an RGB image."""
    ground = BACKGROUNDS[background]
    canvas = Image.new("RGB", (width * SUPERSAMPLE, height * SUPERSAMPLE), ground)
    draw = ImageDraw.Draw(canvas)
    for placed in objects:
        colour = COLOURS[placed.item.colour]
        draw_shape(draw, placed.item.shape, placed.x, placed.y, placed.diameter, colour, ground)
    return canvas.reduce(SUPERSAMPLE)


def shape_mask(shape: str, diameter: float, side: int) -> Mask:
    """Return the antialiased coverage (0 to 1) of one shape centred in a square of `side` pixels."""
    canvas = Image.new("L", (side * SUPERSAMPLE, side * SUPERSAMPLE), 0)
    draw_shape(ImageDraw.Draw(canvas), shape, side / 2, side / 2, diameter, 255, 0)
    return np.asarray(canvas.reduce(SUPERSAMPLE), dtype=np.float32) / 255.0


def place_objects(scene: Scene, width: int, height: int, rng: np.random.Generator) -> list[PlacedObject]:
    """Place the objects of a scene: apart from each other, inside the image, with clear relations."""
    scale = scale_of(width, height)
    placed = []
    for item, (left, top, right, bottom) in zip(scene.objects, _slots(scene, width, height), strict=True):
        slot_w = (right - left) * width
        slot_h = (bottom - top) * height
        diameter = _DIAMETERS[item.size or scene.kind] * scale * (1 + _DIAMETER_JITTER * rng.uniform(-1, 1))
        diameter = min(diameter, _SLOT_SHARE * min(slot_w, slot_h))
        x = (left + right) / 2 * width + _max_jitter(slot_w, diameter, scale) * rng.uniform(-1, 1)
        y = (top + bottom) / 2 * height + _max_jitter(slot_h, diameter, scale) * rng.uniform(-1, 1)
        placed.append(PlacedObject(item, x, y, diameter))
    return placed


def _max_jitter(slot: float, diameter: float, scale: float) -> float:
    """Return the maximum jitter of an object's centre in its slot along one axis."""
    return float(np.clip((slot - diameter) / 2 - _PAD * scale, 0, _CENTRE_JITTER * scale))


Slot = tuple[float, float, float, float]  # left, top, right, bottom, as fractions of the image


def _slots(scene: Scene, width: int, height: int) -> list[Slot]:
    """Return the slots of the scene's objects, in order."""
    if scene.kind == "pair":
        slots = _row(2) if scene.relation in ("left of", "right of") else _column(2)
        return slots if scene.relation in ("left of", "above") else slots[::-1]
    if scene.count == 4:
        return [(x, y, x + 0.5, y + 0.5) for y in (0.0, 0.5) for x in (0.0, 0.5)]
    if scene.count == 3 and max(width, height) < 1.4 * min(width, height):
        return [(0.0, 0.0, 0.5, 0.5), (0.5, 0.0, 1.0, 0.5), (0.25, 0.5, 0.75, 1.0)]
    return _row(scene.count) if width >= height else _column(scene.count)


def _row(count: int) -> list[Slot]:
    return [(i / count, 0.0, (i + 1) / count, 1.0) for i in range(count)]


def _column(count: int) -> list[Slot]:
    return [(0.0, i / count, 1.0, (i + 1) / count) for i in range(count)]


Fill = tuple[int, int, int] | int


def draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, diameter: float, fill: Fill, hole: Fill
) -> None:
    """Draw a shape centred at (x, y), in pixels of the reduced image, on a canvas for `SUPERSAMPLE`."""
    # The canvas is SUPERSAMPLE times finer, and PIL's integer coordinates are pixel centres.
    cx = x * SUPERSAMPLE - 0.5
    cy = y * SUPERSAMPLE - 0.5
    radius = diameter / 2 * SUPERSAMPLE
    if shape in _OUTLINES:
        draw.polygon([(cx + radius * u, cy + radius * v) for u, v in _OUTLINES[shape]], fill=fill)
        return
    draw.ellipse((cx - radius, cy - radius, cx + radius, cy + radius), fill=fill)
    if shape == "ring":
        inner = 0.5 * radius
        draw.ellipse((cx - inner, cy - inner, cx + inner, cy + inner), fill=hole)


def _star_outline() -> list[tuple[float, float]]:
    corners = []
    for index in range(10):
        radius = (1.16, 0.52)[index % 2]
        angle = math.pi * (index / 5 - 0.5)
        corners.append((radius * math.cos(angle), radius * math.sin(angle) + 0.08))
    return corners


def _cross_outline() -> list[tuple[float, float]]:
    # half the width and the length of an arm
    a = 0.37
    b = 1.02
    quarter = [(a, -b), (a, -a), (b, -a)]
    corners = []
    for _ in range(4):
        corners += quarter
        quarter = [(-v, u) for u, v in quarter]
    return corners


# Corners in units of the radius; y points down. Every shape nearly fits in a square of side `diameter`.
_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0.0, -0.95), (1.05, 0.87), (-1.05, 0.87)],
    "diamond": [(0.0, -1.08), (1.08, 0.0), (0.0, 1.08), (-1.08, 0.0)],
    "star": _star_outline(),
    "cross": _cross_outline(),
}
