"""Training targets of the demo's CLIP encoders: captions with their meaning, and fixed codes for that meaning."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from demo_encoders import Encoder
from demo_tokenizers import MEANINGS
from torch import Tensor

from sd3_light.randomness import stream
from sd3_light.world import draw_scene, scene_captions
from sd3_light.world.scene import BACKGROUNDS, COLOURS, OBJECT_SIZES, SCENE_KINDS, SHAPES, Scene, canonical_scene

SEED = 11
NONE = "none"
# The fields of a scene. Objects are ordered as in `canonical_scene`: the left or upper one comes first.
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
# The fields of the object that a word belongs to.
OBJECT_FIELDS: dict[str, tuple[str, ...]] = {"colour": tuple(COLOURS), "shape": SHAPES}


@dataclass(frozen=True)
class CaptionBatch:
    """Captions with their meaning; the rows of a scene are adjacent, one per language."""

    texts: list[str]
    scenes: Tensor  # [captions, scene fields]
    objects: Tensor  # [captions, 2, object fields], in caption order
    swapped: Tensor  # [captions]: whether the first object of the scene is the second of the caption


def scene_labels(scene: Scene) -> list[int]:
    """Return the class of a scene in each of `SCENE_FIELDS`."""
    scene = canonical_scene(scene)
    first, second = scene.items[0], scene.items[-1] if scene.kind == "pair" else None
    values = (
        scene.background, scene.kind, str(scene.count), first.size or NONE, scene.relation or NONE,
        first.colour, first.shape, second.colour if second else NONE, second.shape if second else NONE,
    )  # fmt: skip
    return [options.index(value) for options, value in zip(SCENE_FIELDS.values(), values, strict=True)]


def object_labels(scene: Scene) -> list[list[int]]:
    """Return the classes of each named object in `OBJECT_FIELDS`; a single object appears twice."""
    return [[list(COLOURS).index(item.colour), SHAPES.index(item.shape)] for item in (scene.items[0], scene.items[-1])]


def draw_batch(purpose: str, index: int, count: int, held_out: bool, plain: bool = False) -> CaptionBatch:
    """Draw `count` scenes in every language. Unless `plain`, some captions have a capital letter or a full stop."""
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
    return CaptionBatch(texts, torch.tensor(scenes), torch.tensor(objects), torch.tensor(swapped))


class TargetCode:
    """Fixed targets for the classes of all fields: one orthogonal direction per class, with mean 0 over captions.

    Outputs are trained towards the sum of the directions of their classes by squared error. Cross-entropy would also
    reward learning that a shape never has a certain colour, which fails on the held-out pairs.
    """

    def __init__(self, directions: Tensor, labels: Tensor, fields: dict[str, tuple[str, ...]], share: float) -> None:
        self.sizes = [len(options) for options in fields.values()]
        self.directions = directions[: sum(self.sizes)]
        assert len(self.directions) == sum(self.sizes) <= directions.shape[1], "too narrow for orthogonal directions"
        hot = self.one_hot(labels)
        self.mean = hot.mean(0)
        # a `share` of the power of a unit-scale output belongs to this code
        self.scale = (share * directions.shape[1] / hot.var(0).sum()).sqrt()

    def one_hot(self, labels: Tensor) -> Tensor:
        """Map [rows, fields] to [rows, classes of all fields]."""
        columns = [F.one_hot(labels[:, i], size) for i, size in enumerate(self.sizes)]
        return torch.cat(columns, dim=1).float()

    def loss(self, x: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        """Return the squared error relative to the power of the targets; unknown fields have the target 0."""
        weight = known.float().repeat_interleave(torch.tensor(self.sizes), dim=1)
        target = (self.one_hot(labels) - self.mean) * weight
        return (x @ self.directions.T / self.scale - target).square().sum() / target.square().sum()

    def read(self, x: Tensor) -> Tensor:
        """Return the classes [rows, fields] with the nearest directions."""
        columns = (x @ self.directions.T / self.scale + self.mean).split(self.sizes, dim=1)
        return torch.stack([column.argmax(1) for column in columns], dim=1)


class TextTargets:
    """The training losses of a CLIP encoder."""

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
        """Choose directions for the pooled output, for the end marks of a caption, and for its words and objects."""
        batch = draw_batch("text-codes", 0, 1000, held_out=False)
        ids = self.encoder.ids(batch.texts)
        bases = [torch.linalg.qr(torch.randn(width, width))[0] for _ in range(3)]
        self.pooled_code = TargetCode(bases[0], batch.scenes, SCENE_FIELDS, 0.9)
        self.mark_code = TargetCode(bases[1], batch.scenes, SCENE_FIELDS, 0.6)
        words = self.meaning[ids[self.meaning[ids] >= 0]]
        self.word_code = TargetCode(bases[2], words[:, None], {"word": tuple(MEANINGS)}, 0.25)
        self.object_code = TargetCode(bases[2][len(MEANINGS) :], batch.objects.flatten(0, 1), OBJECT_FIELDS, 0.35)

    def loss(self, batch: CaptionBatch, generator: torch.Generator) -> Tensor:
        """Return the sum of all losses for a batch."""
        ids = self.encoder.ids(batch.texts)
        object_index = (self.is_shape[ids].cumsum(1) - self.is_shape[ids].long()).clamp(
            max=1
        )  # the object of each token
        words = self.meaning[ids]
        ids, dropped, known_scene, known_object = self.drop_words(ids, object_index, batch, generator)
        tokens, pooled = self.encoder(ids)
        known_words = (words >= 0) & ~dropped
        loss = self.word_code.loss(
            tokens[known_words], words[known_words][:, None], torch.ones(int(known_words.sum()), 1)
        )
        # the attention is causal: the word of a shape sees the colour before it
        rows, positions = self.is_shape[ids].nonzero(as_tuple=True)
        objects = object_index[rows, positions]
        known = known_object[rows, objects]
        loss = loss + self.object_code.loss(tokens[rows, positions], batch.objects[rows, objects], known)
        # the end marks see the whole caption
        rows, positions = (ids == self.encoder.tokenizer.eos_token_id).long().cumsum(1).nonzero(as_tuple=True)
        loss = loss + self.mark_code.loss(tokens[rows, positions], batch.scenes[rows], known_scene[rows])
        return loss + self.pooled_code.loss(pooled, batch.scenes, known_scene) + 0.05 * scale_error(tokens)

    @torch.no_grad()
    def score(self, batch: CaptionBatch) -> float:
        """Return the share of captions whose whole scene is decoded correctly from the pooled output."""
        _, pooled = self.encoder(self.encoder.ids(batch.texts))
        return (self.pooled_code.read(pooled) == batch.scenes).all(1).float().mean().item()

    def drop_words(
        self, ids: Tensor, object_index: Tensor, batch: CaptionBatch, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Replace some words for colour or shape in half of the captions, so that neither is guessed from the other.

        Returns the new ids, which of them were replaced, and which fields of scene and objects stay known.
        """
        chance = 0.3 * (torch.rand(len(ids), 1, generator=generator) < 0.5)
        of_object = self.is_shape[ids] | self.is_colour[ids]
        dropped = of_object & (torch.rand(ids.shape, generator=generator) < chance)
        replacements = self.other_ids[torch.randint(len(self.other_ids), ids.shape, generator=generator)]
        known_object = torch.ones(batch.objects.shape, dtype=torch.bool)
        known_scene = torch.ones(batch.scenes.shape, dtype=torch.bool)
        for row, position in dropped.nonzero().tolist():
            field, index = int(self.is_shape[ids[row, position]]), int(object_index[row, position])
            known_object[row, index, field] = False
            known_scene[row, 5 + 2 * (index ^ int(batch.swapped[row])) + field] = False
        return torch.where(dropped, replacements, ids), dropped, known_scene, known_object


def scale_error(tokens: Tensor) -> Tensor:
    """Return how far the channels are from unit scale."""
    return tokens.flatten(0, 1).square().mean(0).log().square().mean()
