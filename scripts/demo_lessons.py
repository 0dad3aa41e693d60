"""What the demo's CLIP encoders learn: captions of the demo world with their meaning, and codes for that meaning."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from demo_encoders import Encoder
from demo_tokenizers import MEANINGS
from torch import Tensor

from sd3_light.randomness import stream
from sd3_light.world import (
    BACKGROUNDS,
    COLOURS,
    OBJECT_SIZES,
    SCENE_KINDS,
    SHAPES,
    Scene,
    canonical_scene,
    draw_scene,
    scene_captions,
)

SEED = 11
NONE = "none"
# What a scene is made of; first and second are those of `canonical_scene`: the left one or the upper one comes first.
SCENE_FIELDS: dict[str, tuple[str, ...]] = {
    "background": tuple(BACKGROUNDS),
    "kind": SCENE_KINDS,
    "count": ("1", "2", "3", "4"),
    "size": (*OBJECT_SIZES, NONE),
    "relation": ("left of", "above", NONE),
    "colour 1": tuple(COLOURS),
    "shape 1": SHAPES,
    "colour 2": (*COLOURS, NONE),
    "shape 2": (*SHAPES, NONE),
}
# What the object is that a word belongs to.
OBJECT_FIELDS: dict[str, tuple[str, ...]] = {"colour": tuple(COLOURS), "shape": SHAPES}


@dataclass(frozen=True)
class Batch:
    """Captions with what they mean; rows of one scene are adjacent, one a language."""

    texts: list[str]
    scenes: Tensor  # [captions, scene fields]
    objects: Tensor  # [captions, 2, object fields], in the caption's order
    swapped: Tensor  # [captions]: whether the scene's first object is the caption's second


def scene_labels(scene: Scene) -> list[int]:
    """The scene's class in each of `SCENE_FIELDS`."""
    scene = canonical_scene(scene)
    first, second = scene.items[0], scene.items[-1] if scene.kind == "pair" else None
    values = (
        scene.background, scene.kind, str(scene.count), first.size or NONE, scene.relation or NONE,
        first.colour, first.shape, second.colour if second else NONE, second.shape if second else NONE,
    )  # fmt: skip
    return [options.index(value) for options, value in zip(SCENE_FIELDS.values(), values, strict=True)]


def object_labels(scene: Scene) -> list[list[int]]:
    """The classes of each named object in `OBJECT_FIELDS`; a single object is given twice."""
    return [[list(COLOURS).index(item.colour), SHAPES.index(item.shape)] for item in (scene.items[0], scene.items[-1])]


def draw_batch(purpose: str, index: int, count: int, held_out: bool, plain: bool = False) -> Batch:
    """`count` scenes in every language; unless `plain`, some captions begin with a capital or end with a full stop."""
    rng = stream(SEED, purpose, 0, 0, index)
    texts, scenes, objects, swapped = [], [], [], []
    for _ in range(count):
        scene = draw_scene(rng, held_out)
        for language, text in scene_captions(scene).items():
            if not plain and rng.random() < 0.15:
                text = text[0].upper() + text[1:]
            if not plain and rng.random() < 0.15:
                text += "。" if language == "zh" else "."
            texts.append(text)
            scenes.append(scene_labels(scene))
            objects.append(object_labels(scene))
            swapped.append(canonical_scene(scene) != scene)
    return Batch(texts, torch.tensor(scenes), torch.tensor(objects), torch.tensor(swapped))


