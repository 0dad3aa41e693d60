"""The images of a dataset, decoded into memory at the dataset's sizes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sd3_light.config import DatasetConfig
from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Member, Unit, decode_task, make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, make_sources, sample_location
from sd3_light.data.building.claims import Claims
from sd3_light.data.building.decode import CRASHED_DECODE, decode_images
from sd3_light.data.building.workers import WorkerPool
from sd3_light.data.preprocess import PREPROCESS_VERSION, Pixels
from sd3_light.runlog import info, progress

_SHARD, _BATCH = 1024, 32
_MIN_FOR_WORKERS = 500  # images; fewer are read sooner than processes start


@dataclass(frozen=True)
class DecodedSample:
    """A sample at one of its sizes: ``path`` is the file that contains it, ``pixels`` are [height, width, 3]."""

    member: Member
    path: Path
    pixels: Pixels


def decode_dataset(dataset: DatasetConfig, folder: Path, max_images: int, workers: int) -> list[DecodedSample]:
    """Read the ``max_images`` images with the lowest sample ids, at each of the dataset's sizes.

    ``folder`` holds the catalogue of the sources, so that a second run need not probe the images again.
    """
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        with progress("listing", None, "inputs") as bar:
            listings = catalogue.refresh(make_sources(dataset.directories), bar.advance)
        if num_unprobed := catalogue.count_unprobed(listings):
            with progress("probing new images", num_unprobed, "images") as bar:
                catalogue.probe_images(listings, workers if num_unprobed > _MIN_FOR_WORKERS else 0, bar.advance)
        plan = make_cache_plan(catalogue, listings, {"parts": PREPROCESS_VERSION}, _SHARD)
        decoded = _decode(plan, _select(plan, max_images), workers)
    if not decoded:
        raise UserError(f"{dataset.path}: no usable image found; check the paths in it")
    return decoded


def _select(plan: CachePlan, max_images: int) -> list[tuple[Unit, Member]]:
    ids = np.sort(np.concatenate([np.zeros(0, np.int64), *(plan.ids(unit) for unit in plan.units)]))
    limit = ids[min(max_images, len(ids)) - 1] if len(ids) else 0
    return [(unit, member) for unit in plan.units for member in plan.members(unit) if member.identity <= limit]


def _decode(plan: CachePlan, samples: list[tuple[Unit, Member]], workers: int) -> list[DecodedSample]:
    decoded, rejected = [], Counter(plan.counts.rejected)
    with (
        WorkerPool(workers if len(samples) > _MIN_FOR_WORKERS else 0, decode_images, CRASHED_DECODE) as pool,
        progress("decoding", len(samples), "images") as bar,
    ):
        results = pool.map([decode_task(member, plan.source(unit).root, unit) for unit, member in batch]
                           for batch in _batches(samples))  # fmt: skip
        for batch, images in zip(_batches(samples), results, strict=True):
            for (unit, member), image in zip(batch, images, strict=True):
                if image.pixels is None:
                    rejected[image.reason] += 1
                else:
                    location = sample_location(member.row, plan.source(unit).root)
                    decoded.append(DecodedSample(member, Path(location.image.path), image.pixels))
            bar.advance(len(batch))
    if rejected:
        info("rejected: " + ", ".join(f"{count:,} {reason}" for reason, count in rejected.most_common()))
    return decoded


def _batches(samples: list[tuple[Unit, Member]]) -> Iterator[list[tuple[Unit, Member]]]:
    return (samples[start : start + _BATCH] for start in range(0, len(samples), _BATCH))
