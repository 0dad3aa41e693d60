"""Tensors known by where their bytes lie, and safetensors files made of them without holding them in memory.

Rows of a tensor lie one after another in a file. So joining tensors on rows, taking some rows and exchanging halves
only say which bytes follow which: a model of any size is rearranged with a chunk in memory, bit for bit, in any dtype.
The library writes only what is in memory whole. What is written here is what it would write, byte for byte.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 24
METADATA = "__metadata__"

DTYPES = {  # in the library's order of writing: wide ones first, so that each tensor lies on a multiple of its width
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors spells them
_ORDER = {name: place for place, name in enumerate(DTYPES)}


# --- tensors by their bytes -------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Bytes in a row: of a file, of given bytes, or zeros (``source`` None)."""

    source: Path | bytes | None
    start: int
    size: int

    def cut(self, begin: int, end: int) -> "Span":
        """Its bytes from ``begin`` to before ``end``; what lies outside of it is left out."""
        begin, end = max(begin, 0), min(end, self.size)
        return replace(self, start=self.start + begin, size=max(end - begin, 0))

    def read(self) -> bytes:
        """The bytes. A file that ends too early is a ValueError."""
        if self.source is None:
            return bytes(self.size)
        if isinstance(self.source, bytes):
            return self.source[self.start : self.start + self.size]
        with open(self.source, "rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) < self.size:
            raise ValueError("it ends too early")
        return data


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when it is asked for; ``dtype`` as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def rows(self, begin: int, end: int) -> "StoredTensor":
        """Some of its rows (indices of the first dimension)."""
        assert 0 <= begin <= end <= self.shape[0], (begin, end, self.shape)
        row = self.nbytes // max(self.shape[0], 1)
        return StoredTensor(self.dtype, (end - begin, *self.shape[1:]), self._cut(begin * row, end * row))

    def split(self, count: int) -> "list[StoredTensor]":
        """Its rows in ``count`` equal parts."""
        each = self.shape[0] // count
        assert each * count == self.shape[0], (count, self.shape)
        return [self.rows(number * each, (number + 1) * each) for number in range(count)]

    def reshaped(self, shape: Sequence[int]) -> "StoredTensor":
        """The same numbers in another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self.shape, shape)
        return replace(self, shape=tuple(shape))

    def chunks(self) -> Iterator[bytes]:
        """Its bytes in order, ``CHUNK`` at a time, however they lie."""
        for begin in range(0, self.nbytes, CHUNK):
            pieces = self._cut(begin, min(begin + CHUNK, self.nbytes))
            yield pieces[0].read() if len(pieces) == 1 else b"".join(piece.read() for piece in pieces)

    def load(self) -> Tensor:
        """The tensor in memory."""
        buffer, done = bytearray(self.nbytes), 0
        for chunk in self.chunks():
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)
        dtype = DTYPES[self.dtype]
        return (torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)).reshape(self.shape)

    def _cut(self, begin: int, end: int) -> tuple[Span, ...]:
        found, offset = [], 0
        for span in self.spans:
            piece = span.cut(begin - offset, end - offset)
            offset += span.size
            if piece.size:
                found.append(piece)
        return tuple(found)


def joined(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """The rows of all of them, one after another."""
    first = tensors[0]
    assert all((other.dtype, other.shape[1:]) == (first.dtype, first.shape[1:]) for other in tensors)
    spans = tuple(span for tensor in tensors for span in tensor.spans)
    return StoredTensor(first.dtype, (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]), spans)


def zeros(dtype: str, shape: Sequence[int]) -> StoredTensor:
    """A tensor of zeros that takes no memory."""
    return StoredTensor(dtype, tuple(shape), (Span(None, 0, math.prod(shape) * DTYPES[dtype].itemsize),))


def stored(tensor: Tensor) -> StoredTensor:
    """A tensor of memory among stored ones."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return StoredTensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), (Span(data, 0, len(data)),))


def same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(left == right for left, right in zip(one.chunks(), other.chunks(), strict=True))


# --- files ------------------------------------------------------------------------------------


def header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a safetensors file whose values follow in this order; a tensor is (name, dtype, shape).

    The library writes several metadata entries in an order of chance: with one, equal files are equal bytes.
    """
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        assert name not in entries, f"{name} is written twice"
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # values begin on a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def write_tensor_file(path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file of these tensors in the library's order, flushed to the disk."""
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    with open(path, "wb") as file:
        file.write(header([(name, tensors[name].dtype, tensors[name].shape) for name in names], metadata))
        for name in names:
            for chunk in tensors[name].chunks():
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def read_tensor_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata; values are not read. A file that is none, or not whole, is a
    ValueError that says why."""
    entries, first, size = _read_header(path)
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is no table of texts")
    try:
        tensors = {name: _stored(path, first, entry) for name, entry in entries.items()}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("its header is no safetensors header") from error
    _require_whole(tensors, first, size)
    return tensors, metadata


def _require_whole(tensors: Mapping[str, StoredTensor], first: int, size: int) -> None:
    """The tensors follow each other without a gap up to the end of the file, each with the bytes of its shape."""
    for name, tensor in tensors.items():
        if tensor.spans[0].size != tensor.nbytes:
            raise ValueError(f"{name} has {tensor.spans[0].size} bytes, not the {tensor.nbytes} of its shape")
    end = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].spans[0].start, item[1].nbytes)):
        if tensor.spans[0].start != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end += tensor.nbytes
    if end != size:
        raise ValueError("it ends too early" if size < end else "it goes on after its last tensor")


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(entries, where values begin, size of the file)"""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError("its header does not end")
        entries = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is no safetensors header")
    return entries, 8 + length, size


def _stored(path: Path, first: int, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"it holds tensors of type {dtype}")
    return StoredTensor(dtype, tuple(int(side) for side in entry["shape"]), (Span(path, first + begin, end - begin),))
