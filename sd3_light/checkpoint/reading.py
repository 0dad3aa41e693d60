"""A checkpoint opened for reading: any part of any tensor, verified by hash, without holding the rest."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light.checkpoint.index import Index, Range, damaged, read_index, wrong_size
from sd3_light.checkpoint.ranges import DTYPES, read_offsets, read_range
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece


def open_checkpoint(path: Path) -> "Checkpoint":
    """Read the index and look at the files' sizes. What is not a whole checkpoint of this format is a `UserError`."""
    index = read_index(path)
    if fault := wrong_size(path, index.files):
        raise damaged(path, *fault.split(" ", 1))
    for name, entry in index.tensors.items():
        if fault := entry.fault():
            raise UserError(f"checkpoint {path} does not hold {name} exactly once ({fault}); resume from another")
    return Checkpoint(path, index)


class Checkpoint:
    """The tensors and facts of one checkpoint, whatever layout wrote it.

    Every range that a read touches is hashed whole; the last one is kept, so that pieces that follow each other read
    it once. Nothing else stays in memory.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self._index = index
        self._starts = {name: [held.start for held in entry.ranges] for name, entry in index.tensors.items()}
        self._offsets: dict[str, dict[str, int]] = {}
        self._last: tuple[tuple[str, int], Tensor] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What the writer said besides tensors."""
        return self._index.facts

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by ``KIND/NAME``."""
        return {name: entry.shape for name, entry in self._index.tensors.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of every tensor by ``KIND/NAME``."""
        return {name: DTYPES[entry.dtype] for name, entry in self._index.tensors.items()}

    def names(self, kind: str) -> list[str]:
        """The NAMEs of one kind, sorted."""
        return sorted(name.removeprefix(f"{kind}/") for name in self.shapes if name.startswith(f"{kind}/"))

    def tensor(self, name: str) -> Tensor:
        """One tensor, whole and shaped, on the host."""
        self._require(name)
        return self.read(name, 0, self._index.tensors[name].count).reshape(self.shapes[name])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flat tensor."""
        self._require(name)
        found = torch.empty(stop - start, dtype=self.dtypes[name])
        for at, values in self._parts(name, start, stop):
            found[at : at + len(values)] = values
        return found

    @torch.no_grad()
    def load_into(self, pieces: Iterable[TensorPiece]) -> None:
        """Copy into the pieces' live memory, of their device and dtype; replicas are filled like any other piece."""
        for piece in pieces:
            self._require(piece.name)
            if self.shapes[piece.name] != tuple(piece.shape):
                raise UserError(
                    f"checkpoint {self.path} holds {piece.name} of shape {list(self.shapes[piece.name])}, this run has "
                    f"{list(piece.shape)}; it is of another model: restore [model] or resume from another"
                )
            for at, values in self._parts(piece.name, piece.start, piece.start + len(piece.values)):
                piece.values[at : at + len(values)].copy_(values)

    def _require(self, name: str) -> None:
        if name not in self.shapes:
            raise UserError(
                f"checkpoint {self.path} has no tensor {name}; it is of another model or optimizer: restore the config "
                "that wrote it or resume from another"
            )

    def _parts(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The verified values from start to stop, range by range, each with its place in them."""
        assert 0 <= start <= stop <= self._index.tensors[name].count, f"{name} has no elements {start} to {stop}"
        ranges = self._index.tensors[name].ranges
        for held in ranges[max(bisect_right(self._starts[name], start) - 1, 0) :]:
            if held.start >= stop:
                return
            first, last = max(start, held.start), min(stop, held.start + held.length)
            yield first - start, self._verified(name, held)[first - held.start : last - held.start]

    def _verified(self, name: str, held: Range) -> Tensor:
        if self._last is not None and self._last[0] == (name, held.start):
            return self._last[1]
        path = self.path / held.file
        try:
            if held.file not in self._offsets:
                self._offsets[held.file] = read_offsets(path)
            offset = self._offsets[held.file].get(f"{name}@{held.start}", -1)
            if offset < 0:
                raise ValueError(f"it lacks {name}@{held.start}")
            values, digest = read_range(path, offset, held.length, self.dtypes[name])
        except (OSError, ValueError) as error:
            raise damaged(self.path, held.file, getattr(error, "strerror", None) or error) from error
        if digest != held.sha256:
            raise damaged(self.path, held.file, f"wrong hash of {name}")
        self._last = ((name, held.start), values)
        return values
