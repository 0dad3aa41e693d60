"""The list of a cache's shards, and what made them: all that opening a cache reads. Without torch."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.data.files import write_atomically

FORMAT = 2
MANIFEST = "manifest.json"
SHARDS = "shards"


@dataclass(frozen=True)
class ShardEntry:
    """A shard as the manifest knows it. ``directory`` is the label of its source, as in its samples' keys."""

    file: str
    bucket: str
    resolution: tuple[int, int]
    directory: str
    count: int
    bytes: int
    sha256: str
    fingerprint: str


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
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
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
            found = json.loads(data)
            if found["format"] != FORMAT:
                raise UserError(f"{where} has format {found['format']}, this version reads {FORMAT}; build it anew")
            entries = tuple(_entry(item) for item in found["shards"])
            return Manifest(found["recipe"], entries, _entry(found["empty"]), found["counts"], found["places"])
        except (ValueError, LookupError, TypeError) as error:  # no JSON, not UTF-8, or not what `save` wrote
            raise UserError(f"{where} is damaged ({error!r}); build the cache anew with --regenerate_cache") from error


def _entry(item: dict[str, Any]) -> ShardEntry:
    return ShardEntry(**{**item, "resolution": tuple(item["resolution"])})


def read_entry(folder: Path, file: str) -> ShardEntry | None:
    """The entry of a shard that stands whole under ``folder``, or None; without its entry a shard does not stand."""
    path = folder / file
    try:
        return _entry(json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))) if path.is_file() else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
