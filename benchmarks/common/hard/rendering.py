"""Harder scene -> image: textured, antialiased shapes at free positions, at most one overlapping another."""

import math
from functools import cache

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from common.hard.scene import DEPTH_RELATIONS, Group, HardScene
from sd3_light.world.judge import satisfies
from sd3_light.world.rendering import REFERENCE_SIDE, SUPERSAMPLE, draw_shape, scale_of, shape_mask
from sd3_light.world.scene import BACKGROUNDS, COLOURS, Rgb
from sd3_light.world.segment import connected

# Lengths are pixels in an image of 64 x 64; others scale.
DIAMETERS = {"small": (12.2, 13.8), "large": (19.3, 21.7)}
SIZE_THRESHOLD = 16.5
_ANY_DIAMETER = (12.2, 21.7)
_CROWDED = 4  # from this number of objects on, they are small and placed in the cells of a 3 x 3 grid
_EXTENT = 1.1  # half the side of a shape's box, in radii
_BORDER = 2.0
_GAP = 2.0
_STRIPE_PERIOD = 5.0
_DOT_PERIOD = 5.0
_DOT_RADIUS = 1.5
_VISIBLE = (0.6, 0.92)  # share of the back object that stays visible
_CLEAR = 1.2  # how much larger than across the distance along a relation is
_MAX_TRIES = 500


