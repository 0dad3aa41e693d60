"""The state of a cache compared with its plan: fresh, stale and missing samples, and orphaned files."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather

from sd3_light.cache.reuse import ValueCounts, undecoded_lines
from sd3_light.cache.shard_in_progress import is_done
from sd3_light.cache.sorted_array import SortedArray
from sd3_light.config.base import CacheLocation
from sd3_light.config.faults import UserError
from sd3_light.data.cache_plan import CachePlan, Member, PlannedShard
from sd3_light.data.manifest import MANIFEST, SHARDS, Manifest, ShardEntry, damaged_mark, manifest_bytes, read_entry
from sd3_light.data.shards import Origin, read_origins
from sd3_light.inputs import lines_of, open_regular, require_regular
from sd3_light.randomness import sample_id
from sd3_light.runlog import ResultTable, info
from sd3_light.sources.preprocess import TRANSIENT

_UNCHANGED = "unchanged, but its shard has other samples or settings"
_LABELS = {
    "format": "the cache format",
    "preprocess": "the image preprocessing",
    "vae": "the VAE",
    "teacher": "the teacher",
    "text_encoder": "CLIP-L",
    "text_encoder_2": "CLIP-G",
    "text_encoder_3": "T5",
    "tokenizer": "CLIP-L's tokenizer",
    "tokenizer_2": "CLIP-G's tokenizer",
    "tokenizer_3": "T5's tokenizer",
}


@dataclass
class CacheState:
    """A cache compared with its plan. Samples are counted once per resolution; orphans are files outside the plan.

    ``values`` counts what the shards to build encode and copy; None if there is nothing to copy from.
    """

    folder: Path
    todo: list[PlannedShard] = field(default_factory=list)
    fresh: int = 0
    stale: int = 0
    missing: int = 0
    shards: int = 0
    orphans: list[Path] = field(default_factory=list)
    orphan_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    values: ValueCounts | None = None


def check_freshness(
    folder: Path, plan: CachePlan, identity: Mapping[str, Any], manifest: Manifest | None
) -> CacheState:
    """Compare the files of a cache with its plan; only files of shards that are not fresh are opened.

    ``manifest`` is the last one.
    """
    state = CacheState(folder)
    shards = folder / SHARDS
    for shard in plan.shards:
        if _is_fresh(shards, shard, state):
            state.fresh += shard.count
            state.shards += 1
        else:
            state.todo.append(shard)
    state.orphans = sorted(_orphans(shards, plan.shards))
    state.orphan_bytes = sum(path.stat().st_size for path in state.orphans if path.exists())
    _count_stale_and_missing(state, plan, identity, manifest)
    return state


def _is_fresh(shards: Path, shard: PlannedShard, state: CacheState) -> bool:
    path = shards / shard.file
    entry = read_entry(shards, shard.file)
    truncated = entry is not None and path.stat().st_size != entry.bytes
    if truncated or damaged_mark(path).exists() or _has_transient_rejects(path):
        state.damaged.append(shard.file)
        return False
    return is_done(shards, shard)


def planned_shards(folder: Path, plan: CachePlan) -> tuple[list[ShardEntry], bool]:
    """Return the entries of all shards once they are built, and whether their counts are known.

    Of shards that do not exist yet the images that an earlier build could not decode are left out. Without an earlier
    build these are unknown.
    """
    shards = folder / SHARDS
    entries = [(shard, read_entry(shards, shard.file)) for shard in plan.shards]
    are_new = any(entry is None for _, entry in entries)
    rejected = undecoded_keys(shards) if are_new else set[str]()
    expected = []
    for shard, entry in entries:
        if entry is not None:
            expected.append(entry)
        elif not (shards / shard.file).with_suffix(".none").is_file():
            bad = sum(member.row.key in rejected for member in plan.members(shard)) if rejected else 0
            expected += [replace(shard.entry, count=shard.count - bad)] if shard.count > bad else []
    return expected, not are_new or (folder / MANIFEST).is_file()


def undecoded_keys(shards: Path) -> set[str]:
    """Return the keys of images that earlier builds could not decode."""
    return {str(line.get("key")) for line in undecoded_lines(shards)}


def mark_damaged(state: CacheState) -> None:
    """Mark the damaged shards, so that every process encodes them again."""
    for file in state.damaged:
        damaged_mark(state.folder / SHARDS / file).touch()


def _has_transient_rejects(path: Path) -> bool:
    """Return whether images of a shard were rejected for a reason that can pass without a change of their files."""
    rejects = path.with_suffix(".rejects.jsonl")
    marks = [f'"reason": "{reason}"'.encode() for reason in TRANSIENT]
    if not rejects.is_file():
        return False
    try:
        with open_regular(rejects) as file:
            return any(mark in line for line in lines_of(file) for mark in marks)
    except ValueError:  # it is not a list of rejects: write it again
        return True


def _orphans(shards: Path, planned: Sequence[PlannedShard]) -> Iterator[Path]:
    """Yield the shard files outside the plan, except temporary files."""
    stems = {shard.file.removesuffix(".safetensors") for shard in planned}
    with os.scandir(shards) as entries:
        for entry in entries:
            stem = entry.name.split(".safetensors")[0].removesuffix(Path(entry.name).suffix).removesuffix(".rejects")
            if not entry.name.startswith((".", "empty-")) and stem not in stems:
                yield Path(entry.path)


def _count_stale_and_missing(
    state: CacheState, plan: CachePlan, identity: Mapping[str, Any], manifest: Manifest | None
) -> None:
    """Count the samples to encode: stale ones were in the last manifest, missing ones were not."""
    shards = state.folder / SHARDS
    damaged = set(state.damaged)
    replaced = [] if manifest is None else replaced_entries(manifest, plan)
    known = SortedArray(np.int64)
    for path in _tables(shards, replaced):
        require_regular(path)
        known.add(feather.read_table(path, columns=["sample_id"], memory_map=True)["sample_id"])
    for shard in state.todo:
        stale = shard.count if shard.file in damaged else int(known.contains(plan.ids(shard)).sum())
        state.stale += stale
        state.missing += shard.count - stale
    if manifest is not None and manifest.recipe != identity:
        keys = dict.fromkeys((*identity, *manifest.recipe))
        changed = [key for key in keys if manifest.recipe.get(key) != identity.get(key)]
        named = [_LABELS.get(key, key) for key in changed if key != "columns"]  # the others say why these differ
        state.causes[f"changed: {', '.join(named or changed)}"] = state.stale
    elif state.stale:
        _count_causes(state, shards, replaced, plan)


def replaced_entries(manifest: Manifest, plan: CachePlan) -> list[ShardEntry]:
    """Return the shards of the last manifest that are not in the plan: staleness is counted from their tables."""
    planned = {shard.file for shard in plan.shards}
    return [entry for entry in manifest.shards if entry.file not in planned]


def last_manifest(folder: Path) -> tuple[Manifest, str] | None:
    """Return the existing manifest and a hash of its bytes; None if it is missing or invalid: this run replaces it."""
    path = folder / MANIFEST
    try:
        data = manifest_bytes(folder) if path.is_file() else None
        return None if data is None else (Manifest.from_json(data, str(path)), sha256(data).hexdigest()[:20])
    except UserError as error:
        info(str(error))
        return None


def _tables(shards: Path, entries: Iterable[ShardEntry]) -> Iterator[Path]:
    """Yield the readable Arrow files of shards."""
    paths = ((shards / entry.file).with_suffix(".arrow") for entry in entries)
    return (path for path in paths if is_readable(path))


def is_readable(table: Path) -> bool:
    """Return whether an Arrow file exists and is valid."""
    try:
        require_regular(table)
        feather.read_table(table, memory_map=True).validate(full=True)
    except (pa.ArrowException, OSError, ValueError):
        return False
    return True


def _count_causes(state: CacheState, shards: Path, replaced: Sequence[ShardEntry], plan: CachePlan) -> None:
    """Count why samples are stale, by comparing them with the origins of the replaced shards."""
    previous = SortedArray(np.int64)
    for entry in replaced:
        for path in _tables(shards, [entry]):
            previous.add([hash for origin in read_origins(path) for hash in _hashes_of(origin, entry.bucket)])
    damaged = set(state.damaged)
    for shard in state.todo:
        if shard.file in damaged:
            state.causes["in a damaged shard"] += shard.count
            continue
        hashes = [_hashes_of_member(member) for member in plan.members(shard)]
        known = previous.contains(np.ravel(hashes)).reshape(-1, 4)
        state.causes.update(_cause(*row) for row in known.tolist() if row[0])


def _hashes_of(origin: Origin, bucket: str) -> list[int]:
    """Return hashes of a sample's key in its bucket, of key and captions, and of key and image."""
    own = origin.image_fingerprint, origin.mask_fingerprint, origin.rejected_fingerprint
    images = ["".join((*own, *origin.reference_fingerprints))]
    return _hashes(f"{bucket}/{origin.key}", origin.captions, images)


