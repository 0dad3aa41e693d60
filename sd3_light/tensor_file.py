"""The safetensors format: one header parser, and tensors that are rearranged on disk without loading them.

The rows of a tensor are contiguous in a file. Joining tensors by rows, slicing rows and swapping halves therefore only
changes which bytes follow which: a model of any size is rearranged bit for bit in any dtype, one chunk at a time.
The safetensors library writes only tensors that are in memory; the files written here are byte for byte the same.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from sd3_light.config.faults import UserError
from sd3_light.inputs import open_regular, parse_json

if TYPE_CHECKING:  # headers are read without torch, whose import takes seconds
    import torch
    from torch import Tensor

TENSOR_CHUNK_BYTES = 1 << 24


class Dtype(NamedTuple):
    """A number format: its name in torch, and its size in bytes."""

    torch_name: str
    itemsize: int

    @property
    def torch(self) -> "torch.dtype":
        """The dtype in torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.torch_name)
        return dtype


DTYPES = {  # in the library's order of writing: the widest first, so every tensor is aligned to its item size
    "I64": Dtype("int64", 8),
    "F64": Dtype("float64", 8),
    "F32": Dtype("float32", 4),
    "I32": Dtype("int32", 4),
    "BF16": Dtype("bfloat16", 2),
    "F16": Dtype("float16", 2),
    "I16": Dtype("int16", 2),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
    "I8": Dtype("int8", 1),
    "U8": Dtype("uint8", 1),
    "BOOL": Dtype("bool", 1),
}
_NAMES = {f"torch.{dtype.torch_name}": name for name, dtype in DTYPES.items()}
METADATA_KEY = "sd3_light"
"""The metadata entry of files that we write from which they are read back."""
HASH_KEY = "modelspec.hash_sha256"
"""The metadata entry with the hash of a file's values, for other programs."""
_ORDER = {name: index for index, name in enumerate(DTYPES)}
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # the library's limit
MAX_DIMENSIONS = 64
"""torch's limit; the time of many operations grows with the square of the dimensions."""


class Header(NamedTuple):
    """A parsed header: tensor name -> {"dtype", "shape", "data_offsets"}, the metadata, and where the values start."""

    entries: dict[str, Any]
    metadata: dict[str, str]
    start: int


def read_header(file: BinaryIO) -> Header:
    """Parse the header of an open safetensors file; a ValueError says what is wrong. The entries are not checked."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError("its header is longer than the file")
    entries = parse_json(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is not a safetensors header")
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not a table of strings")
    return Header(entries, metadata, 8 + length)


def check_header(path: Path) -> None:
    """Raise an OSError or a ValueError unless a file begins as a safetensors file: the library maps all of it."""
    with open_regular(path) as file:
        read_header(file)


def header_bytes(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the start of a safetensors file whose values follow in this order; a tensor is (name, dtype, shape)."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        assert name not in entries, f"{name} is written twice"
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Span:
    """A range of bytes in a file or in memory, or zeros (``source`` None)."""

    source: Path | bytes | None
    start: int
    size: int

    def cut(self, begin: int, end: int) -> "Span":
        """Return the bytes from ``begin`` to before ``end``, clipped to this span."""
        begin = max(begin, 0)
        end = min(end, self.size)
        return replace(self, start=self.start + begin, size=max(end - begin, 0))

    def read(self) -> bytes:
        """Read the bytes. A truncated file is a ValueError."""
        if self.source is None:
            return bytes(self.size)
        if isinstance(self.source, bytes):
            return self.source[self.start : self.start + self.size]
        with open_regular(self.source) as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) < self.size:
            raise ValueError("it is truncated")
        return data


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose values are read on demand; ``dtype`` as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def rows(self, begin: int, end: int) -> "StoredTensor":
        """Slice the first dimension."""
        assert 0 <= begin <= end <= self.shape[0], (begin, end, self.shape)
        row = self.nbytes // max(self.shape[0], 1)
        return StoredTensor(self.dtype, (end - begin, *self.shape[1:]), self._cut(begin * row, end * row))

    def split(self, count: int) -> "list[StoredTensor]":
        """Split the rows into ``count`` equal parts."""
        rows = self.shape[0] // count
        assert rows * count == self.shape[0], (count, self.shape)
        return [self.rows(index * rows, (index + 1) * rows) for index in range(count)]

    def reshaped(self, shape: Sequence[int]) -> "StoredTensor":
        """Return the same values in another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self.shape, shape)
        return replace(self, shape=tuple(shape))

    def chunks(self) -> Iterator[bytes]:
        """Read the bytes in order, ``TENSOR_CHUNK_BYTES`` at a time."""
        for begin in range(0, self.nbytes, TENSOR_CHUNK_BYTES):
            pieces = self._cut(begin, min(begin + TENSOR_CHUNK_BYTES, self.nbytes))
            yield pieces[0].read() if len(pieces) == 1 else b"".join(piece.read() for piece in pieces)

    def load(self) -> "Tensor":
        """Load the tensor into memory."""
        import torch

        buffer = bytearray(self.nbytes)
        done = 0
        for chunk in self.chunks():
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)
        dtype = DTYPES[self.dtype].torch
        return (torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)).reshape(self.shape)

    def _cut(self, begin: int, end: int) -> tuple[Span, ...]:
        pieces = []
        offset = 0
        for span in self.spans:
            pieces.append(span.cut(begin - offset, end - offset))
            offset += span.size
        return tuple(piece for piece in pieces if piece.size)


