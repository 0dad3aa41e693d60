"""One rank's file: a plain safetensors file, written and read one range at a time.

The library could write and read it too. Here each range is hashed and written in one pass out of the memory in which it
lies, whatever the library's version copies; and a file that cannot be read to its end is an error that people can
read, where a memory map of it would kill the process.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors spells them


def write_ranges(path: Path, ranges: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Write 1-D tensors of any device, flushed to the disk; the sha256 of each. A fault names the file."""
    hashes = []
    try:
        with open(path, "wb") as file:
            file.write(_header(ranges))
            for _, values in ranges:
                data = _bytes(values.detach().cpu().contiguous())
                hashes.append(hashlib.sha256(data).hexdigest())
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a failing write does not know its file
        raise
    return hashes


def _header(ranges: Sequence[tuple[str, Tensor]]) -> bytes:
    entries, offset = {}, 0
    for key, values in ranges:
        assert key not in entries, f"{key} is written twice by one rank"
        end = offset + values.nbytes
        entries[key] = {"dtype": DTYPE_NAMES[values.dtype], "shape": [len(values)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin on a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def read_offsets(path: Path) -> dict[str, int]:
    """Where each range's bytes begin in the file. A file that is no safetensors file is a ValueError."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError("its header does not end")
        entries = json.loads(file.read(length))
    try:
        return {key: 8 + length + entry["data_offsets"][0] for key, entry in entries.items()}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("its header is no safetensors header") from error


def read_range(path: Path, offset: int, count: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    """``count`` elements from byte ``offset`` on, and their sha256. A file that ends too early is a ValueError."""
    values = torch.empty(count, dtype=dtype)
    data, done = _bytes(values), 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while done < len(data):
            found = file.readinto(data[done:])
            if not found:
                raise ValueError("it ends too early")
            done += found
    return values, hashlib.sha256(data).hexdigest()


def _bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the host."""
    return values.view(torch.uint8).numpy().data
