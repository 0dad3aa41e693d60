"""The images of a dataset, decoded into memory at the dataset's sizes."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sd3_light.config import DatasetConfig, DirectoryConfig
from sd3_light.config.faults import UserError
from sd3_light.data.cache_plan import CachePlan, Member, PlannedShard, decode_task, make_cache_plan
from sd3_light.data.manifest import REJECTS_FILE
from sd3_light.files import write_atomically
from sd3_light.runlog import info, progress
from sd3_light.sources.catalogue import Catalogue, make_sources, sample_location
from sd3_light.sources.claims import Claims
from sd3_light.sources.decode import CRASHED_DECODE, decode_images
from sd3_light.sources.preprocess import PREPROCESS_VERSION, Pixels
from sd3_light.sources.records import Rejects, reject_line
from sd3_light.sources.workers import WorkerPool

_SHARD = 1024
_BATCH = 32
_MIN_FOR_WORKERS = 500  # images; fewer are read sooner than processes start


@dataclass(frozen=True)
class DecodedSample:
    """A sample at one of its sizes: ``path`` is the file that contains it, ``pixels`` are [height, width, 3].

    ``references`` are the files of the images that a model sees beside its caption.
    """

    member: Member
    path: Path
    pixels: Pixels
    references: tuple[Path, ...] = ()

    @property
    def group(self) -> str:
        """The name of the folder that the file is in."""
        return self.path.parent.name


def decode_dataset(
    dataset: DatasetConfig, folder: Path, max_images: int, workers: int, list_rejects: bool = False
) -> list[DecodedSample]:
    """Read the ``max_images`` images with the lowest sample ids, at each of the dataset's sizes.

    ``folder`` holds the catalogue of the sources, so that a second run need not probe the images again. With
    ``list_rejects`` it keeps the list of rejected inputs too, whose first ones are always printed.
    """
    _require_images(dataset)
    with Claims(folder / "claims") as claims:
        plan = plan_images(Catalogue(folder, claims), dataset.directories, workers, "parts", _SHARD)
        lines = [reject_line(row.key, row.reason, row.detail, row.image) for row in plan.rejected()]
        decoded = list(_decode(plan, _select(plan, max_images), workers, lines))
    _report_rejects(lines, folder / REJECTS_FILE if list_rejects else None)
    if not decoded:
        raise UserError(f"{dataset.path}: no usable image found; check its path and the captions")
    return decoded


def each_image(
    dataset: DatasetConfig, folder: Path, workers: int, chosen: Collection[int] | None = None
) -> Iterator[DecodedSample]:
    """Yield all images, or those with the ``chosen`` sample ids, at each of the dataset's sizes; unusable ones are left
    out. A few batches are in memory at a time. ``folder``: see `decode_dataset`."""
    _require_images(dataset)
    with Claims(folder / "claims") as claims:
        plan = plan_images(Catalogue(folder, claims), dataset.directories, workers, "parts", _SHARD)
        members = ((shard, member) for shard in plan.shards for member in plan.members(shard))
        yield from _decode(plan, [one for one in members if chosen is None or one[1].identity in chosen], workers, [])


def _require_images(dataset: DatasetConfig) -> None:
    if any(directory.frames is not None for directory in dataset.directories):
        raise UserError(
            f"{dataset.path}: frames: only images are used here, not videos; give a dataset without the key"
        )


def plan_images(
    catalogue: Catalogue,
    directories: Sequence[DirectoryConfig],
    workers: int,
    purpose: str,
    shard_size: int,
    compared: bool = False,
) -> CachePlan:
    """List and probe the images of directories; return the plan of a ``purpose``, in shards of ``shard_size`` samples.

    ``compared``: probe them with thumbnails.
    """
    with progress("listing", None, "inputs") as bar:
        listings = catalogue.refresh(make_sources(directories, compared), bar.advance)
    if num_unprobed := catalogue.count_unprobed(listings):
        with progress("probing new images", num_unprobed, "images") as bar:
            catalogue.probe_images(listings, workers if num_unprobed > _MIN_FOR_WORKERS else 0, bar.advance)
    return make_cache_plan(catalogue, listings, {purpose: PREPROCESS_VERSION}, shard_size)


def _report_rejects(lines: list[dict[str, str]], file: Path | None) -> None:
    """Print the first rejects of each reason, and write all of them to a file."""
    rejects = Rejects()
    # an image is decoded once per resolution and fails in each
    unique = list({(line["key"], line["reason"]): line for line in lines}.values())
    for line in unique:
        rejects.add(line["reason"], line["key"], line["detail"])
    if file is not None:
        write_atomically(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in unique).encode())
    for text in rejects.lines():
        info(text)
    if unique and file is not None:
        info(f"all rejected inputs: {file}")


def _select(plan: CachePlan, max_images: int) -> list[tuple[PlannedShard, Member]]:
    ids = np.sort(np.concatenate([np.zeros(0, np.int64), *(plan.ids(shard) for shard in plan.shards)]))
    limit = ids[min(max_images, len(ids)) - 1] if len(ids) else 0
    return [(shard, member) for shard in plan.shards for member in plan.members(shard) if member.identity <= limit]


def _decode(
    plan: CachePlan, samples: list[tuple[PlannedShard, Member]], workers: int, rejected: list[dict[str, str]]
) -> Iterator[DecodedSample]:
    """Decode samples; those that cannot be decoded are added to ``rejected``."""
    with (
        WorkerPool(workers if len(samples) > _MIN_FOR_WORKERS else 0, decode_images, CRASHED_DECODE) as pool,
        progress("decoding", len(samples), "images") as bar,
    ):
        results = pool.map([decode_task(member, plan.source(shard).root) for shard, member in batch]
                           for batch in _batches(samples))  # fmt: skip
        for batch, images in zip(_batches(samples), results, strict=True):
            for (shard, member), image in zip(batch, images, strict=True):
                if image.pixels is None:
                    rejected.append(reject_line(member.row.key, image.reason, image.detail, member.row.image))
                else:
                    location = sample_location(member.row, plan.source(shard).root)
                    references = tuple(Path(reference.path) for reference in location.references)
                    yield DecodedSample(member, Path(location.image.path), image.pixels, references)
            bar.advance(len(batch))


def _batches(samples: list[tuple[PlannedShard, Member]]) -> Iterator[list[tuple[PlannedShard, Member]]]:
    return (samples[start : start + _BATCH] for start in range(0, len(samples), _BATCH))
