"""Contrastive training of the text encoders against a small image tower, on the same captioned images.

Each encoder learns to find the image of a caption among the other images of the batch (Radford et al. 2021). The image
tower and the second CLIP encoder are kept as the judge: the same pair in one folder (`evaluate/feature_model.py`). A
judge that shares nothing with the text encoders comes from a second training with another seed on other captions.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CLIPTextModelWithProjection,
    ConvNextConfig,
    ConvNextModel,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)

from sd3_light.evaluate.distances import finds_own_caption
from sd3_light.parts.images import Pool, take
from sd3_light.parts.sizes import TextSize
from sd3_light.parts.text_encoders import build_encoders, encode
from sd3_light.parts.tokenizers import T5_FOLDER
from sd3_light.parts.vae import compiled, half_precision
from sd3_light.randomness import sample_id, stream

MAX_SIDE = 128
"""Pixels of the square images that the image tower sees."""
_GPU_BATCH = 512
_CPU_BATCH = 64
_SIDE_MULTIPLE = 32  # of the image tower
_GROUP = 100  # captions among which an image finds its own
_IDS = 2**63  # values of a sample id
_MAX_SCALE = math.log(100.0)
# augmentation: scale by up to 15%, shift by up to 10% of half a side
_ZOOM = 0.15
_SHIFT = 0.1


@dataclass(frozen=True)
class TextOptions:
    """Batch (None: 512, on a CPU 64), seed and whether to compile the image tower."""

    batch: int | None = None
    seed: int = 0
    compile: bool = True


@dataclass(frozen=True)
class CaptionedImages:
    """Square images uint8 [N, S, S, 3]; image i has the captions ``first[i]`` to ``first[i + 1]``, of which ``texts``
    are the words and ``ids`` the tokens per encoder, padded; ``lengths`` count T5's. The first ``held_out`` images
    measure the training."""

    pixels: Tensor
    texts: tuple[str, ...]
    first: np.ndarray
    ids: tuple[Tensor, Tensor, Tensor]
    lengths: Tensor
    held_out: int


def captioned_images(
    pools: Sequence[Pool],
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    device: torch.device,
    is_used: Callable[[str], bool] = lambda caption: True,
) -> CaptionedImages:
    """Join the pools: each sample once, scaled to one square size, with tokenized captions.

    ``is_used`` decides by the first caption of an image whether it is trained on; held-out images are all kept.
    """
    smallest = min(min(pool.size) for pool in pools)
    side = min(MAX_SIDE, max(_SIDE_MULTIPLE, smallest // _SIDE_MULTIPLE * _SIDE_MULTIPLE))
    images: list[tuple[bool, Tensor, tuple[str, ...]]] = []  # held out or not, pixels and captions
    seen: set[int] = set()
    for pool in pools:
        rows = [row for row, number in enumerate(pool.ids) if number not in seen]
        seen.update(pool.ids)
        for row, pixels in zip(rows, _squares(pool.pixels, rows, side), strict=True):
            captions = pool.captions[row] or ("",)
            if row < pool.held_out or is_used(captions[0]):
                images.append((row < pool.held_out, pixels, captions))
    images.sort(key=lambda image: not image[0])  # held-out ones first
    captions_of_images = [captions for _, _, captions in images]
    texts = tuple(text for captions in captions_of_images for text in captions)
    ids = [_padded(tokenizer, texts) for tokenizer in tokenizers.values()]
    pad = tokenizers[T5_FOLDER].pad_token_id
    return CaptionedImages(
        torch.stack([pixels for _, pixels, _ in images]).to(device),
        texts,
        np.cumsum([0, *map(len, captions_of_images)]),
        (ids[0].to(device), ids[1].to(device), ids[2].to(device)),
        (ids[2] != pad).sum(1).to(device),
        sum(is_held_out for is_held_out, _, _ in images),
    )


def is_of_judge(caption: str, share: float) -> bool:
    """Return whether a caption belongs to the share that the judge learns from, by its hash."""
    return sample_id(caption) / _IDS < share


def _squares(pixels: Tensor, rows: Sequence[int], side: int) -> Tensor:
    """Scale rows of images [N, H, W, 3] to squares, on the CPU."""
    squares = [pixels.new_empty((0, side, side, 3), device="cpu")]
    for start in range(0, len(rows), 256):
        batch = pixels[torch.tensor(rows[start : start + 256], device=pixels.device)].permute(0, 3, 1, 2).float()
        small = F.interpolate(batch, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
        squares.append(small.round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu())
    return torch.cat(squares)


def _padded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tensor:
    encoding = tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt")
    ids: Tensor = encoding.input_ids
    return ids


class Towers(nn.Module):
    """The image tower, the three encoders, and the projections and temperatures that compare them."""

    def __init__(self, size: TextSize, tokenizers: dict[str, PreTrainedTokenizerBase], side: int, seed: int) -> None:
        super().__init__()
        self.text = nn.ModuleList(build_encoders(size, tokenizers, seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            width = size.tower[-1]
            # `hidden_size` is what the dual encoder calls the tower's output width
            config = ConvNextConfig(
                hidden_sizes=list(size.tower), depths=list(size.depths), image_size=side, hidden_size=width
            )
            self.image = ConvNextModel(config)
            widths = (size.clip_l, size.clip_g, size.t5)
            self.projections = nn.ModuleList(nn.Linear(width, text, bias=False) for text in widths)
            self.t5_pooling = nn.Linear(size.t5, size.t5, bias=False)
            self.scales = nn.Parameter(torch.full((3,), math.log(1 / 0.07)))

    def text_vector(self, index: int, ids: Tensor, lengths: Tensor, masked: bool) -> Tensor:
        """Return an encoder's normalised vectors of captions. ``masked``: T5 does not attend to padding."""
        model: Any = self.text[index]
        tokens, pooled = encode(model, ids, lengths if masked else None)
        if pooled is None:
            is_real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            pooled = self.t5_pooling((tokens * is_real[:, :, None]).sum(1) / lengths[:, None])
        return F.normalize(pooled.float(), dim=-1)


