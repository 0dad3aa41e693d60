"""The manifest of a cache: its shards and the recipe that made them. Imports no torch."""

import json
import re
import sys
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.files import write_atomically
from sd3_light.inputs import INDEX_BYTES, is_inner_path, parse_json, read_limited
from sd3_light.system import available_memory

CACHE_FORMAT = 2
MANIFEST = "manifest.json"
SHARDS = "shards"
LARGEST_SHARE = 0.8
"""Share of the available memory that a cache may use."""
REJECTED = "rejected: "
"""Prefix of a manifest's counts of rejects."""

DUPLICATES = {"keep": "duplicates kept", "drop": "duplicates dropped", "similar": "similar dropped"}
"""A manifest's counts of images that are equal or similar to an earlier one; absent if there are none."""

REJECTS_FILE, DUPLICATES_FILE = "rejects.jsonl", "duplicates.jsonl"
"""Lists beside the manifest, one JSON object per line."""

UNMATCHED = "unmatched"
"""A manifest's count of samples that do not match `where`; absent if there are none."""


@dataclass(frozen=True, slots=True)  # slots: every process holds an entry per shard, and there may be millions
class ShardEntry:
    """A shard in the manifest. ``directory`` is the label of its source, as in its samples' keys."""

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
    """The recipe and the shards of a cache. ``places`` are the source folders, for information only."""

    recipe: dict[str, Any]
    shards: tuple[ShardEntry, ...]
    empty: ShardEntry
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def too_large(self, processes: int = 1) -> str | None:
        """Return why the cache does not fit into memory for each of ``processes`` (law 10); None if it does."""
        nbytes, free = sum(shard.bytes for shard in self.shards), available_memory()
        if free is None or nbytes * processes <= LARGEST_SHARE * free:
            return None
        copies = f", {processes} times on this machine," if processes > 1 else ""
        return (
            f"the cache takes {nbytes / 1e9:.1f} GB{copies} and {free / 1e9:.1f} GB of memory are free, of which "
            f'{LARGEST_SHARE:.0%} may be taken; stream it (cache_residence = "stream", sd3_streaming_dataset = true)'
        )

    def save(self, folder: Path) -> None:
        """Write the manifest atomically into a cache folder."""
        text = json.dumps({"format": CACHE_FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_atomically(folder / MANIFEST, text.encode())

    @property
    def rejects(self) -> dict[str, int]:
        """The number of rejected inputs by reason."""
        return {name.removeprefix(REJECTED): n for name, n in self.counts.items() if name.startswith(REJECTED)}

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read a cache folder's manifest; a UserError if there is none."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"no cache at {folder}; build it with `sd3-light cache CONFIG`")
        try:
            data = read_limited(path, INDEX_BYTES)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); check the cache folder") from error
        return Manifest.from_json(data, str(path))

    @staticmethod
    def from_json(data: bytes, where: str) -> "Manifest":
        """Parse the bytes of a manifest file; ``where`` names it in errors."""
        try:
            content = parse_json(data, object_hook=_as_entry)  # entries need less memory than millions of dicts
            if content["format"] != CACHE_FORMAT:
                raise UserError(
                    f"{where} has format {content['format']}, this version reads {CACHE_FORMAT}: rebuild it"
                )
            entries, empty = tuple(content["shards"]), content["empty"]
            if not all(isinstance(entry, ShardEntry) for entry in (*entries, empty)):
                raise TypeError("an entry has unknown or missing fields")
            _require_table(content, "recipe", object)
            _require_table(content, "counts", int)
            _require_table(content, "places", str)
            return Manifest(content["recipe"], entries, empty, content["counts"], content["places"])
        except (ValueError, LookupError, TypeError) as error:  # not JSON, not UTF-8, or not written by `save`
            raise UserError(f"{where} is damaged ({error!r}); rebuild the cache with --regenerate-cache") from error


def _as_entry(item: dict[str, Any]) -> Any:
    """Return a ShardEntry if the JSON object is one, else the object itself."""
    if item.keys() != _NAMES:
        return item
    _require_types(item)
    # values that many shards have in common become one shared object
    shared = {name: sys.intern(item[name]) for name in ("bucket", "directory")}
    return ShardEntry(**{**item, **shared, "resolution": _resolution(*item["resolution"])})


def _require_types(item: dict[str, Any]) -> None:
    """Raise a ValueError unless the fields of an entry have their types and the file is inside the cache."""
    texts, numbers = (item["directory"], item["sha256"], item["fingerprint"]), (item["count"], item["bytes"])
    sides = item["resolution"]
    valid = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in numbers)
    valid = valid and isinstance(sides, list) and len(sides) == 2 and all(type(side) is int for side in sides)
    bucket = item["bucket"]
    valid = valid and isinstance(bucket, str) and re.fullmatch(r"\d+x\d+|empty", bucket) is not None
    if not valid or not is_inner_path(item["file"]):
        raise ValueError(f"the entry of the shard {item['file']!r:.80} has wrong types or a file elsewhere")


def _require_table(content: dict[str, Any], key: str, kind: type) -> None:
    table = content[key]
    if not isinstance(table, dict) or not all(isinstance(value, kind) for value in table.values()):
        raise TypeError(f"{key} has a wrong type")


@cache
def _resolution(width: int, height: int) -> tuple[int, int]:
    return width, height


def read_entry(folder: Path, file: str) -> ShardEntry | None:
    """Return the entry of a complete shard in ``folder``; None if the shard or its entry is missing."""
    path = folder / file
    try:
        entry = parse_json(read_limited(path.with_suffix(".json")), object_hook=_as_entry)
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    return entry if isinstance(entry, ShardEntry) and path.is_file() else None
