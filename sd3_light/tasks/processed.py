"""What a task computed once per sample: shards of the cache's format, or a file per sample.

    manifest.json                 the recipe and the shards, as of a cache; of sample files their list
    samples.arrow                 bucket, shard and row of every sample, and its values that are no tensors
    shards/NAME.safetensors       samples of one bucket, in the order of the dataset; NAME.arrow has their fingerprints
    P/ID.pth, P/ID.json           what a custom forward returned for sample ID in process P, and its fingerprint

A fingerprint covers a sample's data and the recipe: a task that is started again keeps what has not changed.
"""

import hashlib
import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.cache.copies import OldShards
from sd3_light.config.base import is_url
from sd3_light.config.faults import UserError
from sd3_light.core.columns import CAPTION, INDEX, MASK, Column
from sd3_light.data.manifest import MANIFEST, SHARDS, Manifest, ShardEntry, read_entry
from sd3_light.data.reader import ShardReader
from sd3_light.data.resident import ResidentBucket, ResidentCache
from sd3_light.data.shards import CaptionFeatures, Origin, ShardContent, read_origins, write_shard
from sd3_light.data.store import open_shard, open_store
from sd3_light.data.stream import CachedDataset
from sd3_light.engines import Launch
from sd3_light.files import atomic_file, file_sha256, sweep_files, write_atomically
from sd3_light.inputs import INDEX_BYTES, is_inner_path, read_json_file, require_regular
from sd3_light.tasks.sample_files import SAMPLE_SUFFIX, read_sample_file
from sd3_light.tasks.sides import Sides, parse_sides
from sd3_light.urls import with_retries

SAMPLES_FILE = "samples.arrow"
_FORMAT = 2
_KIND = "processed"
_OWN = "own."
"""Prefix of the columns of values whose names shards use themselves."""
_AGAIN = "run launch_data_process_task again"


