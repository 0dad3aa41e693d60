"""The end of a build: rejects listed, everything counted, the manifest written."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sd3_light.config import DatasetConfig
from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Unit
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry, read_entry
from sd3_light.data.sources.name_store import NameStore
from sd3_light.files import atomic_file
from sd3_light.stages.cache.shard_builder import reject_line

REJECTS = "rejects.jsonl"


def write_manifest(
    dataset: DatasetConfig, plan: CachePlan, recipe: dict[str, Any], empty: ShardEntry, places: Mapping[str, str]
) -> dict[str, int]:
    """Write rejects.jsonl, then the manifest of a plan whose units all stand; returns the counts."""
    folder, shards = dataset.local_cache_dir, dataset.local_cache_dir / SHARDS
    entries = _entries(plan.units, shards)
    rejected: Counter[str] = Counter()
    with atomic_file(folder / REJECTS) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for line in _rejects(plan, shards):
            rejected[line["reason"]] += 1
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    if not entries:
        raise UserError(f"{dataset.path}: every sample was rejected; see the reasons in {folder / REJECTS}")
    counts = {
        "used": sum(entry.count for entry in entries),
        "pictures": plan.counts.images,
        "cropped": plan.counts.cropped,
        "enlarged": plan.counts.enlarged,
        **{f"rejected: {reason}": count for reason, count in sorted(rejected.items())},
    }
    Manifest(recipe, tuple(entries), empty, counts, dict(places)).save(folder)
    return counts


def _entries(units: Sequence[Unit], shards: Path) -> list[ShardEntry]:
    """The entries of all units but those whose samples were all rejected; none is left out in silence."""
    found = []
    for unit in in_order(units):
        if (entry := read_entry(shards, unit.file)) is not None:
            found.append(entry)
        elif not (shards / unit.file).with_suffix(".none").is_file():
            raise UserError(f"{shards / unit.file} has vanished, by another run's --prune perhaps; run the cache again")
    return found


def in_order(units: Sequence[Unit]) -> list[Unit]:
    """Units by source, resolution and bucket; among their like in the order of the samples."""
    labels = {label: at for at, label in enumerate(dict.fromkeys(unit.label for unit in units))}
    return sorted(units, key=lambda unit: (labels[unit.label], unit.resolution, unit.bucket, unit.number))


def _rejects(plan: CachePlan, shards: Path) -> Iterator[dict[str, str]]:
    """What the scan and the look rejected, then what only decoding showed."""
    for row in plan.rejected():
        yield reject_line(row.key, row.reason, row.detail, row.image)
    with closing(NameStore()) as name_store:
        seen = name_store.names()
        for unit in plan.units:
            for line in _lines((shards / unit.file).with_suffix(".rejects.jsonl")):
                # a picture is decoded once a resolution and fails in each
                if seen.add_new(f"{line['key']}\0{line['reason']}"):
                    yield line


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """The lines of a unit's rejects; most units have none."""
    if path.is_file():
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def has_manifest(folder: Path, recipe: Mapping[str, Any], units: Sequence[Unit]) -> bool:
    """Whether the manifest is of this plan: of every unit, but those whose samples were all rejected."""
    try:
        manifest = Manifest.load(folder)
        return manifest.recipe == recipe and list(manifest.shards) == _entries(units, folder / SHARDS)
    except UserError:  # not there, or one that the main process is about to replace
        return False
