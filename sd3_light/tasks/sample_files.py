"""Processed samples in one file each, `P/ID.pth`: any structure of tensors, numbers, text and images.

Files are written with `torch.save`, so that other programs can read them. Here they are read with `weights_only=True`.
"""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.inputs import require_regular

SAMPLE_SUFFIX = ".pth"
_PLAIN = (str, bytes, bool, int, float, torch.device, torch.dtype, torch.Size, type(None))


def storable(value: Any, name: str) -> Any:
    """Return a copy of ``value`` in host memory that `read_sample_file` can read; ``name`` is its place, for errors."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)  # a view would save all it is part of
    if isinstance(value, Image.Image):
        return Image.frombytes(value.mode, value.size, value.tobytes())  # without metadata of its file
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {key: storable(member, f"{name}[{key!r}]") for key, member in value.items()}
    if type(value) in (list, tuple):
        return type(value)(storable(member, f"{name}[{at}]") for at, member in enumerate(value))
    raise UserError(
        f"{name} is a {type(value).__name__}, which cannot be stored; return tensors, numbers, text, images, or dicts "
        "and lists of them"
    )


def read_sample_file(path: Path) -> Any:
    """Return the content of a file; nothing in it is executed."""
    try:
        require_regular(path)
        with torch.serialization.safe_globals([Image.Image]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError) as error:
        raise UserError(f"{path} is not a stored sample; delete it and run the data process again") from error
