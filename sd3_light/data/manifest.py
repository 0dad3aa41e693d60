"""The manifest of a cache: its shards and the recipe that made them. Imports no torch.

`manifest.json` lists the shards. Above `TABLE_SHARDS` it names a table with their list instead (`data.shard_table`).
"""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from sd3_light.config.faults import UserError
from sd3_light.cost.residence import LARGEST_SHARE
from sd3_light.data.shard_table import ENTRY_FIELDS, ShardTable, column
from sd3_light.data.shard_table import ShardEntry as ShardEntry
from sd3_light.data.sides import HeldOut
from sd3_light.files import atomic_file, file_sha256, scratch_file, write_atomically
from sd3_light.inputs import INDEX_BYTES, TEXT_BYTES, is_inner_path, parse_json, read_limited
from sd3_light.system import available_memory

CACHE_FORMAT = 5
"""Format of manifests and shards."""
TABLE_SHARDS = 10_000
"""Most shards that `manifest.json` itself lists."""
MANIFEST = "manifest.json"
SHARDS = "shards"
REJECTED = "rejected: "
"""Prefix of a manifest's counts of rejects."""

DUPLICATES = {"keep": "duplicates kept", "drop": "duplicates dropped", "similar": "similar dropped"}
"""A manifest's counts of images that are equal or similar to an earlier one; absent if there are none."""

REJECTS_FILE = "rejects.jsonl"
DUPLICATES_FILE = "duplicates.jsonl"
"""Lists beside the manifest, one JSON object per line."""

HELD_OUT = "held out"
"""A manifest's count of images that are held out for validation; absent if the dataset is not divided."""

UNMATCHED = "unmatched"
EXCLUDED = "excluded"
"""A manifest's counts of samples that do not match `where` and that `exclude` lists; absent if there are none."""


def damaged_mark(shard: Path) -> Path:
    """Return the path of the file that marks a shard as damaged: the cache stage encodes such a shard again."""
    return shard.with_name(f"{shard.name}.damaged")


@dataclass(frozen=True)
class Manifest:
    """The recipe and the shards of a cache. ``places`` are the source folders, for information only."""

    recipe: dict[str, Any]
    shards: Sequence[ShardEntry]
    empty: ShardEntry
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    held_out: HeldOut | None = None
    """The samples that are not trained on; None if the dataset is not divided."""

    @property
    def nbytes(self) -> int:
        """The bytes of all shards."""
        return int(column(self.shards, "bytes").sum())

    def too_large(self, processes: int = 1) -> str | None:
        """Return why the cache does not fit into memory for each of ``processes`` (law 10); None if it does."""
        nbytes = self.nbytes
        free = available_memory()
        if free is None or nbytes * processes <= LARGEST_SHARE * free:
            return None
        copies = f", {processes} times on this machine," if processes > 1 else ""
        return (
            f"the cache takes {nbytes / 1e9:.1f} GB{copies} and {free / 1e9:.1f} GB of memory are free, of which "
            f'{LARGEST_SHARE:.0%} may be taken; stream it (cache_residence = "stream", sd3_streaming_dataset = true)'
        )

    def save(self, folder: Path) -> None:
        """Write the manifest atomically into a cache folder; a table of its shards before it."""
        table = _write_table(folder, ShardTable.of(self.shards)) if len(self.shards) > TABLE_SHARDS else None
        content = {
            "format": CACHE_FORMAT,
            "recipe": self.recipe,
            "shards": [asdict(shard) for shard in self.shards] if table is None else asdict(table),
            "empty": asdict(self.empty),
            "counts": self.counts,
            "places": self.places,
            **({} if self.held_out is None else {"held_out": self.held_out.as_json()}),
        }
        write_atomically(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False).encode())
        for path in folder.glob("manifest-*.arrow"):
            if is_table(path.name) and (table is None or path.name != table.file):
                path.unlink(missing_ok=True)

    @property
    def rejects(self) -> dict[str, int]:
        """The number of rejected inputs by reason."""
        return {name.removeprefix(REJECTED): n for name, n in self.counts.items() if name.startswith(REJECTED)}

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read a cache folder's manifest; a UserError if there is none."""
        return Manifest.from_json(manifest_bytes(folder), str(folder / MANIFEST))

    @staticmethod
    def from_json(data: bytes, where: str, open_table: "Callable[[TableFile], ShardTable] | None" = None) -> "Manifest":
        """Parse the bytes of the manifest file ``where``. ``open_table`` reads its table; None: the one beside it."""
        try:
            content = parse_json(data, object_hook=_as_entry)  # entries need less memory than millions of dicts
            if "samples" in content:
                raise UserError(
                    f"{where} lists the sample files of a script's data process, not the shards of a cache; "
                    "tasks.ProcessedDataset reads them from a folder"
                )
            if content["format"] != CACHE_FORMAT:
                raise UserError(
                    f"{where} has format {content['format']}, this version reads {CACHE_FORMAT}; `sd3-light cache "
                    "CONFIG` encodes it again"
                )
            listed = content["shards"]
            empty = content["empty"]
            if isinstance(listed, list):
                shards: Sequence[ShardEntry] = tuple(map(_require_entry, listed))
            else:
                table = TableFile(**listed)
                shards = open_table(table) if open_table else read_table(table, Path(where).with_name(table.file))
            _require_entry(empty)
            _require_table(content, "recipe", object)
            _require_table(content, "counts", int)
            _require_table(content, "places", str)
            held_out = HeldOut.from_json(content.get("held_out"))
            return Manifest(content["recipe"], shards, empty, content["counts"], content["places"], held_out)
        except (ValueError, LookupError, TypeError, pa.ArrowException) as error:  # not written by `save`
            raise UserError(
                f"{where} is damaged ({error!r}); `sd3-light cache CONFIG` writes it again and keeps finished shards"
            ) from error