def _hashes_of_member(member: Member) -> list[int]:
    """Return such hashes, and that of the image with the other value of `flip`."""
    flips = (member, replace(member, flip=not member.flip))
    images = ["".join(each.fingerprints.values()) for each in flips]
    return _hashes(f"{member.bucket}/{member.row.key}", member.captions, images)


def _hashes(name: str, captions: tuple[str, ...], images: Sequence[str]) -> list[int]:
    return [sample_id(name), *(sample_id(f"{name}\0{content}") for content in (repr(captions), *images))]


def _cause(is_known: bool, has_same_captions: bool, has_same_image: bool, has_other_flip: bool) -> str:
    if not has_same_captions:
        return "the caption changed"
    if has_other_flip:
        return "flip changed"
    return _UNCHANGED if has_same_image else "the image or its mask changed"


def render_state(state: CacheState, location: CacheLocation | None = None) -> ResultTable:
    """Return the state as a table for the terminal; ``location`` is the cache's if it is not the folder."""
    table = ResultTable("samples", "count", "meaning", title=f"cache {location or state.folder}")
    table.add_row("fresh", f"{state.fresh:,}", f"in {state.shards:,} shards, reused")
    table.add_row("stale", f"{state.stale:,}", "cached from other inputs or settings: written again")
    for cause, count in state.causes.most_common():
        table.add_row("", f"{count:,}", cause)
    table.add_row("missing", f"{state.missing:,}", "not cached yet: written now")
    if (values := state.values) is not None:
        source = "copied from old shards"
        table.add_row("images", f"{values.images:,}", f"encoded; {values.copied_images:,} are {source}")
        table.add_row("captions", f"{values.captions:,}", f"encoded; {values.copied_captions:,} are {source}")
    if state.damaged:
        table.add_row("damaged", f"{len(state.damaged):,} shards", f"encoded again; the first is {state.damaged[0]}")
    orphans = f"{len(state.orphans):,} unused files, {state.orphan_bytes / 1e9:,.3f} GB"
    table.add_row("orphaned", f"{len(state.orphans):,}", f"{orphans}; `--prune` deletes them" if state.orphans else "")
    return table
