"""One rank's file: a plain safetensors file, written and read one range at a time.

The library could write and read it too. Here each range is hashed and written in one pass out of the memory in which it
lies, whatever the library's version copies; and a file that cannot be read to its end is an error that people can
read, where a memory map of it would kill the process.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sd3_light.tensor_file import DTYPE_NAMES, DTYPES, header_bytes, read_tensor_file

__all__ = ["DTYPES", "DTYPE_NAMES", "read_offsets", "read_range", "write_ranges"]


def write_ranges(path: Path, ranges: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Write 1-D tensors of any device, flushed to the disk; the sha256 of each. A fault names the file."""
    hashes = []
    try:
        with open(path, "wb") as file:
            file.write(header_bytes([(key, DTYPE_NAMES[values.dtype], [len(values)]) for key, values in ranges]))
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


def read_offsets(path: Path) -> dict[str, int]:
    """Where each range's bytes begin in the file. A file that is no whole safetensors file is a ValueError."""
    tensors, _ = read_tensor_file(path)
    return {key: tensor.spans[0].start for key, tensor in tensors.items()}


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