def render_hard_scene(scene: HardScene, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Render a scene as an RGB image; the rng places the objects and their textures."""
    background = BACKGROUNDS[scene.background]
    canvas = Image.new("RGB", (width * SUPERSAMPLE, height * SUPERSAMPLE), background)
    for group, place in place_hard_objects(scene, width, height, rng):
        _paint(canvas, group, place, scale_of(width, height), accent_of(group.colour, background), rng)
    return canvas.reduce(SUPERSAMPLE)


def accent_of(colour: str, background: Rgb) -> Rgb:
    """Return the second colour of a texture: a darker shade, or a lighter one on black, unlike any blurred edge."""
    red, green, blue = COLOURS[colour]
    if background == BACKGROUNDS["black"]:
        return (red + 255) // 2, (green + 255) // 2, (blue + 255) // 2
    return red * 55 // 100, green * 55 // 100, blue * 55 // 100


# --- places ------------------------------------------------------------------------------------


Place = tuple[float, float, float]  # x, y, diameter
Box = tuple[float, float]


def place_hard_objects(
    scene: HardScene, width: int, height: int, rng: np.random.Generator
) -> list[tuple[Group, Place]]:
    """Place the objects of a scene, in pixels; the front object of an overlapping pair comes last."""
    scale = scale_of(width, height)
    box = width / scale, height / scale
    objects = scene.objects
    if scene.relation in DEPTH_RELATIONS:
        objects = scene.front_and_back[::-1]
        places = _place_overlapping(objects, box, rng)
    elif len(objects) >= _CROWDED:
        places = _place_in_cells(objects, box, rng)
    else:
        places = _place_freely(scene, box, rng)
    return [
        (group, (x * scale, y * scale, diameter * scale))
        for group, (x, y, diameter) in zip(objects, places, strict=True)
    ]


def _diameter(group: Group, rng: np.random.Generator) -> float:
    return float(rng.uniform(*(DIAMETERS[group.size] if group.size else _ANY_DIAMETER)))


def _inside(diameter: float, box: Box, rng: np.random.Generator) -> Place:
    margin = _EXTENT * diameter / 2 + _BORDER
    return float(rng.uniform(margin, box[0] - margin)), float(rng.uniform(margin, box[1] - margin)), diameter


def _are_apart(first: Place, second: Place) -> bool:
    reach = _EXTENT * (first[2] + second[2]) / 2 + _GAP
    return max(abs(first[0] - second[0]), abs(first[1] - second[1])) >= reach


def _place_freely(scene: HardScene, box: Box, rng: np.random.Generator) -> list[Place]:
    """Return random places without contact, in the scene's relation."""
    for _ in range(_MAX_TRIES):
        places = [_inside(_diameter(group, rng), box, rng) for group in scene.objects]
        apart = all(_are_apart(a, b) for index, a in enumerate(places) for b in places[:index])
        if apart and (scene.relation is None or _is_clear(places, scene.relation)):
            return places
    raise AssertionError(f"no place for {scene}")


def _is_clear(places: list[Place], relation: str) -> bool:
    (x, y, _), (other_x, other_y, _) = places
    return satisfies(other_x - x, other_y - y, relation, _CLEAR)


def _place_in_cells(objects: tuple[Group, ...], box: Box, rng: np.random.Generator) -> list[Place]:
    """Return places in random cells of a 3 x 3 grid."""
    cell_w, cell_h = ((side - 2 * _BORDER) / 3 for side in box)
    cells = rng.permutation(9)[: len(objects)].tolist()
    places = []
    for cell in cells:
        diameter = float(rng.uniform(*DIAMETERS["small"]))
        free_x, free_y = (max(side - _EXTENT * diameter - _GAP, 0) / 2 for side in (cell_w, cell_h))
        x = _BORDER + (cell % 3 + 0.5) * cell_w + free_x * rng.uniform(-1, 1)
        y = _BORDER + (cell // 3 + 0.5) * cell_h + free_y * rng.uniform(-1, 1)
        places.append((float(x), float(y), diameter))
    return places


def _place_overlapping(objects: tuple[Group, ...], box: Box, rng: np.random.Generator) -> list[Place]:
    """Return places of a back and a front object that covers a part of it and leaves the rest in one piece."""
    back, front = objects
    for _ in range(_MAX_TRIES):
        x, y, d_back = _inside(_diameter(back, rng), box, rng)
        d_front = _diameter(front, rng)
        angle = rng.uniform(0, 2 * math.pi)
        distance = rng.uniform(0.5, 0.95) * (d_back + d_front) / 2
        other_x = x + distance * math.cos(angle)
        other_y = y + distance * math.sin(angle)
        margin = _EXTENT * d_front / 2 + _BORDER
        if not (margin <= other_x <= box[0] - margin and margin <= other_y <= box[1] - margin):
            continue
        if _is_clear_overlap(back.shape, d_back, front.shape, d_front, other_x - x, other_y - y):
            return [(x, y, d_back), (float(other_x), float(other_y), d_front)]
    raise AssertionError(f"no place for {objects}")


def _is_clear_overlap(back: str, d_back: float, front: str, d_front: float, dx: float, dy: float) -> bool:
    whole = _solid(back, round(d_back))
    cover = _solid(front, round(d_front))
    visible = whole & ~np.roll(cover, (round(dy), round(dx)), axis=(0, 1))
    if not _VISIBLE[0] <= visible.sum() / whole.sum() <= _VISIBLE[1]:
        return False
    return int(connected(np.where(visible, 0, -1)).max()) == 0


@cache
def _solid(shape: str, diameter: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return shape_mask(shape, diameter, REFERENCE_SIDE) > 0.5


# --- painting ----------------------------------------------------------------------------------


def _paint(
    canvas: Image.Image, group: Group, place: Place, scale: float, accent: Rgb, rng: np.random.Generator
) -> None:
    """Paint one object; the hole of a ring stays as it is."""
    x, y, diameter = place
    reach = math.ceil(0.6 * diameter) + 1
    left = math.floor(x) - reach
    top = math.floor(y) - reach
    side = 2 * reach + 1
    mask = Image.new("L", (side * SUPERSAMPLE, side * SUPERSAMPLE), 0)
    draw_shape(ImageDraw.Draw(mask), group.shape, x - left, y - top, diameter, 255, 0)
    corner = left * SUPERSAMPLE, top * SUPERSAMPLE
    canvas.paste(COLOURS[group.colour], corner, mask)
    if group.texture != "plain":
        pattern = _pattern(group.texture, mask.width, scale * SUPERSAMPLE, rng)
        canvas.paste(accent, corner, ImageChops.darker(mask, pattern))


def _pattern(texture: str, side: int, scale: float, rng: np.random.Generator) -> Image.Image:
    """Return the mask of a texture with a random phase."""
    pattern = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(pattern)
    if texture == "striped":
        period = _STRIPE_PERIOD * scale
        for top in np.arange(-period * rng.random(), side, period).tolist():
            draw.rectangle((0, top, side, top + period / 2), fill=255)
        return pattern
    period = _DOT_PERIOD * scale
    radius = _DOT_RADIUS * scale
    phase_x = -period * rng.random()
    phase_y = -period * rng.random()
    for row, y in enumerate(np.arange(phase_y, side + period, period).tolist()):
        for x in np.arange(phase_x - period / 2 * (row % 2), side + period, period).tolist():
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return pattern
