"""What stands between the sources and the cache, on one screen: fresh, stale, missing, orphaned."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
from rich.table import Table

from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Unit
from sd3_light.data.manifest import MANIFEST, SHARDS, Manifest, ShardEntry, damaged_mark, read_entry
from sd3_light.data.shards import read_origins
from sd3_light.randomness import sample_id
from sd3_light.runlog import info
from sd3_light.stages.cache.number_set import NumberSet
from sd3_light.stages.cache.shard_builder import is_done

_RECIPE_WORDS = {
    "format": "the cache's format",
    "preprocess": "how pictures are prepared",
    "vae": "the VAE",
    "text_encoder": "CLIP-L",
    "text_encoder_2": "CLIP-G",
    "text_encoder_3": "T5",
    "tokenizer": "CLIP-L's tokenizer",
    "tokenizer_2": "CLIP-G's tokenizer",
    "tokenizer_3": "T5's tokenizer",
}


@dataclass
class CacheState:
    """A cache against its plan. Samples are counted once a resolution; orphans are files that no plan names."""

    folder: Path
    todo: list[Unit] = field(default_factory=list)
    fresh: int = 0
    stale: int = 0
    missing: int = 0
    shards: int = 0
    orphans: list[Path] = field(default_factory=list)
    orphan_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)


def compare(folder: Path, plan: CachePlan, recipe: Mapping[str, Any]) -> CacheState:
    """Look at the files of a cache; only those of units that are not fresh are opened."""
    state, shards = CacheState(folder), folder / SHARDS
    for unit in plan.units:
        if _stands(shards, unit, state):
            state.fresh += unit.count
            state.shards += 1
        else:
            state.todo.append(unit)
    state.orphans = sorted(_orphans(shards, plan.units))
    state.orphan_bytes = sum(path.stat().st_size for path in state.orphans if path.exists())
    _tell_stale_from_missing(state, folder, plan, recipe)
    return state


def _stands(shards: Path, unit: Unit, state: CacheState) -> bool:
    path = shards / unit.file
    entry = read_entry(shards, unit.file)
    short = entry is not None and path.stat().st_size != entry.bytes
    if short or damaged_mark(path).exists() or _may_be_whole_now(path):
        state.damaged.append(unit.file)
        return False
    return is_done(shards, unit)


def mark_damaged(state: CacheState) -> None:
    """Have every process know what is to be encoded again."""
    for file in state.damaged:
        damaged_mark(state.folder / SHARDS / file).touch()


def _may_be_whole_now(path: Path) -> bool:
    """Whether pictures of a shard were left out for what may have passed: no change of the files would tell."""
    rejects = path.with_suffix(".rejects.jsonl")
    text = rejects.read_text(encoding="utf-8") if rejects.is_file() else ""
    return any(f'"reason": "{reason}"' in text for reason in ("unreadable", "changed_meanwhile"))


def _orphans(shards: Path, units: Sequence[Unit]) -> Iterator[Path]:
    """Files of shards that the plan does not name; temporary files are not looked at."""
    wanted = {unit.file.removesuffix(".safetensors") for unit in units}
    with os.scandir(shards) as entries:
        for entry in entries:
            stem = entry.name.split(".safetensors")[0].removesuffix(Path(entry.name).suffix).removesuffix(".rejects")
            if not entry.name.startswith((".", "empty-")) and stem not in wanted:
                yield Path(entry.path)


def _tell_stale_from_missing(state: CacheState, folder: Path, plan: CachePlan, recipe: Mapping[str, Any]) -> None:
    """A sample that is to be encoded is stale when the last manifest had it, and missing when it did not."""
    old = _last_manifest(folder)
    planned, damaged = {unit.file for unit in plan.units}, set(state.damaged)
    gone = [] if old is None else [entry for entry in old.shards if entry.file not in planned]
    with NumberSet() as known:
        for path in _tables(folder / SHARDS, gone):
            known.add(feather.read_table(path, columns=["sample_id"], memory_map=True)["sample_id"])
        for unit in state.todo:
            stale = unit.count if unit.file in damaged else int(known.holds(plan.ids(unit)).sum())
            state.stale += stale
            state.missing += unit.count - stale
    if old is not None and old.recipe != recipe:
        changed = [_RECIPE_WORDS.get(key, key) for key in recipe if old.recipe.get(key) != recipe[key]]
        state.causes[f"changed: {', '.join(changed)}"] = state.stale
    elif state.stale:
        _name_causes(state, folder / SHARDS, gone, plan)


def _last_manifest(folder: Path) -> Manifest | None:
    """The manifest that stands; one that cannot be read is replaced by this run."""
    try:
        return Manifest.load(folder) if (folder / MANIFEST).is_file() else None
    except UserError as fault:
        info(str(fault))
        return None


def _tables(shards: Path, entries: Iterable[ShardEntry]) -> Iterator[Path]:
    """The Arrow files of shards, where they are still there."""
    paths = ((shards / entry.file).with_suffix(".arrow") for entry in entries)
    return (path for path in paths if is_readable(path))


def is_readable(table: Path) -> bool:
    """Whether an Arrow file is there and whole."""
    try:
        feather.read_table(table, memory_map=True).validate(full=True)
    except (pa.ArrowException, OSError, ValueError):
        return False
    return True


def _name_causes(state: CacheState, shards: Path, gone: Sequence[ShardEntry], plan: CachePlan) -> None:
    """Why samples are stale, told by comparing them with what the replaced shards were made of."""
    with NumberSet() as before:
        for entry in gone:
            for path in _tables(shards, [entry]):
                before.add([_marks(entry.bucket, o.key, o.fingerprint, o.captions) for o in read_origins(path)])
        damaged = set(state.damaged)
        for unit in state.todo:
            if unit.file in damaged:
                state.causes["in a damaged shard"] += unit.count
                continue
            members = plan.members(unit)
            marks = [_marks(str(unit.bucket), m.row.key, m.fingerprint, m.captions) for m in members]
            held = before.holds(np.ravel(marks)).reshape(-1, 3)
            state.causes.update(_cause(*row) for row in held.tolist() if row[0])


def _marks(bucket: str, key: str, fingerprint: str, captions: tuple[str, ...]) -> tuple[int, int, int]:
    """A sample in a bucket as numbers: itself, itself as it is, and itself with its captions."""
    name = f"{bucket}/{key}"
    return sample_id(name), sample_id(f"{name}\0{fingerprint}"), sample_id(f"{name}\0{captions!r}")


def _cause(is_known: bool, is_same: bool, has_same_captions: bool) -> str:
    if is_same:
        return "unchanged itself, but its shard has other samples or settings"
    return "the picture or its mask changed" if has_same_captions else "the caption changed"


def render(state: CacheState) -> Table:
    """One screen."""
    table = Table("samples", "count", "what that means", title=f"cache {state.folder}")
    table.add_row("fresh", f"{state.fresh:,}", f"in {state.shards:,} shards, taken as they are")
    table.add_row("stale", f"{state.stale:,}", "cached, but made of something else: encoded again")
    for cause, count in state.causes.most_common():
        table.add_row("", f"{count:,}", cause)
    table.add_row("missing", f"{state.missing:,}", "not cached yet: encoded now")
    if state.damaged:
        table.add_row("damaged", f"{len(state.damaged):,} shards", f"encoded again, such as {state.damaged[0]}")
    orphans = f"{len(state.orphans):,} files of {state.orphan_bytes / 1e9:,.3f} GB that nothing uses"
    table.add_row("orphaned", f"{len(state.orphans):,}", f"{orphans}; `--prune` deletes them" if state.orphans else "")
    return table