@dataclass(frozen=True)
class ProcessedSample:
    """One sample: its index in the user's dataset, its bucket, its fingerprint and the computed values."""

    data_id: int
    bucket: str
    fingerprint: str
    values: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor values, in host memory."""
        tensors = {name: value for name, value in self.values.items() if isinstance(value, Tensor)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    @property
    def plain(self) -> dict[str, Any]:
        """The other values, which must be JSON."""
        return {name: value for name, value in self.values.items() if not isinstance(value, Tensor)}

    def layout(self, pads: Sequence[str]) -> Hashable:
        """Return a key that is equal for samples that fit one shard; values in ``pads`` differ in length."""
        tensors = self.tensors.items()
        return self.bucket, tuple((name, tuple(t.shape)[name in pads :], str(t.dtype)) for name, t in tensors)


def fingerprint(value: Any) -> str:
    """Hash a dataset item: tensors and arrays by their bytes, images by their pixels, the rest as JSON."""
    digest = hashlib.sha256()
    _update(digest, value)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(str(key).encode())
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _update(digest, item)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):  # arrays and images
        digest.update(f"{getattr(value, 'size', '')}{getattr(value, 'mode', '')}".encode())
        digest.update(value.tobytes())
    else:
        digest.update(json.dumps(value, sort_keys=True, default=str).encode())


# --- shards --------------------------------------------------------------------------------------


def write_samples(folder: Path, samples: Sequence[ProcessedSample], pads: Sequence[str]) -> ShardEntry:
    """Write the shard of samples with one layout; return its entry."""
    values: dict[str, Tensor] = {}
    columns: list[Column] = []
    for name in samples[0].tensors:
        rows = [sample.tensors[name] for sample in samples]
        column = _column(name, rows, name in pads)
        columns.append(column)
        if column.ragged:
            values[column.tensors[0]] = torch.cat(rows)
            values[column.tensors[1]] = torch.tensor([0, *map(len, rows)]).cumsum(0)
        else:
            values[column.name] = torch.stack(rows)[:, None]
    count = len(samples)
    ids = torch.tensor([sample.data_id for sample in samples])
    # a sample's texts are its one caption
    content = ShardContent(columns, ids, torch.arange(count + 1), torch.arange(count), values)
    origins = [
        Origin(str(sample.data_id), sample.fingerprint, 0, 0, (json.dumps(sample.plain, ensure_ascii=False),))
        for sample in samples
    ]
    digest = fingerprint([sample.fingerprint for sample in samples])
    group = int(fingerprint(repr(samples[0].layout(pads)))[:7], 16) + 1  # a bucket's name is a size in pixels
    file = f"samples-{samples[0].data_id:08d}-{digest[:20]}.safetensors"
    entry = ShardEntry(file, f"{group}x1", (group, 1), samples[0].bucket, 0, 0, "", digest)
    return write_shard(folder / SHARDS, entry, content, origins)


def _column(name: str, rows: Sequence[Tensor], is_ragged: bool) -> Column:
    longest = max(map(len, rows)) if is_ragged else 0
    shape = (longest, *rows[0].shape[1:]) if is_ragged else tuple(rows[0].shape)
    stored = f"{_OWN}{name}" if name in (*INDEX, MASK) else name
    dtype = str(rows[0].dtype).removeprefix("torch.")
    try:
        return Column(stored, CAPTION if is_ragged else "sample", dtype, shape, (), is_ragged)
    except ValueError as error:
        raise UserError(f"{name!r} is {dtype}, which cannot be stored; convert it in a unit") from error


def read_row(reader: ShardReader, row: int) -> dict[str, Tensor]:
    """Return the tensors of a sample by name."""
    stored = {**reader.images(row, 0), **reader.caption(row, 0)}
    return {name.removeprefix(_OWN): value for name, value in stored.items()}


class StoredRows:
    """The samples that earlier runs stored, by fingerprint; a damaged shard counts as missing."""

    def __init__(self, folder: Path) -> None:
        self._rows: dict[str, tuple[ShardEntry, int]] = {}
        self._origins: dict[str, list[Origin]] = {}
        self._shards = OldShards(folder, None, 0)
        for note in sorted((folder / SHARDS).glob("*.json")):
            path = note.with_suffix(".safetensors")
            entry = read_entry(path.parent, path.name)
            try:
                origins = [] if entry is None else read_origins(path)
            except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
                continue
            if entry is not None and len(origins) == entry.count:
                self._origins[path.name] = origins
                self._rows |= {origin.image_fingerprint: (entry, row) for row, origin in enumerate(origins)}

    def __contains__(self, made_from: str) -> bool:
        return made_from in self._rows and self._shards.reader(self._rows[made_from][0]) is not None

    def shards_of(self, samples: Sequence[tuple[int, str]]) -> list[str] | None:
        """Return the shards that hold exactly these samples (index, fingerprint), in order; None if none do."""
        files: list[str] = list(dict.fromkeys(self._rows[made_from][0].file for _, made_from in samples))
        stored = [(int(origin.key), origin.image_fingerprint) for file in files for origin in self._origins[file]]
        return files if sorted(stored) == sorted(samples) else None

    def sample(self, data_id: int, bucket: str, made_from: str) -> ProcessedSample:
        """Return a stored sample."""
        entry, row = self._rows[made_from]
        reader = self._shards.reader(entry)
        assert reader is not None, "it is among the stored samples"
        values = {**read_row(reader, row), **json.loads(self._origins[entry.file][row].captions[0])}
        return ProcessedSample(data_id, bucket, made_from, values)


def write_shard_manifest(
    folder: Path, files: Sequence[str], identity: dict[str, Any], count: int, sides: Sides | None = None
) -> None:
    """Write the manifest of shards that hold ``count`` samples together, and the table of the samples."""
    entries = [read_entry(folder / SHARDS, file) for file in dict.fromkeys(files)]
    shards = [entry for entry in entries if entry is not None]
    rows: dict[int, tuple[str, str, int, str]] = {}
    for entry in shards:
        for row, origin in enumerate(read_origins(folder / SHARDS / entry.file)):
            rows[int(origin.key)] = (entry.directory, entry.file, row, origin.captions[0])
    _require_all(folder, rows.keys(), count)
    names = ("bucket", "shard", "row", "values")
    columns = zip(*(rows[number] for number in range(count)), strict=True)
    sink = pa.BufferOutputStream()
    table = dict(zip(names, columns, strict=True)) | ({} if sides is None else {"side": sides.names})
    feather.write_feather(pa.table(table), sink, compression="uncompressed")
    write_atomically(folder / SAMPLES_FILE, sink.getvalue().to_pybytes())
    # a task has no empty caption: the entry names the first shard
    Manifest(identity, tuple(shards), shards[0], {"used": count}).save(folder)
    sweep_files(folder)
    sweep_files(folder / SHARDS)


def _require_all(folder: Path, numbers: Collection[int], count: int) -> None:
    if missing := sorted(set(range(count)) - set(numbers)):
        raise UserError(f"{folder}: {len(missing)} samples are missing, such as {missing[0]}; {_AGAIN}")


# --- a file per sample ---------------------------------------------------------------------------


def read_notes(folder: Path) -> dict[int, dict[str, str]]:
    """Return the notes of the samples whose files exist, by index; of several the last, unless it is damaged."""
    notes: dict[int, dict[str, str]] = {}
    for path in sorted(folder.glob("[0-9]*/*.json")):
        notes.pop(int(path.stem), None)
        try:
            note = {key: str(value) for key, value in read_json_file(path).items()}
        except (OSError, ValueError, AttributeError):  # damaged, or being replaced: computed again
            continue
        if note.keys() >= {"file", "fingerprint", "bucket", "sha256"} and path.with_suffix(SAMPLE_SUFFIX).is_file():
            notes[int(path.stem)] = note
    return notes


def write_sample(folder: Path, process: int, sample: ProcessedSample) -> None:
    """Write the file of a sample and its note; remove those that another process wrote earlier.

    Its values are any that `storable` returns.
    """
    file = f"{process}/{sample.data_id}{SAMPLE_SUFFIX}"
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"file": file, "fingerprint": sample.fingerprint, "bucket": sample.bucket}
    with atomic_file(path) as temporary:
        torch.save(sample.values, temporary)
        note["sha256"] = file_sha256(temporary)
    write_atomically(path.with_suffix(".json"), json.dumps(note, indent=1).encode())
    for other in folder.glob("[0-9]*"):
        for suffix in (".json", SAMPLE_SUFFIX) if other != path.parent else ():
            (other / f"{sample.data_id}{suffix}").unlink(missing_ok=True)


def write_file_manifest(folder: Path, identity: Mapping[str, Any], count: int, sides: Sides | None = None) -> None:
    """Write the manifest of sample files after all processes are done."""
    notes = read_notes(folder)
    _require_all(folder, notes.keys(), count)
    samples = [{key: notes[number][key] for key in ("file", "bucket", "sha256")} for number in range(count)]
    manifest = {"format": _FORMAT, "kind": _KIND, "recipe": dict(identity), "samples": samples}
    manifest |= {} if sides is None else {"sides": sides.names}
    write_atomically(folder / MANIFEST, json.dumps(manifest, ensure_ascii=False).encode())
    for each in (folder, *folder.glob("[0-9]*")):
        sweep_files(each)


# --- reading -------------------------------------------------------------------------------------


class _TaskShards(CachedDataset):
    """The shards of a task: columns may differ from one to another, and there is no empty caption."""

    def new_reader(self, entry: ShardEntry) -> ShardReader:
        """Open a shard without hashing it."""
        return open_shard(self.store, entry, lambda path: ShardReader(path, entry))

    def empty_text(self) -> CaptionFeatures:
        """Return no features."""
        return {}


class ProcessedDataset(Dataset[Any]):
    """The samples of a data-process task in the order of the original dataset, to train on.

    ``folder`` may be the URL of a copy with shards: they are fetched when they are used, into ``stream_cache_dir``, of
    at most ``stream_cache_gb``; the setting `shuffle_window` limits how many are in use. A file is hashed when it is
    first opened. Samples with the same ``bucket_of(index)`` may share a batch. ``load_from_cache``: the samples are
    what a custom forward returned, its ``inputs`` in the second stage; they have no ``shards``. Samples are views of
    ``resident``, if the shards were read into memory.
    """

    def __init__(
        self, folder: str | Path, stream_cache_dir: str | Path | None = None, stream_cache_gb: float = 50.0
    ) -> None:
        self.folder: Path | str = str(folder).rstrip("/") if is_url(str(folder)) else Path(folder)
        self.shards: CachedDataset | None = None
        self.resident: ResidentCache | None = None
        self._verified: set[str] = set()
        self.sides: Sides | None = None
        files = self._sample_files()
        self.load_from_cache = files is not None
        try:
            if files is not None:
                self._open_files(files)
            else:
                fetched = None if stream_cache_dir is None else Path(stream_cache_dir)
                self._open_shards(fetched, int(stream_cache_gb * 1e9))
        except (LookupError, TypeError, ValueError, OSError, pa.ArrowException) as error:
            raise UserError(f"{self.folder}/{MANIFEST} is damaged ({error!r}); {_AGAIN}") from error

    def _sample_files(self) -> dict[str, Any] | None:
        """Return the manifest of sample files; None if there are shards."""
        if isinstance(self.folder, str):
            return None
        path = self.folder / MANIFEST
        if not path.is_file():
            raise UserError(f"no processed data in {self.folder}; run launch_data_process_task first")
        try:
            content = read_json_file(path, INDEX_BYTES)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); {_AGAIN}") from error
        return content if isinstance(content, dict) and content.get("kind") == _KIND else None

    def _open_files(self, content: dict[str, Any]) -> None:
        if content["format"] != _FORMAT:
            raise UserError(f"{self.folder} has processed data of another version; {_AGAIN}")
        self.identity = dict(content["recipe"])
        self._hashes = {str(sample["file"]): str(sample["sha256"]) for sample in content["samples"]}
        self._samples = [(str(sample["bucket"]), str(sample["file"]), 0, "{}") for sample in content["samples"]]
        if not all(is_inner_path(file) for file in self._hashes):
            raise ValueError("a sample is in another folder")
        if "sides" in content:
            self.sides = parse_sides(content["sides"], len(self._samples))

    def _open_shards(self, fetched: Path | None, limit_bytes: int) -> None:
        try:
            self.shards = _TaskShards(open_store(self.folder, fetched, limit_bytes), Launch.detect().world_size > 1)
        except UserError as error:
            raise UserError(f"{error}; of a task: {_AGAIN}") if isinstance(self.folder, Path) else error from error
        table = self._table()
        table.validate(full=True)
        self.identity = dict(self.shards.manifest.recipe)
        self._entries = {entry.file: entry for entry in self.shards.manifest.shards}
        self._places = {
            entry.file: (number, segment)
            for number, bucket in enumerate(self.shards.buckets)
            for segment, entry in enumerate(bucket.shards)
        }
        columns = (table[name].to_pylist() for name in ("bucket", "shard", "row", "values"))
        self._samples = list(zip(*columns, strict=True))
        if "side" in table.column_names:
            self.sides = parse_sides(table["side"].to_pylist(), len(self._samples))
        for _, file, row, _ in self._samples:
            if not 0 <= row < self._entries[file].count:
                raise ValueError(f"row {row} of {file}")

    def _table(self) -> pa.Table:
        if isinstance(self.folder, str):
            data = with_retries(f"{self.folder}/{SAMPLES_FILE}", lambda files, path: files.cat_file(path))
            return feather.read_table(pa.BufferReader(data))
        path = self.folder / SAMPLES_FILE
        if not path.is_file():
            raise UserError(f"{self.folder} holds a cache, and no processed data of a task; {_AGAIN}")
        require_regular(path)
        return feather.read_table(path, memory_map=False)

    def __len__(self) -> int:
        return len(self._samples)

    def bucket_of(self, index: int) -> str:
        """Return the bucket in which the sample was processed."""
        return self._samples[index][0]

    def segment_of(self, index: int) -> str:
        """Return the shard of a sample: with `shuffle_window` neighbouring steps read few of them."""
        return self._samples[index][1]

    def prefetch(self, index: int) -> None:
        """Fetch and hash the shard of a sample in the background."""
        if self.shards is not None and self.resident is None:
            number, segment = self._places[self.segment_of(index)]
            self.shards.prefetch(number, [segment])

    def __getitem__(self, index: int) -> Any:
        _, file, row, values = self._samples[index]
        if self.shards is None:
            return self._read_file(file)
        return {**self._tensors(file, row), **json.loads(values)}

    def _read_file(self, file: str) -> Any:
        path = Path(self.folder) / file
        if file not in self._verified:
            if not path.is_file() or file_sha256(path) != self._hashes[file]:
                raise _damaged(path)
            self._verified.add(file)
        return read_sample_file(path)

    def _tensors(self, file: str, row: int) -> dict[str, Tensor]:
        assert self.shards is not None
        number, segment = self._places[file]
        if self.resident is not None:
            bucket = self.resident.buckets[number]
            return _resident_row(bucket, int(bucket.first_sample[segment]) + row)
        try:
            (reader,) = self.shards.readers([self._entries[file]])
        except UserError as error:
            raise _damaged(self.folder / SHARDS / file) if isinstance(self.folder, Path) else error from error
        return read_row(reader, row)


def _resident_row(bucket: ResidentBucket, number: int) -> dict[str, Tensor]:
    """Return the tensors of a sample, as `read_row` does, without a copy."""
    stored = {name: table[number] for name, table in bucket.images.items()}
    for name, rows in bucket.text.tokens.items():
        first, end = bucket.text.starts[name][number : number + 2].tolist()
        stored[name] = rows[first:end]
    return {name.removeprefix(_OWN): value for name, value in stored.items()}


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is missing or damaged; delete it and run the data process again")
