"""Detects the objects of a harder scene in an image without knowing the caption, and compares them with a scene."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from common.hard.rendering import SIZE_THRESHOLD, accent_of
from common.hard.scene import DEPTH_RELATIONS, HardScene
from sd3_light.world.judge import (
    MIN_LEAD,
    MIN_OVERLAP,
    DetectedObject,
    ImageLike,
    Verdict,
    recognise,
    satisfies,
    to_pixels,
)
from sd3_light.world.rendering import REFERENCE_SIDE, SUPERSAMPLE, draw_shape, scale_of, shape_mask
from sd3_light.world.scene import BACKGROUNDS, COLOURS, SHAPES
from sd3_light.world.segment import (
    COLOUR_NAMES,
    UNKNOWN,
    Bools,
    Floats,
    Ints,
    Region,
    connected,
    dilate,
    find_background,
    keep_large,
)

_MIN_AREA = 14.0  # minimum inner pixels of an object in a 64x64 image; the smallest object has about 60
_TOLERANCE = 45.0  # maximum distance of a pixel from its colour, or from the mixtures of colour and accent
_MIN_ACCENT = 0.07  # minimum share of the accent in a textured object
_MIN_ROWS = 0.8  # minimum share of a striped object's variance that its rows explain; dots reach 0.65
_CONTACT = 1.5  # distance of touching objects in a 64x64 image
_DIAMETERS = tuple(np.arange(11.5, 22.6, 0.75).tolist())
# labels of pixels that belong to no object
_GROUND = -1
_EDGE = -2


@dataclass(frozen=True)
class TexturedObject:
    """A detected object: its shape and place, its texture, and the objects in front of it by index."""

    seen: DetectedObject
    texture: str
    behind: frozenset[int] = frozenset()

    @property
    def pair(self) -> tuple[str, str]:
        """Colour and shape."""
        return self.seen.colour, self.seen.shape


@dataclass(frozen=True)
class DetectedHardScene:
    """What an image shows; the background may be `unknown`."""

    background: str
    objects: tuple[TexturedObject, ...]


def judge_hard(image: ImageLike, scene: HardScene) -> Verdict:
    """Return which requirements of the scene an image meets."""
    return compare_hard(detect_hard_scene(image), scene)


# --- comparing ---------------------------------------------------------------------------------


def compare_hard(detected: DetectedHardScene, scene: HardScene) -> Verdict:
    """Return which requirements of the scene a detected scene meets.

    `count` compares the number of each pair of colour and shape if all pairs are right, otherwise the total.
    """
    objects = detected.objects
    groups = {group.pair: group for group in scene.groups}
    pairs = Counter(item.pair for item in objects)
    shape = set(pairs) == set(groups)
    sized = [(item, groups[item.pair].size) for item in objects if item.pair in groups]
    wanted_sizes = [(item, size) for item, size in sized if size is not None]
    return Verdict(
        background=detected.background == scene.background,
        colour={colour for colour, _ in pairs} == {group.colour for group in scene.groups},
        shape=shape,
        size=_has_sizes(wanted_sizes, shape) if any(group.size for group in scene.groups) else None,
        count=all(pairs[pair] == group.count for pair, group in groups.items())
        if shape
        else len(objects) == scene.num_objects,
        relation=None if scene.relation is None else _has_relation(objects, scene),
        texture={(*item.pair, item.texture) for item in objects}
        == {(*group.pair, group.texture) for group in scene.groups},
    )


def _has_sizes(wanted: Sequence[tuple[TexturedObject, str]], shape: bool) -> bool:
    return shape and all(item.seen.size == size for item, size in wanted)


def _has_relation(objects: Sequence[TexturedObject], scene: HardScene) -> bool:
    first, second = scene.groups
    assert scene.relation is not None
    for a, item in enumerate(objects):
        for b, other in enumerate(objects):
            if item.pair != first.pair or other.pair != second.pair:
                continue
            is_depth = scene.relation in DEPTH_RELATIONS
            if is_depth and (a in other.behind if scene.relation == "in front of" else b in item.behind):
                return True
            touch = a in other.behind or b in item.behind
            offset = other.seen.x - item.seen.x, other.seen.y - item.seen.y
            if not is_depth and not touch and satisfies(*offset, scene.relation):
                return True
    return False


# --- detecting ---------------------------------------------------------------------------------


def detect_hard_scene(image: ImageLike) -> DetectedHardScene:
    """Detect the objects that an image shows."""
    pixels = _reduce(to_pixels(image))
    scale = scale_of(pixels.shape[1], pixels.shape[0])
    background, ground = find_background(pixels)
    colours, accents = _classify(pixels, background, ground)
    labels = connected(colours)
    large = keep_large(labels, _MIN_AREA * scale**2)
    is_ground = colours == _GROUND
    neighbours = [_touching(labels, label, large, max(1, round(_CONTACT * scale))) for label in large]
    seen = []
    for label, touching in zip(large, neighbours, strict=True):
        inside = labels == label
        colour = COLOUR_NAMES[int(colours[inside][0])]
        is_whole = not touching or colour == UNKNOWN
        item = _whole(labels, label, colour, is_ground, scale) if is_whole else _fit(inside, is_ground, colour, scale)
        seen.append(TexturedObject(item, _texture(inside, accents)))
    for back, touching in enumerate(neighbours):
        front = [n for n in touching if _covers(seen[n], seen[back], labels, large[n], large[back])]
        seen[back] = replace(seen[back], behind=frozenset(front))
    return DetectedHardScene(background, tuple(seen))


def _reduce(pixels: Floats) -> Floats:
    """Return the image at about 128 x 128 pixels if it is larger, where edges are as thin as the limits here expect."""
    factor = int(scale_of(pixels.shape[1], pixels.shape[0]) // 2)
    if factor < 2:
        return pixels
    height, width = (side // factor for side in pixels.shape[:2])
    blocks = pixels[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
    return np.asarray(blocks.mean(axis=(1, 3)))


def _classify(pixels: Floats, background: str, ground: Floats) -> tuple[Ints, Floats]:
    """Return the colour of each pixel (or `_GROUND`, `_EDGE`) and how far it is towards the accent of that colour."""
    height, width = pixels.shape[:2]
    flat = pixels.reshape(-1, 3)
    base = np.array(list(COLOURS.values()), dtype=np.float32)
    shade = BACKGROUNDS.get(background, BACKGROUNDS["white"])
    lines = np.array([accent_of(colour, shade) for colour in COLOURS], dtype=np.float32) - base
    towards = np.stack([np.clip((flat - p) @ v / (v @ v), 0, 1) for p, v in zip(base, lines, strict=True)], axis=1)
    miss = np.linalg.norm(flat[:, None] - base - towards[..., None] * lines, axis=2)
    best = miss.argmin(axis=1)
    from_ground = np.linalg.norm(flat - ground, axis=1)
    rows = np.arange(len(best))
    nearest = miss[rows, best]
    colours = np.where(from_ground < nearest, _GROUND, best)
    colours[np.minimum(from_ground, nearest) > _TOLERANCE] = _EDGE
    colours = colours.reshape(height, width).astype(np.int64)
    # an edge is thin: areas of other colours are objects of an unknown colour
    off = colours == _EDGE
    core = ~dilate(dilate(~off))
    colours[dilate(dilate(core)) & off] = len(COLOURS)
    return colours, towards[rows, best].reshape(height, width).astype(np.float32)


def _touching(labels: Ints, label: int, large: Sequence[int], reach: int) -> list[int]:
    """Return the indices of the objects within `reach` pixels of an object."""
    grown = labels == label
    for _ in range(reach):
        grown = dilate(grown)
    return [index for index, other in enumerate(large) if other != label and bool((labels[grown] == other).any())]


def _whole(labels: Ints, label: int, colour: str, is_ground: Bools, scale: float) -> DetectedObject:
    """Return the object of a region that nothing hides; edge pixels around it count half."""
    inside = labels == label
    rows = np.flatnonzero(inside.any(axis=1))
    columns = np.flatnonzero(inside.any(axis=0))
    top = max(int(rows[0]) - 1, 0)
    left = max(int(columns[0]) - 1, 0)
    box = (slice(top, int(rows[-1]) + 2), slice(left, int(columns[-1]) + 2))
    edge = dilate(inside)[box] & (labels[box] < 0) & ~is_ground[box]
    cover = (inside[box] + 0.5 * edge).astype(np.float32)
    return recognise(Region(colour, left, top, cover), scale, SIZE_THRESHOLD)


def _texture(inside: Bools, accents: Floats) -> str:
    """Return the texture of a region by the share of its accent, and by how much of it the rows explain."""
    core = inside & ~dilate(~inside)
    values = np.where(core, accents, 0.0)
    share = float((values > 0.5).sum() / core.sum())
    if share < _MIN_ACCENT:
        return "plain"
    counts = core.sum(axis=1)
    means = values.sum(axis=1) / np.maximum(counts, 1)
    mean = float(values.sum() / counts.sum())
    explained = float((counts * (means - mean) ** 2).sum()) / float(((values - mean) ** 2)[core].sum() + 1e-6)
    return "striped" if explained >= _MIN_ROWS else "dotted"


def _covers(front: TexturedObject, back: TexturedObject, labels: Ints, front_label: int, back_label: int) -> bool:
    """Return whether the first object has most of the pixels that both shapes contain."""
    if UNKNOWN in (*front.pair, *back.pair):
        return False
    height, width = labels.shape
    both = _mask(front.seen, width, height) & _mask(back.seen, width, height)
    return int((labels[both] == front_label).sum()) > max(int((labels[both] == back_label).sum()), both.size // 10_000)


def _mask(seen: DetectedObject, width: int, height: int) -> Bools:
    canvas = Image.new("L", (width * SUPERSAMPLE, height * SUPERSAMPLE), 0)
    draw_shape(ImageDraw.Draw(canvas), seen.shape, seen.x, seen.y, seen.diameter, 255, 0)
    mask: Bools = np.asarray(canvas.reduce(SUPERSAMPLE)) > 127
    return mask


# --- hidden shapes -----------------------------------------------------------------------------


def _fit(inside: Bools, is_ground: Bools, colour: str, scale: float) -> DetectedObject:
    """Return the object whose shape best explains a region, where pixels of other objects may hide it.

    All shapes, diameters and places on a grid are compared by the overlap of their visible part (by FFT).
    """
    factor = max(1, round(scale))
    region = _shrink(inside, factor)
    ground = _shrink(is_ground, factor)
    spectra = _template_spectra(*region.shape)
    shared, outside = (
        np.fft.irfft2(np.fft.rfft2(mask) * spectra, s=mask.shape, axes=(1, 2)) for mask in (region, ground)
    )
    overlaps = shared / (region.sum() + np.maximum(outside, 0))
    by_shape = overlaps.reshape(len(SHAPES), -1).max(axis=1)
    best, second = np.argsort(by_shape)[[-1, -2]]
    number, y, x = np.unravel_index(int(overlaps.argmax()), overlaps.shape)
    diameter = _DIAMETERS[int(number) % len(_DIAMETERS)] * factor
    is_certain = by_shape[best] >= MIN_OVERLAP and by_shape[best] - by_shape[second] >= MIN_LEAD
    return DetectedObject(
        colour=colour,
        shape=SHAPES[int(best)] if is_certain else UNKNOWN,
        size="small" if diameter < SIZE_THRESHOLD * scale else "large",
        x=float(x * factor),
        y=float(y * factor),
        diameter=diameter,
        overlap=float(by_shape[best]),
    )


def _shrink(mask: Bools, factor: int) -> Floats:
    height, width = (side // factor for side in mask.shape)
    blocks = mask[: height * factor, : width * factor].reshape(height, factor, width, factor)
    return np.asarray(blocks.mean(axis=(1, 3), dtype=np.float32))


@cache
def _template_spectra(height: int, width: int) -> NDArray[np.complex64]:
    """Return the conjugate spectra of all shapes (outer) and diameters (inner), centred at the origin."""
    half = REFERENCE_SIDE // 4
    spectra = []
    for shape in SHAPES:
        for diameter in _DIAMETERS:
            canvas = np.zeros((height, width), dtype=np.float32)
            mask = shape_mask(shape, diameter, 2 * half)
            canvas[: 2 * half, : 2 * half] = mask[:height, :width]
            spectra.append(np.conj(np.fft.rfft2(np.roll(canvas, (-half, -half), axis=(0, 1)))))
    return np.stack(spectra).astype(np.complex64)
