"""Sample grids during training: the config's prompts and seeds, drawn by all ranks with the current weights.

Every rank draws its share and calls the denoiser as often as the others, as sharded weights need. No text encoder is
loaded: the features of the prompts come from the cache.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from sd3_light.config import ModelConfig, TrainConfig, batch_size_for
from sd3_light.config.base import CacheLocation
from sd3_light.config.schema_tables import SampleImage, SamplingConfig
from sd3_light.core.batch import Batch
from sd3_light.core.caption_lengths import cut_prompts
from sd3_light.core.columns import Bucket, named_bucket, reference_entry
from sd3_light.core.encoding import PairEncoders
from sd3_light.core.registry import family_of
from sd3_light.core.sampling import Decoder, EncodedText, ImageRequest, Sampling
from sd3_light.data.prompt_features import encode_prompts_one_by_one, of_one_caption, read_prompt
from sd3_light.data.shard_table import BucketShards
from sd3_light.data.stream import CachedDataset
from sd3_light.encoding.vae import LatentScale
from sd3_light.engines import Launch
from sd3_light.formats import plural
from sd3_light.runlog import info
from sd3_light.sample.generate import as_image, frames_of, not_finite, to_images
from sd3_light.sample.grid import make_grid
from sd3_light.sample.loop import Denoise, draw_latents, starting_noise
from sd3_light.sample.png import save_png
from sd3_light.sources.decode import read_fitted
from sd3_light.sources.video import write_video

_Pair = tuple[str, tuple[Path, ...], Bucket]
"""A text, the references that it is encoded with, and the size of the image."""
_Key = str | _Pair

_MAX_BATCH = 16
_GRID_SIDE = 128  # small images are enlarged to about this


@dataclass(frozen=True)
class SampledCache:
    """The cache of a run, where its encoded prompts are; the images of a grid have the size of ``bucket``."""

    location: CacheLocation
    data: CachedDataset
    bucket: BucketShards


@dataclass
class Sampler:
    """Draws the grids of a run. Built once on every rank; the VAE is loaded with the first grid and stays on the host.

    ``requests`` are the images of the whole grid in order: all seeds of the first prompt, then of the next. An image
    depends on its own request alone, except for rounding: up to 1/255 with another number of ranks. ``negative`` is the
    text of requests without a negative prompt, None if guidance needs none. A batch has at most ``batch_size`` images
    of ``batch_pixels`` pixels. ``references`` are the latents of all reference images, by file and size.
    """

    config: TrainConfig
    requests: tuple[ImageRequest, ...]
    texts: Mapping[_Key, EncodedText]
    negative: EncodedText | None
    batch_size: int
    batch_pixels: int
    launch: Launch
    device: torch.device
    stages: int = 1
    references: Mapping[tuple[Path, Bucket], Tensor] = field(default_factory=dict, repr=False)
    _decoder: Decoder | None = field(default=None, repr=False)
    _fault: str | None = None

    @staticmethod
    def of_config(
        config: TrainConfig,
        cache: SampledCache,
        launch: Launch,
        device: torch.device,
        stages: int = 1,
    ) -> "Sampler":
        """Return the sampler of a run.

        Prompts that are not in the cache (it is at a URL, or read-only) are encoded now, one encoder in memory at a
        time. The processes of a pipeline of ``stages`` draw the same images.
        """
        settings = config.sampling
        size = named_bucket(cache.bucket.bucket)
        frames = settings.frames or size.frames
        size = Bucket(*(settings.size or (size.width, size.height)), frames)
        requests = tuple(_request(image, seed, settings, size) for image in settings.images for seed in settings.seeds)
        return Sampler.of_requests(config, requests, cache, launch, device, stages)

    @staticmethod
    def of_requests(
        config: TrainConfig,
        requests: tuple[ImageRequest, ...],
        cache: SampledCache,
        launch: Launch,
        device: torch.device,
        stages: int = 1,
    ) -> "Sampler":
        """Return the sampler of these images, which have steps and guidance; see `of_config`."""
        assert requests, "nothing to draw"
        family = family_of(config.model).sampling
        negative = family.negative_text(family.text(cache.data.empty_text()), config.model)
        micro_batch = batch_size_for(config.micro_batch_size_per_gpu, cache.bucket.resolution)
        # the denoiser gets no more samples than a micro-batch has, so it needs no more memory than training
        guided = any(family.is_guided(request.guidance) for request in requests if request.guidance is not None)
        joined = guided and negative is not None and family.joins_guidance
        batch_size = max(1, min(_MAX_BATCH, micro_batch // (2 if joined else 1)))
        size = named_bucket(cache.bucket.bucket)
        pixels = size.area * size.frames
        sampler = Sampler(config, requests, {}, negative, batch_size, pixels, launch, device, stages)
        own = [requests[index] for indices in sampler._share(launch.rank) for index in indices]
        negatives = (request.negative_prompt for request in own if request.negative_prompt)
        texts = list(dict.fromkeys([*(request.prompt for request in own), *negatives]))
        references = _reference_latents(config.model, own, device)
        if sampler._sees:
            pairs = [_pair(text, each) for each in own for text in (each.prompt, each.negative_prompt)]
            encoded = _texts_with_references(config.model, list(dict.fromkeys(pairs)), device)
        else:
            encoded = _texts(config.model, texts, cache.location, cache.data.manifest.recipe, device)
        return replace(sampler, texts=encoded, references=references)

    def sample(
        self, denoise: Denoise, path: Path, facts: Mapping[str, Any], group: dist.ProcessGroup | None = None
    ) -> Image.Image | None:
        """Draw a grid with all ranks and write it to ``path``; return it on rank 0 and None elsewhere.

        ``facts`` (the step, ...) go into the PNG's metadata with prompts, seeds and settings. ``group`` joins all ranks
        and transfers CPU tensors (gloo). A grid that cannot be written, or with values that are not finite, is
        reported, and None on rank 0 too.
        """
        images = self._gather(self.draw(denoise), group)
        fault = self._first_fault(group)
        if images is None:
            return None
        if fault is not None:
            info(f"the grid {path} was not written: {fault}")
            return None
        grid = self._grid(images, facts)
        settings = self.config.sampling
        about = {name: getattr(settings, name) for name in ("seeds", "steps", "guidance", "negative_prompt")}
        about |= {"prompts": [image.prompt for image in settings.images], "size": self._size}
        about |= {"uncond_text": self.config.model.uncond_text, "cells": grid.info["cells"]}
        try:
            self._save_clips(images, path.with_suffix(".webp"), facts)
            save_png(grid, path, {**facts, **about})
        except OSError as error:  # a full disk does not stop training
            info(f"the grid {path} was not written: {error.strerror or error}")
            return None
        return grid

    def _save_clips(self, images: Sequence[Image.Image], path: Path, facts: Mapping[str, Any]) -> None:
        """Write the grids of all frames as an animation, if there are clips; a shorter one stops at its end."""
        clips = [frames_of(image) for image in images]
        most = max(map(len, clips))
        if most > 1:
            grids = [self._grid([clip[min(at, len(clip) - 1)] for clip in clips], facts) for at in range(most)]
            write_video(path, grids)

    @property
    def _size(self) -> tuple[int, int]:
        return self.requests[0].width, self.requests[0].height

    def draw(self, denoise: Denoise) -> list[tuple[int, Image.Image]]:
        """Return this rank's images with the numbers of their requests; all ranks call ``denoise`` equally often.

        Values that are not finite raise no error, as other ranks would wait; see `_first_fault`.
        """
        self._fault = None
        latents: list[tuple[list[int], Tensor]] = []
        for share in self._share(self.launch.rank):
            first = self.requests[share[0]]
            batch_size = max(1, self.batch_size * self.batch_pixels // max(self.batch_pixels, math.prod(first.size)))
            for start in range(0, len(share), batch_size):
                indices = share[start : start + batch_size]
                latents.append((indices, self._draw_latents(denoise, [self.requests[index] for index in indices])))
        return self._decode(latents)

    @property
    def _family(self) -> Sampling:
        return family_of(self.config.model).sampling

    def _draw_latents(self, denoise: Denoise, batch: Sequence[ImageRequest]) -> Tensor:
        """Draw requests of one group."""
        family = self._family
        model = self.config.model
        first = batch[0]
        assert first.steps is not None and first.guidance is not None
        texts = [[self._text(request.prompt, request) for request in batch]]
        guide = None
        if self.negative is not None and family.is_guided(first.guidance):
            negatives = [
                self._text(request.negative_prompt, request) if request.negative_prompt or self._sees else self.negative
                for request in batch
            ]
            texts.insert(0, negatives)
            texts = [[*texts[0], *texts[1]]] if family.joins_guidance else texts
            guide = partial(family.guide, guidance=first.guidance)
        size = first.size
        noise = starting_noise([request.seed for request in batch], family.latent_shape(model, size), self.device)
        scheduler = family.scheduler(model, size, first.steps, self.device)
        inputs = [self._seen(batch, family.batch(part, model, first.guidance)).to(self.device) for part in texts]
        latents = draw_latents(denoise, scheduler, noise, inputs, guide)
        encoded = [tensor for part in inputs for tensor in part.tensors()]
        self._fault = self._fault or not_finite({"text encoder": encoded, "denoiser": [latents]})
        return latents

    def _text(self, text: str, request: ImageRequest) -> EncodedText:
        """Return a text of a request as it is encoded, perhaps with its references."""
        return self.texts[_pair(text, request) if self._sees else text]

    @property
    def _sees(self) -> bool:
        """Whether texts are encoded with references."""
        return family_of(self.config.model).texts_see_references

    def _seen(self, requests: Sequence[ImageRequest], batch: Batch) -> Batch:
        """Return a batch of texts, once or twice as many as the requests, with the latents of their references."""
        sizes = [Bucket(request.width, request.height) for request in requests]
        values = {}
        for number, paths in enumerate(zip(*(request.references for request in requests), strict=True)):
            latents = torch.stack([self.references[key] for key in zip(paths, sizes, strict=True)])
            values[reference_entry(number)] = torch.cat([latents] * (batch.size // len(requests)))
        return batch.with_values(values)

    def _decode(self, latents: Sequence[tuple[list[int], Tensor]]) -> list[tuple[int, Image.Image]]:
        """Return the images of batches of latents, with the numbers of their requests."""
        if self._decoder is None:
            self._decoder = self._family.decoder(self.config.model, self.device)
        drawn: list[tuple[int, Image.Image]] = []
        with self._decoder:
            for indices, batch in latents:
                pixels = self._decoder.decode(batch)
                self._fault = self._fault or not_finite({"VAE": [pixels]})
                drawn += zip(indices, to_images(pixels), strict=True)
        return drawn

    @property
    def fault(self) -> str | None:
        """What is wrong with the images that this rank drew last, if they are not finite."""
        return self._fault

    def _first_fault(self, group: dist.ProcessGroup | None) -> str | None:
        """Return on rank 0 what was wrong with the images of any rank."""
        if self.launch.world_size == 1:
            return self._fault
        faults: list[str | None] | None = [None] * self.launch.world_size if self.launch.is_main else None
        dist.gather_object(self._fault, faults, dst=0, group=group)
        return next(filter(None, faults or ()), None)

    def _share(self, rank: int) -> list[list[int]]:
        """Return the numbers of a rank's requests, in groups of equal size, steps and guidance.

        Each rank has as many of every group, so that all of them call the denoiser equally often.
        """
        data_launch = replace(self.launch, rank=rank).data_launch(self.stages)
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, request in enumerate(self.requests):
            key = (*request.size, request.steps, request.guidance, len(request.references))
            groups.setdefault(key, []).append(number)
        return [
            [numbers[turn] for turn in assigned(len(numbers), data_launch.rank, data_launch.world_size)]
            for numbers in groups.values()
        ]

    def _gather(
        self, drawn: Sequence[tuple[int, Image.Image]], group: dist.ProcessGroup | None
    ) -> list[Image.Image] | None:
        """Return all images of the grid on rank 0, None elsewhere."""
        images = dict(drawn)
        for number, share in enumerate(self._share(self.launch.rank) if self.launch.world_size > 1 else ()):
            clips = [np.stack([np.asarray(frame) for frame in frames_of(images[index])]) for index in share]
            pixels = torch.from_numpy(np.stack(clips))
            parts = [torch.empty_like(pixels) for _ in range(self.launch.world_size)] if self.launch.is_main else None
            dist.gather(pixels, parts, dst=0, group=group)
            for rank, part in enumerate(parts or ()):
                indices = self._share(rank)[number]
                for index, clip in zip(indices, part.numpy(), strict=True):
                    images[index] = as_image([Image.fromarray(frame) for frame in clip])
        return [images[index] for index in range(len(self.requests))] if self.launch.is_main else None

    def _grid(self, images: Sequence[Image.Image], facts: Mapping[str, Any]) -> Image.Image:
        seeds = len(self.config.sampling.seeds)
        captions = [
            f"{request.prompt} (seed {request.seed})" if seeds > 1 else request.prompt for request in self.requests
        ]
        return make_grid(
            images,
            captions,
            columns=seeds if 1 < seeds <= 8 else min(8, len(images)),
            scale=max(1, _GRID_SIDE // max(self._size)),
            title=f"step {facts['step']:,}" if "step" in facts else None,
        )


def _request(image: SampleImage, seed: int, settings: SamplingConfig, size: Bucket) -> ImageRequest:
    """Return the image of one prompt and seed; what the prompt does not set comes from [sampling]."""

    def chosen(name: str) -> Any:
        own = getattr(image, name)
        return getattr(settings, name) if own is None else own

    values = {name: chosen(name) for name in ("negative_prompt", "steps", "guidance")}
    sides = image.size or (size.width, size.height)
    return ImageRequest(image.prompt, seed, *sides, **values, frames=size.frames, references=image.references)


def assigned(count: int, rank: int, world_size: int) -> list[int]:
    """Return the numbers of a rank's requests among ``count``: equally many for all, so some may be drawn twice."""
    return [(rank + turn * world_size) % count for turn in range(math.ceil(count / world_size))]


