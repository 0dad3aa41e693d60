"""Warnings before anything is encoded: captions that are cut, images that fit badly, a full disk, and a VAE that does
not fit the images.

Of a large dataset they look at a part that is spread over all shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from statistics import median

import numpy as np

from sd3_light.cache.local_builder import Builder
from sd3_light.config import ModelConfig
from sd3_light.core.caption_lengths import MAX_CAPTIONS, count_cut_captions, cut_prompts
from sd3_light.core.columns import Bucket, Column, with_pairs
from sd3_light.core.encoding import Encoders
from sd3_light.core.registry import family_of
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.data_bytes import at_most, caption_bytes, image_bytes
from sd3_light.cost.disk_space import CACHE_REMEDY, DOES_NOT_FIT, compare_with_free
from sd3_light.data.cache_plan import CachePlan, Member, PlannedShard, decode_task
from sd3_light.data.manifest import SHARDS
from sd3_light.encoding.vae import LOW_PSNR, psnr
from sd3_light.model.vision import cached_columns
from sd3_light.runlog import info
from sd3_light.sources.buckets import ExtremeFits, resize_for
from sd3_light.sources.preprocess import Pixels

_RECONSTRUCTED = {"cuda": 16, "cpu": 8}  # images by device: decoding one takes about as long as encoding two


def warn_of_cut_captions(title: str, plan: CachePlan, model: ModelConfig) -> None:
    """Print how many captions are longer than the text encoders read."""
    captions = dict.fromkeys(caption for _, member in _spread(plan, MAX_CAPTIONS) for caption in member.captions)
    cut = count_cut_captions(captions, family_of(model).encoding.model_limits(model))
    if cut is not None and (sentence := cut.sentence()):
        info(f"{title}: warning: {sentence}")


def warn_of_cut_prompts(title: str, prompts: Sequence[str], model: ModelConfig) -> None:
    """Print which prompts of [sampling] are longer than the text encoders read."""
    for line in cut_prompts(prompts, family_of(model).encoding.model_limits(model)):
        info(f"{title}: warning: {line}")


def warn_of_extreme_fits(title: str, plan: CachePlan) -> None:
    """Print how many images lose most of their area or are enlarged many times."""
    extremes = ExtremeFits()
    for shard, member in _spread(plan, MAX_CAPTIONS):
        extremes.add(member.row.key, resize_for(member.row.width, member.row.height, shard.bucket))
    if sentence := extremes.sentence():
        info(f"{title}: warning: images fit their buckets badly: {sentence}")


def warn_of_full_disk(
    title: str, folder: Path, plan: CachePlan, planned: Sequence[PlannedShard], model: ModelConfig
) -> None:
    """Print that the shards to encode do not fit on the disk; files that they replace count as free."""
    members = captions = 0
    masked = False
    paired = False
    for _, member in _spread(plan, MAX_CAPTIONS):
        members += 1
        captions += len(member.captions)
        masked = masked or bool(member.row.mask)
        paired = paired or bool(member.row.rejected)
    family = family_of(model)
    columns = dict[Bucket, tuple[Column, ...]]()
    needed = 0.0
    replaced = 0
    for shard in planned:
        if shard.bucket not in columns:
            declared = cached_columns(model, shard.bucket)
            columns[shard.bucket] = with_pairs(declared) if paired else declared
        image = image_bytes(columns[shard.bucket], 2 if shard.flip else 1, masked)
        needed += shard.count * (image.value + captions / members * caption_bytes(columns[shard.bucket]).value)
        path = folder / SHARDS / shard.file
        replaced += path.stat().st_size if path.is_file() else 0
    size = f"{at_most(family.prepared_columns(model, columns[planned[0].bucket]))}{format_bytes(round(needed))}"
    verdict = compare_with_free(round(needed), folder, size, CACHE_REMEDY, replaced)
    if verdict.startswith(DOES_NOT_FIT):
        info(f"{title}: warning: disk, cache: {verdict}")


def measure_reconstructions(title: str, plan: CachePlan, builder: Builder) -> None:
    """Print how well the VAE reconstructs some images, with a warning where it does not."""
    images = _decode_few(plan, builder)
    if not images:
        return
    scores = builder.call(_reconstruction_scores, images)
    worst = min(scores, key=lambda key: scores[key])
    low = sum(value < LOW_PSNR for value in scores.values())
    text = f"the VAE reconstructs {len(scores)} images with a median of {median(scores.values()):.1f} dB"
    text += f", the worst with {scores[worst]:.1f} dB ({worst})"
    if low:
        remedy = "choose a VAE that fits them, and see `sd3-light inspect CACHE --out page.html`"
        text = f"warning: {text}; {low} are below {LOW_PSNR:g} dB: what they show is lost before training; {remedy}"
    info(f"{title}: {text}")


def _decode_few(plan: CachePlan, builder: Builder) -> dict[str, Pixels]:
    """Return some images that can be decoded, of clips the first frame, by their keys."""
    few = _few(plan, _RECONSTRUCTED[builder.device_type])
    samples = [(shard, replace(member, bucket=replace(member.bucket, frames=1))) for shard, member in few]
    roots = {shard: plan.source(shard).root for shard, _ in samples}
    tasks = {member.row.key: decode_task(member, roots[shard]) for shard, member in samples}
    with builder.decode_pool(list(dict.fromkeys(roots.values()))) as pool:
        images = dict(zip(tasks, chain.from_iterable(pool.map([task] for task in tasks.values())), strict=True))
    return {key: image.pixels for key, image in images.items() if image.pixels is not None}


def _reconstruction_scores(encoders: Encoders, images: Mapping[str, Pixels]) -> dict[str, float]:
    """Return the PSNR of each image."""
    scores: dict[str, float] = {}
    for key, pixels in images.items():
        (reconstruction,) = encoders.reconstruct(pixels[np.newaxis])
        scores[key] = psnr(pixels, reconstruction)
    return scores


def _spread(plan: CachePlan, most: int) -> Iterator[tuple[PlannedShard, Member]]:
    """Yield the samples of every n-th shard, about ``most`` or all."""
    total = sum(shard.count for shard in plan.shards)
    for shard in plan.shards[:: max(1, round(total / most))]:
        yield from ((shard, member) for member in plan.members(shard))


def _few(plan: CachePlan, count: int) -> Iterator[tuple[PlannedShard, Member]]:
    """Yield ``count`` samples or all, in turn from as many shards as possible."""
    planned = plan.shards[:: max(1, len(plan.shards) // count)][:count]
    samples = ([(shard, member) for member in plan.members(shard)] for shard in planned)
    yield from islice((sample for row in zip_longest(*samples) for sample in row if sample is not None), count)
