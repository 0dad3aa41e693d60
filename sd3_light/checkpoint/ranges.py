"""One rank's file: a plain safetensors file, written and read one range at a time.

The safetensors library can read it too. Here each range is hashed and written in one pass from its own memory, without
the copies that some versions of the library make; and a truncated file is a readable error, where a memory map would
kill the process.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sd3_light.tensor_file import DTYPE_NAMES, header_bytes, read_tensor_file


def write_ranges(path: Path, ranges: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Write 1-D tensors from any device, flush them to disk, and return their sha256 hashes. Errors name the file."""
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
        error.filename = error.filename or str(path)  # a failed write does not set the file name
        raise
    return hashes


def read_offsets(path: Path) -> dict[str, int]:
    """Return the byte offset of each range. Raises ValueError if the safetensors file is invalid or incomplete."""
    tensors, _ = read_tensor_file(path)
    return {key: tensor.spans[0].start for key, tensor in tensors.items()}


def read_range(path: Path, offset: int, count: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return ``count`` elements from byte ``offset`` on, and their sha256. A truncated file is a ValueError."""
    values = torch.empty(count, dtype=dtype)
    data, done = _bytes(values), 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while done < len(data):
            num_read = file.readinto(data[done:])
            if not num_read:
                raise ValueError("it is truncated")
            done += num_read
    return values, hashlib.sha256(data).hexdigest()


def _bytes(values: Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D tensor on the host."""
    return values.view(torch.uint8).numpy().data
