"""The cache's format: immutable, self-describing shards of one bucket, and the manifest that lists them (law 3).

A shard is a safetensors file. With n samples, v variants of a picture (2 where flips are cached), k captions in all and
d distinct ones:

    sample_id        int64 [n]
    moments          fp16  [n, v, 2C, h, w]  mean and log-variance of the VAE, not normalised
    mask             uint8 [n, h, w]         present when any sample has one; 255 where a sample has none
    caption_start    int64 [n + 1]           number of each sample's first caption
    caption          int64 [k]               which distinct caption each of them is
    ENCODER.tokens   bf16  [rows, width]     ENCODER.start  int64 [d + 1]      first row of each distinct caption
    ENCODER.pooled   bf16  [d, width]        the CLIP encoders only

Beside it lies an Arrow file with each sample's source key, fingerprint, original size, captions and where its picture
is, read only to look for staleness or to show the data. Files appear by rename, so a name that exists is whole.
"""

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sd3_light.config.faults import UserError

FORMAT = 2
TOKENS = ("clip_l", "clip_g", "t5")
POOLED = ("clip_l", "clip_g")
MANIFEST = "manifest.json"
SHARDS = "shards"
_DAY_SECONDS = 86400

Features = dict[str, Tensor]
"""One caption's features: ENCODER -> tokens [rows, width], ENCODER.pooled -> [width]."""


@dataclass(frozen=True)
class ShardContent:
    """The tensors of a shard; ``text`` are those of the encoders, named as in the file."""

    sample_id: Tensor
    moments: Tensor
    caption_start: Tensor
    caption: Tensor
    text: dict[str, Tensor]
    mask: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All of them by their names in the file."""
        picture = {"sample_id": self.sample_id, "moments": self.moments}
        captions = {"caption_start": self.caption_start, "caption": self.caption}
        mask = {} if self.mask is None else {"mask": self.mask}
        return {name: tensor.contiguous() for name, tensor in {**picture, **captions, **mask, **self.text}.items()}


@dataclass(frozen=True)
class Origin:
    """Where a cached sample came from; a row of the Arrow file beside its shard.

    ``image`` and ``mask`` say where the bytes were, as `sources.location_text` writes it.
    """

    key: str
    fingerprint: str
    width: int
    height: int
    captions: tuple[str, ...]
    image: str = ""
    mask: str = ""


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name when the block ends well: absent, as it was, or whole.

    The temporary name is this process's own on any machine, so two writers of one file never meet.
    """
    temporary = path.with_name(f".{path.name}~{socket.gethostname()}~{os.getpid()}~{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; make room or mend the disk and start again: what is written stays"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes: of this machine and gone, or untouched for a day."""
    for path in folder.glob(".*~*.tmp"):
        _, host, pid, _ = path.name.rsplit("~", 3)
        gone = host == socket.gethostname() and not os.path.exists(f"/proc/{pid}")
        with suppress(FileNotFoundError):
            if gone or time.time() - path.stat().st_mtime > _DAY_SECONDS:
                path.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """The file at ``path`` is either absent, what it was, or whole."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_shard(folder: Path, entry: ShardEntry, content: ShardContent, origins: Sequence[Origin]) -> ShardEntry:
    """Write a shard, its Arrow file and its manifest entry under ``folder``; returns the entry with size and hash.

    The shard's own name appears last, so that it never stands without the others.
    """
    count = len(content.sample_id)
    assert count == len(origins) > 0
    # one entry: safetensors writes several in an order of chance, and equal shards must be equal bytes
    about = json.dumps({"bucket": entry.bucket, "fingerprint": entry.fingerprint})
    path = folder / entry.file
    with replacing(path) as temporary:
        try:
            save_file(content.tensors(), temporary, {"shard": about})
        except SafetensorError as error:
            raise OSError(0, str(error)) from error
        # read back from the disk (its cache), so that the hash is that of the file
        entry = replace(entry, count=count, bytes=temporary.stat().st_size, sha256=file_sha256(temporary))
        write_atomically(path.with_suffix(".arrow"), _origin_table(content.sample_id.tolist(), origins))
        write_atomically(path.with_suffix(".json"), json.dumps(asdict(entry)).encode())
    return entry


def _origin_table(ids: Sequence[int], origins: Sequence[Origin]) -> bytes:
    columns = {name: [getattr(origin, name) for origin in origins] for name in Origin.__dataclass_fields__}
    table = pa.table({**columns, "sample_id": ids, "captions": [list(captions) for captions in columns["captions"]]})
    sink = pa.BufferOutputStream()
    feather.write_feather(table, sink, compression="uncompressed")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_entry(folder: Path, file: str) -> ShardEntry | None:
    """The entry of a shard that stands whole under ``folder``, or None."""
    path = folder / file
    if not path.is_file():
        return None
    return _entry(json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))


def read_origins(path: Path) -> list[Origin]:
    """The rows of the Arrow file beside a shard."""
    rows = feather.read_table(path.with_suffix(".arrow"), memory_map=False).to_pylist()
    names = tuple(Origin.__dataclass_fields__)
    return [Origin(**{**{name: row[name] for name in names}, "captions": tuple(row["captions"])}) for row in rows]


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
