"""Edges of an image, white on black: Canny's method (1986) with numpy.

The image is smoothed; of each crest of its gradient one pixel stays; a crest is kept where it is strong, and where it
continues from there above half of that.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]

_SIGMA = 1.4  # pixels, of the smoothing
_REACH = 4
_WEAK = 0.5  # of the threshold, for the continuation of an edge
_BELL = np.exp(-0.5 * (np.arange(-_REACH, _REACH + 1) / _SIGMA) ** 2)
_KERNEL = (_BELL / _BELL.sum()).astype(np.float32)
_STEP = 2 / float(_KERNEL[_REACH] + _KERNEL[_REACH + 1])  # by it, the gradient at a smoothed step is the step's height
_DIRECTIONS = ((0, 1), (1, 1), (1, 0), (1, -1))  # of gradients: rows and columns to the next pixel


def draw_edges(image: Image.Image, threshold: float) -> Image.Image:
    """Return the edges whose contrast is at least ``threshold``, where 1 is black beside white."""
    smooth = _smoothed(np.asarray(image.convert("L"), dtype=np.float32) / 255)
    down, right = _gradient(smooth)
    strength = np.hypot(down, right) * _STEP
    crest = _crests(strength, down, right)
    edges = _continued(crest & (strength >= threshold), crest & (strength >= _WEAK * threshold))
    return Image.fromarray(edges.astype(np.uint8) * 255)


def _smoothed(plane: Plane) -> Plane:
    """Return a plane convolved with a Gaussian, its borders continued."""
    for _ in range(2):  # down, then along the rows
        height = len(plane)
        padded = np.pad(plane, ((_REACH, _REACH), (0, 0)), mode="edge")
        smooth = np.zeros_like(plane)
        for start, weight in enumerate(_KERNEL):
            smooth += weight * padded[start : start + height]
        plane = smooth.T
    return plane


def _gradient(plane: Plane) -> tuple[Plane, Plane]:
    """Return the change per pixel downwards and to the right (Sobel)."""
    padded = np.pad(plane, 1, mode="edge")
    rows = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    columns = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    return (columns[2:] - columns[:-2]) / 8, (rows[:, 2:] - rows[:, :-2]) / 8


def _crests(strength: Plane, down: Plane, right: Plane) -> Bools:
    """Return the pixels that are stronger than the one before and the one behind them along their gradient."""
    sector = np.round(np.arctan2(down, right) / (np.pi / 4)).astype(int) % 4
    padded = np.pad(strength, 1)
    height, width = strength.shape
    crest = np.zeros(strength.shape, dtype=bool)
    for number, (row, column) in enumerate(_DIRECTIONS):
        behind = padded[1 + row : 1 + row + height, 1 + column : 1 + column + width]
        before = padded[1 - row : 1 - row + height, 1 - column : 1 - column + width]
        crest |= (sector == number) & (strength > before) & (strength >= behind)
    return crest


def _continued(strong: Bools, weak: Bools) -> Bools:
    """Return the strong pixels, and the weak ones that a path of weak pixels joins to them."""
    height, width = strong.shape
    stride = width + 2
    left = np.pad(weak & ~strong, 1).ravel()  # a border, so that neighbours never wrap around
    edges = np.pad(strong, 1).ravel()
    around = np.array([row * stride + column for row in (-1, 0, 1) for column in (-1, 0, 1) if row or column])
    frontier = np.flatnonzero(edges)
    while len(frontier):
        neighbours = np.unique(frontier[:, None] + around)
        frontier = neighbours[left[neighbours]]
        left[frontier] = False
        edges[frontier] = True
    return edges.reshape(height + 2, stride)[1:-1, 1:-1]
