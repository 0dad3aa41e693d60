"""The list of a cache's shards, and what made them: all that opening a cache reads. Without torch."""

import json
import sys
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.files import write_atomically

CACHE_FORMAT = 2
MANIFEST = "manifest.json"
SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard as the manifest knows it. ``directory`` is the label of its source, as in its samples' keys.

    Every process holds one for each shard of a cache, of which there may be millions: hence the slots.
    """

    file: str
    bucket: str
    resolution: tuple[int, int]
    directory: str
    count: int
    bytes: int
    sha256: str
    fingerprint: str


_NAMES = {field.name for field in fields(ShardEntry)}


def damaged_mark(shard: Path) -> Path:
    """Return the path of the file that marks a shard as damaged: the cache stage encodes such a shard again."""
    return shard.with_name(f"{shard.name}.damaged")


@dataclass(frozen=True)
class Manifest:
    """All that opening a cache reads: what made it, and its shards. ``places`` are folders that help people find
    what it was made of; nothing hangs on them."""

    recipe: dict[str, Any]
    shards: tuple[ShardEntry, ...]
    empty: ShardEntry
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it atomically into a cache folder."""
        text = json.dumps({"format": CACHE_FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_atomically(folder / MANIFEST, text.encode())

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read a cache folder's manifest; a fault of the user where there is none."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"no cache at {folder}; build it with `sd3-light cache CONFIG`")
        return Manifest.from_json(path.read_bytes(), str(path))

    @staticmethod
    def from_json(data: bytes, where: str) -> "Manifest":
        """A manifest from the bytes of its file; ``where`` names it in a fault."""
        try:
            found = json.loads(data, object_hook=_as_entry)  # millions of dicts would be more than what is kept
            if found["format"] != CACHE_FORMAT:
                raise UserError(f"{where} has format {found['format']}, this version reads {CACHE_FORMAT}; rebuild it")
            entries, empty = tuple(found["shards"]), found["empty"]
            if not all(isinstance(entry, ShardEntry) for entry in (*entries, empty)):
                raise TypeError("a shard's entry has other fields")
            return Manifest(found["recipe"], entries, empty, found["counts"], found["places"])
        except (ValueError, LookupError, TypeError) as error:  # no JSON, not UTF-8, or not what `save` wrote
            raise UserError(f"{where} is damaged ({error!r}); build the cache anew with --regenerate_cache") from error


def _as_entry(item: dict[str, Any]) -> Any:
    """A shard's entry where a JSON object is one, else the object as it is."""
    return _entry(item) if item.keys() == _NAMES else item


def _entry(item: dict[str, Any]) -> ShardEntry:
    """An entry from JSON; what many shards have in common is one object for all of them."""
    shared = {name: sys.intern(item[name]) for name in ("bucket", "directory")}
    return ShardEntry(**{**item, **shared, "resolution": _resolution(*item["resolution"])})


@cache
def _resolution(width: int, height: int) -> tuple[int, int]:
    return width, height


def read_entry(folder: Path, file: str) -> ShardEntry | None:
    """The entry of a shard that stands whole under ``folder``, or None; without its entry a shard does not stand."""
    path = folder / file
    try:
        return _entry(json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))) if path.is_file() else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