def manifest_bytes(folder: Path) -> bytes:
    """Return the bytes of a cache folder's manifest; a UserError if there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"no cache at {folder}; build it with `sd3-light cache CONFIG`")
    try:
        return read_limited(path, INDEX_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the cache folder") from error


@dataclass(frozen=True)
class TableFile:
    """The file of a table of shards, as a manifest names it; its name contains the start of its hash."""

    file: str
    count: int
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        is_valid = re.fullmatch(r"[0-9a-f]{64}", self.sha256) and self.file == _table_name(self.sha256)
        if not is_valid or type(self.count) is not int or type(self.bytes) is not int or self.bytes < 1:
            raise ValueError(f"the table of shards {self.file!r:.80} has a wrong name or size")


def is_table(name: str) -> bool:
    """Return whether a file of a cache folder is a table of shards."""
    return re.fullmatch(r"manifest-[0-9a-f]{20}\.arrow", name) is not None


def _table_name(sha256: str) -> str:
    return f"manifest-{sha256[:20]}.arrow"


def _write_table(folder: Path, table: ShardTable) -> TableFile:
    """Write a table under the name of its content."""
    with scratch_file(folder / "manifest.arrow") as draft:
        table.write(draft)
        digest = file_sha256(draft)
        described = TableFile(_table_name(digest), len(table), draft.stat().st_size, digest)
        with atomic_file(folder / described.file) as temporary:
            os.replace(draft, temporary)
    return described


def read_table(file: TableFile, path: Path) -> ShardTable:
    """Read the table that a manifest names from ``path``; a ValueError if it has other bytes or is missing."""
    try:
        if path.stat().st_size != file.bytes or file_sha256(path) != file.sha256:
            raise ValueError(f"{path.name} has other bytes than those that were written")
        table = ShardTable.read(path)
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error
    if len(table) != file.count:
        raise ValueError(f"{path.name} lists {len(table)} shards instead of {file.count}")
    return table


def _require_entry(item: object) -> ShardEntry:
    if not isinstance(item, ShardEntry):
        raise TypeError("an entry has unknown or missing fields")
    return item


def _as_entry(item: dict[str, Any]) -> Any:
    """Return a ShardEntry if the JSON object is one, else the object itself."""
    if item.keys() != ENTRY_FIELDS:
        return item
    _require_types(item)
    # values that many shards have in common become one shared object
    shared = {name: sys.intern(item[name]) for name in ("bucket", "directory")}
    return ShardEntry(**{**item, **shared, "resolution": _resolution(*item["resolution"])})


def _require_types(item: dict[str, Any]) -> None:
    """Raise a ValueError unless the fields of an entry have their types and the file is inside the cache."""
    texts = (item["directory"], item["sha256"], item["fingerprint"])
    numbers = (item["count"], item["bytes"])
    sides = item["resolution"]
    valid = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in numbers)
    valid = valid and isinstance(sides, list) and len(sides) == 2 and all(type(side) is int for side in sides)
    bucket = item["bucket"]
    valid = valid and isinstance(bucket, str) and re.fullmatch(r"\d+x\d+(x\d+)?|empty", bucket) is not None
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
    """Return the entry of a complete shard in ``folder``; None if the shard or its entry is missing or not valid."""
    path = folder / file
    note = path.with_suffix(".json")
    try:
        if not note.is_file() or note.stat().st_size > TEXT_BYTES:
            return None
        entry = parse_json(read_limited(note), object_hook=_as_entry)
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    return entry if isinstance(entry, ShardEntry) and path.is_file() else None
