"""The output of a data-process task: immutable shards of named tensors (law 3), and a JSON view per sample.

    manifest.json                      the recipe and the list of shards
    shards/PPPPP-NNNNN.safetensors     samples of one bucket: NAME -> [n, ...], and `data_id`; its hash is in the .json
    shards/PPPPP-NNNNN.arrow           fingerprint and non-tensor values (as JSON) of each sample
    P/ID.json                          shard, row, names, shapes and fingerprint of sample ID of process P
    P/ID.pth                           instead of a shard, what a module's own forward returned (`sample_files.py`)

Shards are written atomically. A process that is started again keeps samples whose fingerprint has not changed.
"""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.feather as feather
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, SHARDS
from sd3_light.data.shards import write_files
from sd3_light.files import atomic_file, file_sha256, sweep_files, write_atomically
from sd3_light.inputs import INDEX_BYTES, is_inner_path, read_json_file, require_regular
from sd3_light.tasks.sample_files import SAMPLE_SUFFIX, read_sample_file, write_sample_file

PROCESSED_FORMAT = 1
_ID = "data_id"
_KIND = "processed"


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

    def layout(self) -> Hashable:
        """Return a key that is equal for samples that fit one shard."""
        return self.bucket, tuple((name, tuple(t.shape), str(t.dtype)) for name, t in self.tensors.items())


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


class ProcessedWriter:
    """Writes the samples of one process in shards of ``shard_size``."""

    def __init__(self, folder: Path, process: int, shard_size: int = 256) -> None:
        self.folder, self.process, self.shard_size = folder, process, shard_size
        self._pending: dict[Hashable, list[ProcessedSample]] = {}
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        (folder / str(process)).mkdir(exist_ok=True)
        self._others = [path for path in folder.glob("[0-9]*") if path.is_dir() and path.name != str(process)]
        self.known = self._existing()
        entries = (folder / SHARDS).glob(f"{process:05d}-*.json")
        self._next = 1 + max((int(path.stem.split("-")[1]) for path in entries), default=-1)

    def _existing(self) -> dict[int, str]:
        """Return data_id -> fingerprint of the samples that any process wrote in earlier runs."""
        existing: dict[int, str] = {}
        for path in sorted(self.folder.glob("[0-9]*/*.json")):  # of several views the manifest uses the last
            existing.pop(int(path.stem), None)
            try:
                view = read_json_file(path)
                shard, known = self.folder / view["shard"], view["fingerprint"]
            except (OSError, ValueError, LookupError, TypeError):  # damaged, or being replaced: computed again
                continue
            if shard.is_file():
                existing[int(path.stem)] = known
        return existing

    def add(self, sample: ProcessedSample) -> None:
        """Add a sample; a full shard is written immediately."""
        samples = self._pending.setdefault(sample.layout(), [])
        samples.append(sample)
        if len(samples) >= self.shard_size:
            self._write(self._pending.pop(sample.layout()))

    def close(self) -> None:
        """Write the remaining samples."""
        for layout in list(self._pending):
            self._write(self._pending.pop(layout))

    def _write(self, samples: Sequence[ProcessedSample]) -> None:
        file = f"{SHARDS}/{self.process:05d}-{self._next:05d}.safetensors"
        self._next += 1
        columns = {name: torch.stack([sample.tensors[name] for sample in samples]) for name in samples[0].tensors}
        columns[_ID] = torch.tensor([sample.data_id for sample in samples])
        rows = {
            _ID: [sample.data_id for sample in samples],
            "fingerprint": [sample.fingerprint for sample in samples],
            "values": [json.dumps(sample.plain, ensure_ascii=False) for sample in samples],
        }
        entry = {"file": file, "bucket": samples[0].bucket, "count": len(samples)}
        write_files(self.folder / file, columns, {"bucket": samples[0].bucket}, rows, entry)
        for row, sample in enumerate(samples):
            self._write_view(file, row, sample)

    def _write_view(self, file: str, row: int, sample: ProcessedSample) -> None:
        """Write the JSON view of one sample, after its shard."""
        names = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in sample.tensors.items()}
        view = {"shard": file, "row": row, "fingerprint": sample.fingerprint, "bucket": sample.bucket}
        text = json.dumps({**view, "tensors": names, "values": sample.plain}, ensure_ascii=False, indent=1)
        write_atomically(self.folder / str(self.process) / f"{sample.data_id}.json", text.encode())
        self._remove_older(sample.data_id)

    def _remove_older(self, data_id: int) -> None:
        """Remove what another process wrote for the sample when there was another number of processes."""
        for folder in self._others:
            for suffix in (".json", SAMPLE_SUFFIX):
                (folder / f"{data_id}{suffix}").unlink(missing_ok=True)