def joined(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Concatenate the rows of tensors."""
    first = tensors[0]
    assert all((tensor.dtype, tensor.shape[1:]) == (first.dtype, first.shape[1:]) for tensor in tensors)
    spans = tuple(span for tensor in tensors for span in tensor.spans)
    return StoredTensor(first.dtype, (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]), spans)


def zeros(dtype: str, shape: Sequence[int]) -> StoredTensor:
    """Return a tensor of zeros that takes no memory."""
    return StoredTensor(dtype, tuple(shape), (Span(None, 0, math.prod(shape) * DTYPES[dtype].itemsize),))


def dtype_name(dtype: "torch.dtype") -> str:
    """Return a dtype's name as safetensors spells it."""
    return _NAMES[str(dtype)]


def stored(tensor: "Tensor") -> StoredTensor:
    """Return an in-memory tensor as a `StoredTensor`."""
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return StoredTensor(dtype_name(tensor.dtype), tuple(tensor.shape), (Span(data, 0, len(data)),))


def same(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors are equal in dtype, shape and every bit."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(left == right for left, right in zip(first.chunks(), second.chunks(), strict=True))


def write_tensor_file(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], hash_key: str | None = None
) -> None:
    """Write a safetensors file in the library's order, metadata sorted by key, and flush it to disk.

    The entry ``hash_key`` of the metadata becomes the sha256 of all values, as "0x" and 64 digits.
    """
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    digest = hashlib.sha256()
    unknown = f"0x{0:064}"
    entries = dict(sorted({**metadata, **({hash_key: unknown} if hash_key else {})}.items()))
    with open(path, "wb") as file:
        header = header_bytes([(name, tensors[name].dtype, tensors[name].shape) for name in names], entries)
        file.write(header)
        for name in names:
            for chunk in tensors[name].chunks():
                file.write(chunk)
                digest.update(chunk)
        if hash_key:
            file.seek(header.index(f'"{hash_key}":"{unknown}"'.encode()) + len(hash_key) + len('"":"'))
            file.write(f"0x{digest.hexdigest()}".encode())
        file.flush()
        os.fsync(file.fileno())


def read_tensor_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a safetensors file, values unread, and its metadata. A damaged file is a ValueError."""
    with open_regular(path) as file:
        entries, metadata, start = read_header(file)
        size = os.fstat(file.fileno()).st_size
    try:
        tensors = {name: _stored(path, start, entry) for name, entry in entries.items()}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("its header is not a safetensors header") from error
    _require_complete(tensors, start, size)
    return tensors, metadata


def open_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Like `read_tensor_file`, for a file that a user names: an unreadable or damaged one is a UserError."""
    try:
        return read_tensor_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; pass a safetensors file") from error
    except ValueError as error:
        raise UserError(f"{path} is not a complete safetensors file ({error}); download or write it again") from error


def _stored(path: Path, start: int, entry: Mapping[str, Any]) -> StoredTensor:
    dtype = entry["dtype"]
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"it contains tensors of type {dtype}")
    valid = all(type(number) is int for number in (*shape, begin, end)) and min(shape, default=0) >= 0
    if not valid or len(shape) > MAX_DIMENSIONS:
        raise ValueError("its header is not a safetensors header")
    return StoredTensor(dtype, tuple(shape), (Span(path, start + begin, end - begin),))


def _require_complete(tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Raise a ValueError unless the tensors fill the file without gaps, each with the bytes that its shape needs."""
    for name, tensor in tensors.items():
        if tensor.spans[0].size != tensor.nbytes:
            raise ValueError(f"{name} has {tensor.spans[0].size} bytes, but its shape needs {tensor.nbytes}")
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].spans[0].start, item[1].nbytes)):
        if tensor.spans[0].start != end:
            raise ValueError(f"{name} does not start where the previous tensor ends")
        end += tensor.nbytes
    if end != size:
        raise ValueError("it is truncated" if size < end else "it has extra bytes after its last tensor")
