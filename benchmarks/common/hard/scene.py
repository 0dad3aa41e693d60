"""The content of a harder scene: groups of equal objects with a texture and, if the caption names it, a size."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sd3_light.world.scene import (
    ALL_PAIRS,
    BACKGROUNDS,
    COLOURS,
    HELD_OUT_LIST,
    OBJECT_SIZES,
    RELATIONS,
    SEEN_PAIRS,
    SHAPES,
    pick,
)

TEXTURES: tuple[str, ...] = ("plain", "striped", "dotted")
DEPTH_RELATIONS: tuple[str, ...] = ("in front of", "behind")
HARD_RELATIONS: tuple[str, ...] = (*RELATIONS, *DEPTH_RELATIONS)
HARD_KINDS: tuple[str, ...] = ("single", "count", "pair", "groups")
MAX_OBJECTS = 6
MAX_GROUPS = 3
MAX_LARGE = 3
"""Images with more objects have no room for large ones."""

_KIND_SHARES = (0.15, 0.2, 0.35, 0.3)
_TEXTURE_SHARES = (0.5, 0.25, 0.25)
_SIZED_SHARE = 0.5
_OPPOSITE = {"right of": "left of", "below": "above", "behind": "in front of"}


@dataclass(frozen=True)
class Group:
    """`count` equal objects; without a `size` they may have any."""

    shape: str
    colour: str
    texture: str = "plain"
    size: str | None = None
    count: int = 1

    def __post_init__(self) -> None:
        assert self.shape in SHAPES and self.colour in COLOURS and self.texture in TEXTURES, self
        assert self.size in (None, *OBJECT_SIZES) and 1 <= self.count <= MAX_OBJECTS, self

    @property
    def pair(self) -> tuple[str, str]:
        """Colour and shape, which no other group of a scene shares."""
        return self.colour, self.shape


@dataclass(frozen=True)
class HardScene:
    """What an image shows: up to three groups; with a relation, two objects, the first in relation to the second.

    Overlapping objects have different colours, and the front one is not a ring: nothing is visible through objects.
    """

    groups: tuple[Group, ...]
    background: str
    relation: str | None = None

    def __post_init__(self) -> None:
        assert self.background in BACKGROUNDS and 1 <= len(self.groups) <= MAX_GROUPS, self
        assert len({group.pair for group in self.groups}) == len(self.groups), self
        assert self.num_objects <= MAX_OBJECTS, self
        assert self.num_objects <= MAX_LARGE or all(group.size != "large" for group in self.groups), self
        if self.relation is not None:
            assert self.relation in HARD_RELATIONS and [group.count for group in self.groups] == [1, 1], self
        if self.relation in DEPTH_RELATIONS:
            assert can_overlap(*self.front_and_back), self

    @property
    def kind(self) -> str:
        """The entry of `HARD_KINDS`."""
        if len(self.groups) == 1:
            return "single" if self.groups[0].count == 1 else "count"
        return "groups" if self.relation is None else "pair"

    @property
    def objects(self) -> tuple[Group, ...]:
        """The group of every object."""
        return tuple(group for group in self.groups for _ in range(group.count))

    @property
    def num_objects(self) -> int:
        """The number of objects."""
        return sum(group.count for group in self.groups)

    @property
    def front_and_back(self) -> tuple[Group, Group]:
        """The groups of an overlapping pair, the front one first."""
        assert self.relation in DEPTH_RELATIONS, self.relation
        first, second = self.groups
        return (first, second) if self.relation == "in front of" else (second, first)


def can_overlap(front: Group, back: Group) -> bool:
    """Return whether the first object may cover a part of the second."""
    return front.shape != "ring" and front.colour != back.colour


def canonical_hard_scene(scene: HardScene) -> HardScene:
    """Return the representative of all scenes that describe the same images."""
    if scene.relation in _OPPOSITE:
        return HardScene(scene.groups[::-1], scene.background, _OPPOSITE[scene.relation])
    if scene.relation is not None:
        return scene
    return HardScene(tuple(sorted(scene.groups, key=lambda group: group.pair)), scene.background)


def draw_hard_scene(rng: np.random.Generator, held_out: bool, kind: str | None = None) -> HardScene:
    """Draw a random scene of the given kind, or of a random kind; `held_out` selects held-out or training scenes."""
    kind = kind or _pick_by_share(rng, HARD_KINDS, _KIND_SHARES)
    assert kind in HARD_KINDS, kind
    background = pick(rng, tuple(BACKGROUNDS))
    counts = _draw_counts(rng, kind)
    has_room = sum(counts) <= MAX_LARGE
    pairs = _draw_pairs(rng, len(counts), held_out)
    groups = tuple(_draw_group(rng, pair, count, has_room) for pair, count in zip(pairs, counts, strict=True))
    relation = _draw_relation(rng, groups) if kind == "pair" else None
    return HardScene(groups, background, relation)


def _draw_counts(rng: np.random.Generator, kind: str) -> tuple[int, ...]:
    if kind == "single":
        return (1,)
    if kind == "count":
        return (int(rng.integers(2, MAX_OBJECTS + 1)),)
    if kind == "pair":
        return (1, 1)
    num_groups = int(rng.integers(2, MAX_GROUPS + 1))
    total = int(rng.integers(3, MAX_OBJECTS + 1))
    extra = Counter(rng.integers(0, num_groups, total - num_groups).tolist())
    return tuple(1 + extra[index] for index in range(num_groups))


def _draw_pairs(rng: np.random.Generator, count: int, held_out: bool) -> list[tuple[str, str]]:
    """Draw different pairs of colour and shape; with `held_out` one of them, at a random place, is held out."""
    pairs = [pick(rng, HELD_OUT_LIST if held_out else SEEN_PAIRS)]
    while len(pairs) < count:
        pair = pick(rng, ALL_PAIRS if held_out else SEEN_PAIRS)
        if pair not in pairs:
            pairs.append(pair)
    return [pairs[index] for index in rng.permutation(count)]


def _draw_group(rng: np.random.Generator, pair: tuple[str, str], count: int, may_be_large: bool) -> Group:
    texture = _pick_by_share(rng, TEXTURES, _TEXTURE_SHARES)
    size = pick(rng, OBJECT_SIZES if may_be_large else ("small",)) if rng.random() < _SIZED_SHARE else None
    return Group(pair[1], pair[0], texture, size, count)


def _draw_relation(rng: np.random.Generator, groups: tuple[Group, ...]) -> str:
    first, second = groups
    possible = [*RELATIONS]
    possible += ["in front of"] if can_overlap(first, second) else []
    possible += ["behind"] if can_overlap(second, first) else []
    return pick(rng, tuple(possible))


def _pick_by_share(rng: np.random.Generator, options: tuple[str, ...], shares: tuple[float, ...]) -> str:
    return options[int(np.searchsorted(np.cumsum(shares)[:-1], rng.random(), side="right"))]