class TextTask:
    """The towers in training; see `fit.Task`."""

    score = "retrieval"

    def __init__(self, towers: Towers, data: CaptionedImages, device: torch.device, options: TextOptions) -> None:
        self.model = self.towers = towers.to(device).train()
        self.batch = options.batch or (_GPU_BATCH if device.type != "cpu" else _CPU_BATCH)
        self.device = device
        self.data = data
        self.options = replace(options, batch=self.batch)
        if device.type == "cuda":
            self.towers.image.to(memory_format=torch.channels_last)
        self._image = compiled(towers.image, device) if options.compile else towers.image

    def loss(self, step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean contrastive loss of the three encoders for a random batch."""
        rng = stream(self.options.seed, "parts-text", 0, 0, step)
        data = self.data
        count = len(self.data.pixels) - self.data.held_out
        rows = rng.choice(count, size=min(self.batch, count), replace=False) + data.held_out
        chosen = data.first[rows] + rng.integers(0, data.first[rows + 1] - data.first[rows])
        images = augment(take(data.pixels, rows, self.device), rng)
        captions = torch.from_numpy(chosen).to(self.device)
        with half_precision(self.device):
            features = self._image(images).pooler_output
            # stock pipelines give T5 its padding unmasked, real-token ones do not: learn both
            losses = [self._loss(index, features, captions, masked=step % 2 == 0) for index in range(3)]
        return torch.stack(losses).mean(), {}

    def _loss(self, index: int, features: Tensor, captions: Tensor, masked: bool) -> Tensor:
        towers = self.towers
        ids = self.data.ids[index][captions]
        image = F.normalize(towers.projections[index](features).float(), dim=-1)
        text = towers.text_vector(index, ids, self.data.lengths[captions], masked)
        logits = towers.scales[index].clamp(max=_MAX_SCALE).exp() * image @ text.T
        # equal captions are no wrong answers for each other
        equal = (ids[:, None] == ids[None]).all(-1) & ~torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        logits = logits.masked_fill(equal, float("-inf"))
        target = torch.arange(len(ids), device=ids.device)
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return how often a held-out image finds its caption among 100, averaged over the encoders and by encoder."""
        self.towers.eval()
        images = self._image_features()
        scores = {}
        for index, name in enumerate(("clip_l", "clip_g", "t5")):
            scores[name] = self._retrieval(index, images)
        self.towers.train()
        return {"retrieval": sum(scores.values()) / 3, **scores}

    def _image_features(self) -> Tensor:
        batches = []
        for start in range(0, self.data.held_out, 64):
            rows = np.arange(start, min(start + 64, self.data.held_out))
            batches.append(self.towers.image(take(self.data.pixels, rows, self.device)).pooler_output)
        return torch.cat(batches)

    def _retrieval(self, index: int, features: Tensor) -> float:
        data = self.data
        texts = []
        image = F.normalize(self.towers.projections[index](features).float(), dim=-1)
        # one caption per image; which one alternates, so that all languages count
        chosen = [int(data.first[row] + row % (data.first[row + 1] - data.first[row])) for row in range(data.held_out)]
        for start in range(0, data.held_out, _GROUP):
            numbers = torch.tensor(chosen[start : start + _GROUP], device=self.device)
            texts.append(self.towers.text_vector(index, data.ids[index][numbers], data.lengths[numbers], masked=True))
        captions = [data.texts[number] for number in chosen]
        return finds_own_caption(image, torch.cat(texts), captions, _GROUP).sum().item() / max(1, data.held_out)

    def judge(self) -> VisionTextDualEncoderModel:
        """Return a copy of the image tower and the second CLIP encoder as one stock model, on the CPU."""
        towers: Any = copy.deepcopy(self.towers).cpu().eval()
        clip: CLIPTextModelWithProjection = towers.text[1]
        width = clip.config.projection_dim
        config = VisionTextDualEncoderConfig.from_vision_text_configs(
            towers.image.config, clip.text_model.config, projection_dim=width
        )
        judge = VisionTextDualEncoderModel(config, vision_model=towers.image, text_model=clip.text_model)
        judge.visual_projection = towers.projections[1]
        judge.text_projection = clip.text_projection
        judge.logit_scale.data.copy_(towers.scales[1].detach().clamp(max=_MAX_SCALE))
        return judge.eval()

    def encoders(self) -> list[CLIPTextModelWithProjection | T5EncoderModel]:
        """Return copies of the three encoders on the CPU."""
        return [copy.deepcopy(model).cpu().eval() for model in self.towers.text]


def augment(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Scale and shift each image a little. Mirroring would make left and right equal."""
    count = len(images)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = torch.from_numpy(rng.uniform(1 - _ZOOM, 1 + _ZOOM, count))
    theta[:, :, 2] = torch.from_numpy(rng.uniform(-_SHIFT, _SHIFT, (count, 2)))
    grid = F.affine_grid(theta.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False).contiguous(
        memory_format=torch.channels_last
    )