class Code:
    """A fixed place for each field's classes: one direction a class, all at right angles, mean 0 over captions.

    Outputs are drawn to the sum of their classes' directions by squared error. Cross-entropy would go on to reward
    every hint, and that a shape never comes in some colour is one: what that teaches fails on the held-out pairs.
    """

    def __init__(self, directions: Tensor, labels: Tensor, fields: dict[str, tuple[str, ...]], share: float) -> None:
        self.sizes = [len(options) for options in fields.values()]
        self.directions = directions[: sum(self.sizes)]
        assert len(self.directions) == sum(self.sizes) <= directions.shape[1], "too narrow for right angles"
        hot = self.one_hot(labels)
        self.mean = hot.mean(0)
        # such that a `share` of the power of a unit-scale output goes to this code
        self.scale = (share * directions.shape[1] / hot.var(0).sum()).sqrt()

    def one_hot(self, labels: Tensor) -> Tensor:
        """[rows, fields] -> [rows, classes of all fields]."""
        columns = [F.one_hot(labels[:, i], size) for i, size in enumerate(self.sizes)]
        return torch.cat(columns, dim=1).float()

    def loss(self, x: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        """The squared error over the targets' power; a field that is not `known` should say nothing."""
        weight = known.float().repeat_interleave(torch.tensor(self.sizes), dim=1)
        target = (self.one_hot(labels) - self.mean) * weight
        return (x @ self.directions.T / self.scale - target).square().sum() / target.square().sum()

    def read(self, x: Tensor) -> Tensor:
        """The classes [rows, fields] whose directions lie nearest."""
        columns = (x @ self.directions.T / self.scale + self.mean).split(self.sizes, dim=1)
        return torch.stack([column.argmax(1) for column in columns], dim=1)


class Lessons:
    """What a CLIP encoder is trained for."""

    def __init__(self, encoder: Encoder, width: int) -> None:
        self.encoder = encoder
        words = {word: index for index, words in enumerate(MEANINGS.values()) for word in words}
        names = [encoder.tokenizer.decode([index]).strip().lower() for index in range(len(encoder.tokenizer))]
        self.meaning = torch.tensor([words.get(name, -1) for name in names])
        self.is_shape, self.is_colour = (
            torch.isin(self.meaning, torch.tensor([list(MEANINGS).index(name) for name in names]))
            for names in (SHAPES, COLOURS)
        )
        self.other_ids = (self.meaning < 0).nonzero().flatten()
        self.make_codes(width)

    def make_codes(self, width: int) -> None:
        """Directions for the pooled output, for the marks after a caption, and for its words and objects."""
        batch = draw_batch("text-codes", 0, 1000, held_out=False)
        ids = self.encoder.ids(batch.texts)
        bases = [torch.linalg.qr(torch.randn(width, width))[0] for _ in range(3)]
        self.pooled_code = Code(bases[0], batch.scenes, SCENE_FIELDS, 0.9)
        self.mark_code = Code(bases[1], batch.scenes, SCENE_FIELDS, 0.6)
        words = self.meaning[ids[self.meaning[ids] >= 0]]
        self.word_code = Code(bases[2], words[:, None], {"word": tuple(MEANINGS)}, 0.25)
        self.object_code = Code(bases[2][len(MEANINGS) :], batch.objects.flatten(0, 1), OBJECT_FIELDS, 0.35)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The sum of the lessons' losses for a batch."""
        ids = self.encoder.ids(batch.texts)
        which = (self.is_shape[ids].cumsum(1) - self.is_shape[ids].long()).clamp(max=1)  # the object of each token
        words = self.meaning[ids]
        ids, lost, known_scene, known_object = self.lose_words(ids, which, batch, generator)
        tokens, pooled = self.encoder(ids)
        kept = (words >= 0) & ~lost
        loss = self.word_code.loss(tokens[kept], words[kept][:, None], torch.ones(int(kept.sum()), 1))
        # a shape's word has heard the colour before it
        rows, places = self.is_shape[ids].nonzero(as_tuple=True)
        objects = which[rows, places]
        known = known_object[rows, objects]
        loss = loss + self.object_code.loss(tokens[rows, places], batch.objects[rows, objects], known)
        # the marks after the caption have heard all of it
        rows, places = (ids == self.encoder.tokenizer.eos_token_id).long().cumsum(1).nonzero(as_tuple=True)
        loss = loss + self.mark_code.loss(tokens[rows, places], batch.scenes[rows], known_scene[rows])
        return loss + self.pooled_code.loss(pooled, batch.scenes, known_scene) + 0.05 * unscaled(tokens)

    @torch.no_grad()
    def score(self, batch: Batch) -> float:
        """The share of captions whose whole scene is read rightly from the pooled output, by its code."""
        _, pooled = self.encoder(self.encoder.ids(batch.texts))
        return (self.pooled_code.read(pooled) == batch.scenes).all(1).float().mean().item()

    def lose_words(
        self, ids: Tensor, which: Tensor, batch: Batch, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Half of the captions lose some words for colour or shape, so that neither is guessed from the other.

        Returns the ids with strange ones instead, where they are, and which fields of scene and objects stay known.
        """
        chance = 0.3 * (torch.rand(len(ids), 1, generator=generator) < 0.5)
        of_object = self.is_shape[ids] | self.is_colour[ids]
        lost = of_object & (torch.rand(ids.shape, generator=generator) < chance)
        strange = self.other_ids[torch.randint(len(self.other_ids), ids.shape, generator=generator)]
        known_object = torch.ones(batch.objects.shape, dtype=torch.bool)
        known_scene = torch.ones(batch.scenes.shape, dtype=torch.bool)
        for row, place in lost.nonzero().tolist():
            field, index = int(self.is_shape[ids[row, place]]), int(which[row, place])
            known_object[row, index, field] = False
            known_scene[row, 5 + 2 * (index ^ int(batch.swapped[row])) + field] = False
        return torch.where(lost, strange, ids), lost, known_scene, known_object


def unscaled(tokens: Tensor) -> Tensor:
    """How far the channels are from unit scale."""
    return tokens.flatten(0, 1).square().mean(0).log().square().mean()
