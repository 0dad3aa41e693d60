"""The content of a demo image: a few flat coloured shapes, described by a small vocabulary."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Rgb = tuple[int, int, int]

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross", "ring", "diamond")

COLOURS: dict[str, Rgb] = {
    "red": (215, 20, 40),
    "green": (25, 160, 50),
    "blue": (30, 60, 225),
    "yellow": (255, 230, 30),
    "purple": (155, 30, 190),
    "orange": (255, 135, 0),
    "cyan": (20, 205, 225),
}

# Far from every object colour and from each other: the closest pair is white and pink, 79 apart.
BACKGROUNDS: dict[str, Rgb] = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "grey": (128, 128, 128),
    "pink": (250, 190, 210),
}

OBJECT_SIZES: tuple[str, ...] = ("small", "large")
COUNTS: tuple[int, ...] = (1, 2, 3, 4)
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
SCENE_KINDS: tuple[str, ...] = ("single", "count", "pair")

_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_KIND_SHARES = (0.3, 0.3, 0.4)

# One shape per colour and one colour per shape, so that training sees each word in six other pairs.
HELD_OUT_PAIRS: frozenset[tuple[str, str]] = frozenset(
    (colour, SHAPES[(3 * index + 2) % len(SHAPES)]) for index, colour in enumerate(COLOURS)
)
ALL_PAIRS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
HELD_OUT_LIST = tuple(pair for pair in ALL_PAIRS if pair in HELD_OUT_PAIRS)
SEEN_PAIRS = tuple(pair for pair in ALL_PAIRS if pair not in HELD_OUT_PAIRS)


@dataclass(frozen=True)
class Item:
    """One object of a scene; only the object of a `single` scene has a size."""

    shape: str
    colour: str
    size: str | None = None


@dataclass(frozen=True)
class Scene:
    """What an image shows.

    `single` has one item with a size; `count` has one item repeated `count` (2 to 4) times; `pair` has two different
    items, the first in `relation` to the second.
    """

    kind: str
    items: tuple[Item, ...]
    relation: str | None
    count: int
    background: str

    def __post_init__(self) -> None:
        assert self.background in BACKGROUNDS, self.background
        assert all(item.shape in SHAPES and item.colour in COLOURS for item in self.items), self.items
        sized = [item.size in OBJECT_SIZES if self.kind == "single" else item.size is None for item in self.items]
        assert all(sized), self.items
        assert (self.relation in RELATIONS) if self.kind == "pair" else self.relation is None, self.relation
        if self.kind == "pair":
            assert len(self.items) == self.count == 2 and self.items[0] != self.items[1], self.items
        elif self.kind == "count":
            assert len(self.items) == 1 and 2 <= self.count <= max(COUNTS), (self.items, self.count)
        else:
            assert self.kind == "single" and len(self.items) == self.count == 1, self

    @property
    def objects(self) -> tuple[Item, ...]:
        """All objects of the image, with repetitions."""
        return self.items * self.count if self.kind == "count" else self.items


def is_held_out(scene: Scene) -> bool:
    """Return whether training never shows this scene, because an item has a held-out pair of colour and shape."""
    return any((item.colour, item.shape) in HELD_OUT_PAIRS for item in scene.items)


def canonical_scene(scene: Scene) -> Scene:
    """Return the representative of all equivalent scenes: "a right of b" becomes "b left of a"."""
    if scene.relation not in ("right of", "below"):
        return scene
    return Scene(scene.kind, scene.items[::-1], _OPPOSITE[scene.relation], scene.count, scene.background)


def draw_scene(rng: np.random.Generator, held_out: bool, kind: str | None = None) -> Scene:
    """Draw a random scene of the given kind, or of a random kind; `held_out` selects held-out or training scenes."""
    if kind is None:
        kind = SCENE_KINDS[int(np.searchsorted(np.cumsum(_KIND_SHARES), rng.random()))]
    assert kind in SCENE_KINDS, kind
    background = pick(rng, tuple(BACKGROUNDS))
    first = pick(rng, HELD_OUT_LIST if held_out else SEEN_PAIRS)
    if kind == "single":
        return Scene(kind, (_item(first, pick(rng, OBJECT_SIZES)),), None, 1, background)
    if kind == "count":
        return Scene(kind, (_item(first),), None, int(rng.integers(2, max(COUNTS) + 1)), background)
    others = ALL_PAIRS if held_out else SEEN_PAIRS
    second = pick(rng, tuple(pair for pair in others if pair != first))
    items = (_item(first), _item(second))
    if rng.random() < 0.5:  # otherwise the held-out item would always be named first
        items = (items[1], items[0])
    return Scene(kind, items, pick(rng, RELATIONS), 2, background)


def pick(rng: np.random.Generator, options: tuple[T, ...]) -> T:
    """Return a random option."""
    return options[int(rng.integers(len(options)))]


def _item(pair: tuple[str, str], size: str | None = None) -> Item:
    return Item(shape=pair[1], colour=pair[0], size=size)