class SampleFileWriter(ProcessedWriter):
    """Writes the samples of one process in one file each; their values are any that `storable` returns."""

    def add(self, sample: ProcessedSample) -> None:
        """Write the sample and its JSON view."""
        file = f"{self.process}/{sample.data_id}{SAMPLE_SUFFIX}"
        path = self.folder / file
        view: dict[str, Any] = {"shard": file, "row": 0, "fingerprint": sample.fingerprint, "bucket": sample.bucket}
        with atomic_file(path) as temporary:
            write_sample_file(temporary, sample.values)
            view["sha256"] = file_sha256(temporary)
        write_atomically(path.with_suffix(".json"), json.dumps(view, indent=1).encode())
        self._remove_older(sample.data_id)


def write_processed_manifest(folder: Path, recipe: Mapping[str, Any], count: int) -> None:
    """Write the manifest after all processes are done, using the views to find each sample's row."""
    entries = [read_json_file(path) for path in sorted((folder / SHARDS).glob("*.json"))]
    rows: dict[int, tuple[str, int]] = {}
    for path in sorted(folder.glob("[0-9]*/*.json")):
        view = read_json_file(path)
        if int(path.stem) < count:
            rows[int(path.stem)] = (view["shard"], view["row"])
            if "sha256" in view:
                entries.append({"file": view["shard"], "bucket": view["bucket"], "count": 1, "sha256": view["sha256"]})
    if missing := sorted(set(range(count)) - rows.keys()):
        raise UserError(
            f"{folder}: {len(missing)} samples are missing, such as {missing[0]}; run the data process again"
        )
    used = {file for file, _ in rows.values()}
    shards = [entry for entry in entries if entry["file"] in used]
    samples = [list(rows[number]) for number in range(count)]
    manifest = {"format": PROCESSED_FORMAT, "kind": _KIND, "recipe": dict(recipe), "shards": shards, "samples": samples}
    write_atomically(folder / MANIFEST, json.dumps(manifest, ensure_ascii=False).encode())
    for each in (folder, folder / SHARDS, *folder.glob("[0-9]*")):
        sweep_files(each)


class ProcessedDataset(Dataset[Any]):
    """The samples of a data-process task in the order of the original dataset, to train on.

    Shards are hashed when they are first opened. Samples with the same ``bucket_of(index)`` may share a batch.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise UserError(f"no processed data in {self.folder}; run launch_data_process_task first")
        try:
            manifest = read_json_file(path, INDEX_BYTES)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); run launch_data_process_task again") from error
        kind = (manifest.get("kind"), manifest.get("format")) if isinstance(manifest, dict) else None
        if kind != (_KIND, PROCESSED_FORMAT):
            raise UserError(
                f"{path} is not processed data of format {PROCESSED_FORMAT}; run launch_data_process_task again"
            )
        try:
            self.recipe: dict[str, Any] = dict(manifest["recipe"])
            self._entries = {entry["file"]: entry for entry in manifest["shards"] if is_inner_path(entry["file"])}
            self._samples: list[tuple[str, int]] = [(file, int(row)) for file, row in manifest["samples"]]
            for file, _ in self._samples:
                self._entries[file]
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error!r}); run launch_data_process_task again") from error
        self._open: dict[str, tuple[dict[str, Tensor], list[dict[str, Any]]]] = {}
        self._verified: set[str] = set()

    @property
    def load_from_cache(self) -> bool:
        """Whether the samples are what a module's own forward returned: its ``inputs`` in the second stage."""
        return bool(self._samples) and self._samples[0][0].endswith(SAMPLE_SUFFIX)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._samples)

    def bucket_of(self, index: int) -> str:
        """Return the bucket in which the sample was processed."""
        return str(self._entries[self._samples[index][0]]["bucket"])

    def __getitem__(self, index: int) -> Any:
        file, row = self._samples[index]
        if self.load_from_cache:
            return read_sample_file(self._verify(file))
        columns, plain = self._shard(file)
        return {**{name: column[row] for name, column in columns.items()}, **plain[row]}

    def _shard(self, file: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        if file not in self._open:
            path = self._verify(file)
            require_regular(path.with_suffix(".arrow"))
            with safe_open(path, framework="pt") as opened:
                columns = {name: opened.get_tensor(name) for name in opened.keys() if name != _ID}  # noqa: SIM118
            rows = feather.read_table(path.with_suffix(".arrow"), memory_map=False).to_pylist()
            self._open[file] = columns, [json.loads(row["values"]) for row in rows]
        return self._open[file]

    def _verify(self, file: str) -> Path:
        """Return the path of a file; when it is first used its hash is compared."""
        path = self.folder / file
        if file not in self._verified:
            if not path.is_file() or file_sha256(path) != self._entries[file]["sha256"]:
                raise UserError(f"{path} is missing or damaged; delete it and run the data process again")
            self._verified.add(file)
        return path