def _reference_latents(
    model: ModelConfig, requests: Sequence[ImageRequest], device: torch.device
) -> dict[tuple[Path, Bucket], Tensor]:
    """Return the latents of references, as the cache has those of training; the VAE is freed afterwards."""
    wanted = {(path, Bucket(each.width, each.height)): None for each in requests for path in each.references}
    if not wanted:
        return {}
    family = family_of(model)
    with family.encoding.encoders(model, device, 1) as encoders:
        moments = {}
        for path, size in wanted:
            pixels = np.array(read_fitted(path, family.reference_bucket(size)))
            moments[path, size] = encoders.encode_images(pixels[None], flip=False)["moments"]
        encoders.synchronize()
    scale = LatentScale.of_folder(model.diffusers_path)
    return {key: scale.draw(each[:, 0], None)[0] for key, each in moments.items()}


def _pair(text: str, request: ImageRequest) -> _Pair:
    return text, request.references, Bucket(request.width, request.height)


def _texts_with_references(model: ModelConfig, pairs: Sequence[_Pair], device: torch.device) -> dict[_Key, EncodedText]:
    """Return texts that are encoded with references, as the cache has those of training; the encoder is freed."""
    family = family_of(model)
    encoded: dict[_Key, EncodedText] = {}
    with family.encoding.encoders(model, device, 1) as encoders:
        for text, paths, size in pairs:
            seen = family.reference_bucket(size)
            pixels = [np.array(read_fitted(path, seen)) for path in paths]
            features = cast(PairEncoders, encoders).encode_pairs([text], [pixels])
            encoders.synchronize()
            encoded[text, paths, size] = family.sampling.text(of_one_caption(features))
    return encoded


def _texts(
    model: ModelConfig,
    prompts: Sequence[str],
    cache_dir: CacheLocation,
    recipe: Mapping[str, Any],
    device: torch.device,
) -> dict[_Key, EncodedText]:
    """Return the prompts' encoded texts, from the cache or, if they are missing there, from the encoders."""
    cached = {prompt: read_prompt(cache_dir, prompt, recipe) for prompt in prompts}
    missing = [prompt for prompt, features in cached.items() if features is None]
    if missing:
        info(f"train: not in the cache, encoding now: {plural(len(missing), 'prompt')}")
        for line in cut_prompts(missing, family_of(model).encoding.model_limits(model)):
            info(f"train: warning: {line}")
        cached |= dict(zip(missing, encode_prompts_one_by_one(model, missing, device), strict=True))
    text = family_of(model).sampling.text
    return {prompt: text(features) for prompt, features in cached.items() if features is not None}
