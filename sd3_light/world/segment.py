"""Image -> coloured regions: which pixels belong to an object, their colour, and which of them are connected."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sd3_light.world.scene import BACKGROUNDS, COLOURS

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNKNOWN = "unknown"
COLOUR_NAMES: tuple[str, ...] = (*COLOURS, UNKNOWN)

_PALETTE = np.array(list(COLOURS.values()), dtype=np.float32)
_GROUNDS = np.array(list(BACKGROUNDS.values()), dtype=np.float32)
_GROUND_TOLERANCE = 38.0  # white and pink are 79 apart
_GROUND_SHARE = 0.8  # minimum share of the border pixels with the background colour
_COLOUR_TOLERANCE = 48.0  # maximum distance of a pixel from the mixtures of the background with one colour


@dataclass(frozen=True)
class Region:
    """Connected pixels of one colour; `cover` is their soft coverage in the box with the corner (left, top)."""

    colour: str
    left: int
    top: int
    cover: Floats


def find_background(pixels: Floats) -> tuple[str, Floats]:
    """Return the name of the background (or `unknown`) and its colour in this image, read from the border."""
    border = np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), *pixels[2:-2, [0, 1, -2, -1]]])
    ground = np.median(border, axis=0).astype(np.float32)
    distances = np.linalg.norm(_GROUNDS - ground, axis=1)
    share = float(np.mean(np.linalg.norm(border - ground, axis=1) < _GROUND_TOLERANCE))
    known = distances.min() < _GROUND_TOLERANCE and share >= _GROUND_SHARE
    return (tuple(BACKGROUNDS)[int(distances.argmin())] if known else UNKNOWN), ground


def find_regions(pixels: Floats, ground: Floats, min_area: float) -> list[Region]:
    """Return the regions of the objects, without those under `min_area` inner pixels (noise or edges)."""
    colours, cover = _classify(pixels, ground)
    labels = connected(colours)
    large = keep_large(labels, min_area)
    return [_region(labels, label, colours, cover) for label in large]


def keep_large(labels: Ints, min_area: float) -> list[int]:
    """Return the labels with at least `min_area` inner pixels, and set all others to -1."""
    inner = labels[1:-1, 1:-1]
    for neighbour in (labels[:-2, 1:-1], labels[2:, 1:-1], labels[1:-1, :-2], labels[1:-1, 2:]):
        inner = np.where(inner == neighbour, inner, -1)
    areas = np.bincount(inner.ravel() + 1)[1:]
    large = np.flatnonzero(areas >= min_area)
    labels[~np.isin(labels, large)] = -1
    return [int(label) for label in large]


def connected(colours: Ints) -> Ints:
    """Label connected pixels of equal colour with 0, 1, ...; -1 where the colour is negative.

    The pixels of a row are first joined into runs, so that only runs have to be merged.
    """
    starts = np.ones(colours.shape, dtype=np.bool_)
    starts[:, 1:] = colours[:, 1:] != colours[:, :-1]
    runs = (np.cumsum(starts) - 1).reshape(colours.shape)
    touch = (colours[1:] == colours[:-1]) & (colours[1:] >= 0)
    edges = np.unique(runs[:-1][touch] * (runs[-1, -1] + 1) + runs[1:][touch])
    parents = list(range(int(runs[-1, -1]) + 1))
    for edge in edges.tolist():
        upper, lower = (_root(parents, run) for run in divmod(edge, len(parents)))
        parents[max(upper, lower)] = min(upper, lower)
    roots = np.array([_root(parents, run) for run in range(len(parents))])
    labels: Ints = np.full(colours.shape, -1, dtype=np.int64)
    inside = colours >= 0
    labels[inside] = np.unique(roots[runs[inside]], return_inverse=True)[1]
    return labels


def _root(parents: list[int], run: int) -> int:
    while parents[run] != run:
        parents[run] = parents[parents[run]]
        run = parents[run]
    return run


def _classify(pixels: Floats, ground: Floats) -> tuple[Ints, Floats]:
    """Return the colour of each pixel (-1: background) and the coverage (0 to 1) of every colour at every pixel.

    An edge pixel is a mixture of the background and one object colour, so it is compared with the line between the two
    instead of the colour itself. Edges then belong to their object instead of looking like a third colour.
    """
    offset = (pixels - ground).reshape(-1, 3)
    lines = _PALETTE - ground
    squares = np.sum(lines**2, axis=1)
    cover = np.clip(offset @ (lines / squares[:, None]).T, 0, 1)
    # |offset - cover * line|^2, expanded to avoid an array of three channels for all colours
    length = np.sum(offset**2, axis=1)
    miss = length[:, None] - 2 * cover * (offset @ lines.T) + cover**2 * squares
    best = miss.argmin(axis=1)
    rows = np.arange(len(best))
    colours = np.where(cover[rows, best] > 0.5, best, -1)
    strength = np.minimum(np.sqrt(length) / 100.0, 1.0)  # coverage of the unknown colour
    all_covers = np.concatenate([cover, strength[:, None]], axis=1).astype(np.float32)
    height, width = pixels.shape[:2]
    # JPEG and autoencoders blur chroma more than luma, so edges are often off-palette: only areas count as a colour.
    off_palette = (miss[rows, best] > _COLOUR_TOLERANCE**2).reshape(height, width)
    off_palette = dilate(dilate(~dilate(dilate(~off_palette)))) & off_palette
    return np.where(off_palette, len(COLOURS), colours.reshape(height, width)), sharpen(
        all_covers.reshape(height, width, -1)
    )


def _region(labels: Ints, label: int, colours: Ints, cover: Floats) -> Region:
    """Return the region of a label with its soft edge: two pixels around it, without those of other regions."""
    inside = labels == label
    rows = np.flatnonzero(inside.any(axis=1))
    columns = np.flatnonzero(inside.any(axis=0))
    top = max(int(rows[0]) - 2, 0)
    left = max(int(columns[0]) - 2, 0)
    box = (slice(top, int(rows[-1]) + 3), slice(left, int(columns[-1]) + 3))
    colour = int(colours[inside][0])
    near = dilate(dilate(inside[box])) & ((labels[box] == label) | (labels[box] < 0))
    return Region(COLOUR_NAMES[colour], left, top, np.where(near, cover[box][..., colour], 0).astype(np.float32))


def sharpen(cover: Floats) -> Floats:
    """Steepen the edge of a soft coverage, so that a blurred object covers the same area as the sharp one."""
    steep: Floats = np.clip(2 * cover - 0.5, 0, 1).astype(np.float32)
    return steep


def dilate(mask: Bools) -> Bools:
    """Grow a mask by one pixel in each of the four directions."""
    grown = mask.copy()
    grown[1:] |= mask[:-1]
    grown[:-1] |= mask[1:]
    grown[:, 1:] |= mask[:, :-1]
    grown[:, :-1] |= mask[:, 1:]
    return grown
