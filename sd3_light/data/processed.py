"""What a data-process task leaves: shards of named tensors in the cache's way (law 3), and a view for people.

    manifest.json                      what made it, and the list of shards
    shards/PPPPP-NNNNN.safetensors     samples of one bucket: NAME -> [n, ...], and `data_id`; a hash in its .json
    shards/PPPPP-NNNNN.arrow           each sample's fingerprint and its values that are no tensors, as JSON
    P/ID.json                          process P made sample ID: its shard and row, names, shapes, fingerprint

Shards are immutable and appear by rename. A process that is started again keeps what it has with the same fingerprint.
"""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.files import atomic_file, file_sha256, write_atomically

PROCESSED_FORMAT = 1
MANIFEST, SHARDS = "manifest.json", "shards"
_ID = "data_id"


@dataclass(frozen=True)
class ProcessedSample:
    """One sample: its index in the user's data set, what may share a batch with it, and what was computed."""

    data_id: int
    bucket: str
    fingerprint: str
    values: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The values that are tensors, in host memory."""
        found = {name: value for name, value in self.values.items() if isinstance(value, Tensor)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}

    @property
    def plain(self) -> dict[str, Any]:
        """The others, which JSON must know."""
        return {name: value for name, value in self.values.items() if not isinstance(value, Tensor)}

    def layout(self) -> Hashable:
        """Samples of one layout fit one shard."""
        return self.bucket, tuple((name, tuple(one.shape), str(one.dtype)) for name, one in self.tensors.items())


def fingerprint(value: Any) -> str:
    """A hash of what a data set gave: tensors and arrays by their bytes, pictures by their pixels, the rest by JSON."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):  # arrays and pictures
        digest.update(f"{getattr(value, 'size', '')}{getattr(value, 'mode', '')}".encode())
        digest.update(value.tobytes())
    else:
        digest.update(json.dumps(value, sort_keys=True, default=str).encode())


class ProcessedWriter:
    """Writes the samples of one process, a shard of ``shard_size`` at a time."""

    def __init__(self, folder: Path, process: int, shard_size: int = 256) -> None:
        self.folder, self.process, self.shard_size = folder, process, shard_size
        self._waiting: dict[Hashable, list[ProcessedSample]] = {}
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        (folder / str(process)).mkdir(exist_ok=True)
        self.known = self._whole_before()
        self._next = 1 + max((int(path.stem.split("-")[1]) for path in self._own()), default=-1)

    def _own(self) -> list[Path]:
        return sorted((self.folder / SHARDS).glob(f"{self.process:05d}-*.json"))

    def _whole_before(self) -> dict[int, str]:
        """data_id -> fingerprint of what an earlier start of this process has written."""
        found = {}
        for path in (self.folder / str(self.process)).glob("*.json"):
            try:
                view = json.loads(path.read_text(encoding="utf-8"))
                shard, made_of = self.folder / view["shard"], view["fingerprint"]
            except (ValueError, LookupError, TypeError):  # damaged: computed again
                continue
            if shard.is_file():
                found[int(path.stem)] = made_of
        return found

    def add(self, sample: ProcessedSample) -> None:
        """One more sample; full shards are written at once."""
        row = self._waiting.setdefault(sample.layout(), [])
        row.append(sample)
        if len(row) >= self.shard_size:
            self._write(self._waiting.pop(sample.layout()))

    def close(self) -> None:
        """Write what waits."""
        for layout in list(self._waiting):
            self._write(self._waiting.pop(layout))

    def _write(self, samples: Sequence[ProcessedSample]) -> None:
        file = f"{SHARDS}/{self.process:05d}-{self._next:05d}.safetensors"
        self._next += 1
        path = self.folder / file
        columns = {name: torch.stack([one.tensors[name] for one in samples]) for name in samples[0].tensors}
        columns[_ID] = torch.tensor([one.data_id for one in samples])
        with atomic_file(path) as temporary:
            try:
                save_file(columns, temporary, {"bucket": samples[0].bucket})
            except SafetensorError as error:
                raise OSError(0, str(error)) from error
            entry = {"file": file, "bucket": samples[0].bucket, "count": len(samples)}
            entry |= {"bytes": temporary.stat().st_size, "sha256": file_sha256(temporary)}
            write_atomically(path.with_suffix(".arrow"), _rows(samples))
            write_atomically(path.with_suffix(".json"), json.dumps(entry).encode())
        for row, one in enumerate(samples):
            self._show(file, row, one)

    def _show(self, file: str, row: int, sample: ProcessedSample) -> None:
        """The view of one sample, written after its shard."""
        names = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in sample.tensors.items()}
        view = {"shard": file, "row": row, "fingerprint": sample.fingerprint, "bucket": sample.bucket}
        text = json.dumps({**view, "tensors": names, "values": sample.plain}, ensure_ascii=False, indent=1)
        write_atomically(self.folder / str(self.process) / f"{sample.data_id}.json", text.encode())


