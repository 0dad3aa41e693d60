"""Read checkpoints: any part of any tensor, verified by hash, without loading the rest."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light.checkpoint.index import INDEX, Index, IndexEntry, Range, damaged, read_index, wrong_size
from sd3_light.checkpoint.progress import Progress
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece
from sd3_light.inputs import open_regular
from sd3_light.tensor_file import DTYPES, read_tensor_file


def open_checkpoint(path: Path) -> "Checkpoint":
    """Open a checkpoint after checking its index and file sizes; raises a `UserError` if it is not usable."""
    index = read_index(path)
    if problem := wrong_size(path, index.files):
        raise damaged(path, *problem.split(" ", 1))
    for name, entry in index.tensors.items():
        if problem := _range_problem(entry, index.files):
            raise damaged(path, INDEX, f"{name}: {problem}")
        if problem := entry.coverage_error():
            raise UserError(f"checkpoint {path} does not contain {name} exactly once ({problem}); resume from another")
    return Checkpoint(path, index)


def _range_problem(entry: IndexEntry, files: Mapping[str, int]) -> str | None:
    """Return why a tensor cannot be in the files; None if it can."""
    if entry.dtype not in DTYPES:
        return f"unknown dtype {entry.dtype}"
    size = DTYPES[entry.dtype].itemsize
    is_outside = any(size * part.length > files.get(part.file, -1) for part in entry.ranges)
    return "a range is longer than its file" if is_outside else None


class Checkpoint:
    """The tensors and facts of one checkpoint, written by any layout.

    Every range that is read is hashed as a whole. Only the last one stays in memory, so that consecutive pieces read
    it once.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self._index = index
        self._starts = {name: [part.start for part in entry.ranges] for name, entry in index.tensors.items()}
        self._offsets: dict[str, dict[str, int]] = {}
        self._last: tuple[tuple[str, int], Tensor] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What the writer stored besides tensors."""
        return self._index.facts

    @property
    def progress(self) -> Progress:
        """The counters of the run when it was saved."""
        counters = self.table("progress")
        if not counters.keys() <= Progress().as_dict().keys() or not all(type(n) is int for n in counters.values()):
            raise damaged(self.path, INDEX, "its progress is not a table of counters")
        return Progress(**counters)

    def table(self, name: str) -> dict[str, Any]:
        """Return one of the facts, which must be a table."""
        table = self.facts.get(name)
        if not isinstance(table, dict):
            raise damaged(self.path, INDEX, f"its {name} is not a table")
        return table

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by ``KIND/NAME``."""
        return {name: entry.shape for name, entry in self._index.tensors.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of every tensor by ``KIND/NAME``."""
        return {name: DTYPES[entry.dtype].torch for name, entry in self._index.tensors.items()}

    def names(self, kind: str) -> list[str]:
        """Return the sorted NAMEs of one kind."""
        return sorted(name.removeprefix(f"{kind}/") for name in self.shapes if name.startswith(f"{kind}/"))

    def tensor(self, name: str) -> Tensor:
        """Return one full tensor on the host."""
        self._require(name)
        return self.read(name, 0, self._index.tensors[name].count).reshape(self.shapes[name])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of the flat tensor."""
        self._require(name)
        elements = torch.empty(stop - start, dtype=self.dtypes[name])
        for offset, values in self._parts(name, start, stop):
            elements[offset : offset + len(values)] = values
        return elements

    @torch.no_grad()
    def load_into(self, pieces: Iterable[TensorPiece]) -> None:
        """Copy into the pieces' live memory, on their device and in their dtype; replicas are filled too."""
        for piece in pieces:
            self._require(piece.name)
            if self.shapes[piece.name] != piece.shape:
                raise UserError(
                    f"checkpoint {self.path} has {piece.name} of shape {list(self.shapes[piece.name])}, this run has "
                    f"{list(piece.shape)}; it belongs to another model: restore [model] or resume from another"
                )
            for offset, values in self._parts(piece.name, piece.start, piece.start + len(piece.values)):
                piece.values[offset : offset + len(values)].copy_(values)

    def _require(self, name: str) -> None:
        if name not in self.shapes:
            raise UserError(
                f"checkpoint {self.path} has no tensor {name}; it belongs to another model or optimizer: restore the "
                "config that wrote it or resume from another"
            )

    def _parts(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the verified values from start to stop, range by range, each with its offset from start."""
        assert 0 <= start <= stop <= self._index.tensors[name].count, f"{name} has no elements {start} to {stop}"
        ranges = self._index.tensors[name].ranges
        for part in ranges[max(bisect_right(self._starts[name], start) - 1, 0) :]:
            if part.start >= stop:
                return
            first = max(start, part.start)
            last = min(stop, part.start + part.length)
            yield first - start, self._verified(name, part)[first - part.start : last - part.start]

    def _verified(self, name: str, part: Range) -> Tensor:
        if self._last is not None and self._last[0] == (name, part.start):
            return self._last[1]
        path = self.path / part.file
        try:
            if part.file not in self._offsets:
                self._offsets[part.file] = _read_offsets(path)
            offset = self._offsets[part.file].get(f"{name}@{part.start}", -1)
            if offset < 0:
                raise ValueError(f"it lacks {name}@{part.start}")
            values, digest = read_range(path, offset, part.length, self.dtypes[name])
        except (OSError, ValueError) as error:
            raise damaged(self.path, part.file, getattr(error, "strerror", None) or error) from error
        if digest != part.sha256:
            raise damaged(self.path, part.file, f"wrong hash of {name}")
        self._last = ((name, part.start), values)
        return values


def _read_offsets(path: Path) -> dict[str, int]:
    """Return the byte offset of each range. Raises ValueError if the safetensors file is invalid or incomplete."""
    tensors, _ = read_tensor_file(path)
    return {key: tensor.spans[0].start for key, tensor in tensors.items()}


def read_range(path: Path, offset: int, count: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return ``count`` elements from byte ``offset`` on, and their sha256. A truncated file is a ValueError.

    A memory map of such a file would kill the process.
    """
    values = torch.empty(count, dtype=dtype)
    data = tensor_bytes(values)
    done = 0
    with open_regular(path) as file:
        file.seek(offset)
        while done < len(data):
            num_read = file.readinto(data[done:])
            if not num_read:
                raise ValueError("it is truncated")
            done += num_read
    return values, hashlib.sha256(data).hexdigest()


def tensor_bytes(values: Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D tensor on the host."""
    return values.view(torch.uint8).numpy().data
