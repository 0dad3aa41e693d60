"""Finish a cache build: write the rejects, the duplicates, the counts and the manifest."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.cache.reuse import PIXELS
from sd3_light.config import DatasetConfig
from sd3_light.config.faults import UserError
from sd3_light.data.cache_plan import CachePlan, PlanCounts, PlannedShard
from sd3_light.data.manifest import (
    DUPLICATES,
    DUPLICATES_FILE,
    EXCLUDED,
    HELD_OUT,
    REJECTED,
    REJECTS_FILE,
    SHARDS,
    UNMATCHED,
    Manifest,
    ShardEntry,
    read_entry,
)
from sd3_light.data.sides import HeldOut
from sd3_light.data.split import ImageSplit
from sd3_light.files import atomic_file
from sd3_light.inputs import lines_of, open_regular, parse_json, require_regular
from sd3_light.sources.buckets import resize_for
from sd3_light.sources.records import reject_line


@dataclass(frozen=True)
class PlannedManifest:
    """What a manifest will say besides its shards; without a ``split`` the dataset is not divided."""

    plan: CachePlan
    identity: dict[str, Any]
    empty: ShardEntry
    held_out: HeldOut | None = None
    split: ImageSplit | None = None


def write_manifest(
    dataset: DatasetConfig, folder: Path, planned: PlannedManifest, paths: Mapping[str, str]
) -> dict[str, int]:
    """Write rejects, duplicates and the manifest of a plan whose shards are all built. Return the counts."""
    plan = planned.plan
    shards = folder / SHARDS
    entries = _entries(plan.shards, shards)
    rejected: Counter[str] = Counter()
    with atomic_file(folder / REJECTS_FILE) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for line in _reject_lines(plan, shards):
            rejected[line["reason"]] += 1
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    if not entries:
        raise UserError(f"{dataset.path}: every sample was rejected; see the reasons in {folder / REJECTS_FILE}")
    with atomic_file(folder / DUPLICATES_FILE) as temporary:
        require_regular(plan.duplicates_file)
        shutil.copyfile(plan.duplicates_file, temporary)
    undecoded = _count_undecoded(plan, shards)
    counts = {
        "used": sum(entry.count for entry in entries),
        "pictures": plan.counts.images - undecoded.images,
        "cropped": plan.counts.cropped - undecoded.cropped,
        "enlarged": plan.counts.enlarged - undecoded.enlarged,
        **{name: plan.counts.duplicates[key] for key, name in DUPLICATES.items() if plan.counts.duplicates[key]},
        **({UNMATCHED: plan.counts.unmatched} if plan.counts.unmatched else {}),
        **({EXCLUDED: plan.counts.excluded} if plan.counts.excluded else {}),
        **({} if planned.split is None else {HELD_OUT: len(planned.split.validation)}),
        **{f"{REJECTED}{reason}": count for reason, count in sorted(rejected.items())},
    }
    manifest = Manifest(planned.identity, tuple(entries), planned.empty, counts, dict(paths), planned.held_out)
    manifest.save(folder)
    return counts


def _count_undecoded(plan: CachePlan, shards: Path) -> PlanCounts:
    """Count the planned samples that were rejected when they were decoded."""
    counts = PlanCounts()
    keys = set[str]()
    for shard in plan.shards:
        rejected = rejected_keys(shards, shard)
        for member in plan.members(shard) if rejected else ():
            if member.row.key in rejected:
                resize = resize_for(member.row.width, member.row.height, shard.bucket)
                counts.cropped += resize.cropped_fraction > 0
                counts.enlarged += resize.enlarged
        keys |= rejected
    counts.images = len(keys)  # an image has a sample per resolution
    return counts


def rejected_keys(shards: Path, shard: PlannedShard) -> set[str]:
    """Return the keys of the images of a built shard that could not be decoded."""
    return {line["key"] for line in _read_lines((shards / shard.file).with_suffix(".rejects.jsonl"))}


def _entries(planned: Sequence[PlannedShard], shards: Path) -> list[ShardEntry]:
    """Return the entries of all shards except those whose samples were all rejected. A missing shard is an error."""
    entries = []
    for shard in sort_shards(planned):
        if (entry := read_entry(shards, shard.file)) is not None:
            entries.append(entry)
        elif not (shards / shard.file).with_suffix(".none").is_file():
            raise UserError(
                f"{shards / shard.file} disappeared, perhaps because another run pruned it; run the cache stage again"
            )
    return entries


def sort_shards(planned: Sequence[PlannedShard]) -> list[PlannedShard]:
    """Sort shards by source, resolution and bucket, then in the order of their samples."""
    labels = {label: index for index, label in enumerate(dict.fromkeys(shard.label for shard in planned))}
    return sorted(planned, key=lambda shard: (labels[shard.label], shard.resolution, shard.bucket, shard.number))


def _reject_lines(plan: CachePlan, shards: Path) -> Iterator[dict[str, str]]:
    """Yield the rejects of listing and probing, then those of decoding."""
    for row in plan.rejected():
        yield reject_line(row.key, row.reason, row.detail, row.image)
    seen = set[tuple[str, str]]()
    for shard in plan.shards:
        for line in _read_lines((shards / shard.file).with_suffix(".rejects.jsonl")):
            reject = line["key"], line["reason"]
            # an image is decoded once per resolution and fails in each
            if reject not in seen:
                seen.add(reject)
                yield {name: value for name, value in line.items() if name != PIXELS}


def _read_lines(path: Path) -> Iterator[dict[str, str]]:
    """Yield the lines of a shard's rejects; most shards have none."""
    if path.is_file():
        try:
            with open_regular(path) as file:
                yield from map(parse_json, lines_of(file))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); delete it and run again") from error


def is_manifest_current(folder: Path, planned: PlannedManifest) -> bool:
    """Return whether the manifest contains exactly the shards and sides of this plan."""
    try:
        manifest = Manifest.load(folder)
        if manifest.recipe != planned.identity or manifest.held_out != planned.held_out:
            return False
        # a table has another order
        return set(manifest.shards) == set(_entries(planned.plan.shards, folder / SHARDS))
    except UserError:  # missing, or about to be replaced by the main process
        return False