def _rows(samples: Sequence[ProcessedSample]) -> bytes:
    table = pa.table(
        {
            _ID: [one.data_id for one in samples],
            "fingerprint": [one.fingerprint for one in samples],
            "values": [json.dumps(one.plain, ensure_ascii=False) for one in samples],
        }
    )
    sink = pa.BufferOutputStream()
    feather.write_feather(table, sink, compression="uncompressed")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def write_processed_manifest(folder: Path, recipe: Mapping[str, Any], count: int) -> None:
    """Write the manifest when all processes are done: the views say which rows hold the samples now."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / SHARDS).glob("*.json"))]
    where: dict[int, tuple[str, int]] = {}
    for path in sorted(folder.glob("[0-9]*/*.json")):
        view = json.loads(path.read_text(encoding="utf-8"))
        if int(path.stem) < count:
            where[int(path.stem)] = (view["shard"], view["row"])
    if missing := sorted(set(range(count)) - where.keys()):
        raise UserError(f"{folder} lacks {len(missing)} samples, such as {missing[0]}; run the data process again")
    used = {file for file, _ in where.values()}
    shards = [entry for entry in entries if entry["file"] in used]
    samples = [list(where[number]) for number in range(count)]
    found = {
        "format": PROCESSED_FORMAT,
        "kind": "processed",
        "recipe": dict(recipe),
        "shards": shards,
        "samples": samples,
    }
    write_atomically(folder / MANIFEST, json.dumps(found, ensure_ascii=False).encode())


class ProcessedDataset(Dataset[Any]):
    """The samples of a data-process task, in the order of the data set that they were made of: the second stage's data.

    Shards are hashed when they are first opened. ``bucket_of(index)`` says which samples may share a batch.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{self.folder} holds no processed data; run launch_data_process_task first")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); run launch_data_process_task again") from error
        if not isinstance(found, dict) or (found.get("kind"), found.get("format")) != ("processed", PROCESSED_FORMAT):
            raise UserError(f"{path} is no manifest of processed data of format {PROCESSED_FORMAT}; make it anew")
        self.recipe: dict[str, Any] = found["recipe"]
        self._entries = {entry["file"]: entry for entry in found["shards"]}
        self._samples: list[tuple[str, int]] = [(file, row) for file, row in found["samples"]]
        self._open: dict[str, tuple[dict[str, Tensor], list[dict[str, Any]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._samples)

    def bucket_of(self, index: int) -> str:
        """The bucket that the sample had when it was processed."""
        bucket: str = self._entries[self._samples[index][0]]["bucket"]
        return bucket

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, row = self._samples[index]
        columns, plain = self._shard(file)
        return {**{name: column[row] for name, column in columns.items()}, **plain[row]}

    def _shard(self, file: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file() or file_sha256(path) != self._entries[file]["sha256"]:
                raise UserError(f"{path} is missing or damaged; run the data process again without it")
            with safe_open(path, framework="pt") as opened:
                columns = {name: opened.get_tensor(name) for name in opened.keys() if name != _ID}  # noqa: SIM118
            rows = feather.read_table(path.with_suffix(".arrow"), memory_map=False).to_pylist()
            self._open[file] = columns, [json.loads(row["values"]) for row in rows]
        return self._open[file]
