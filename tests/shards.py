"""Contents of shards for tests."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sd3_light.core.columns import CAPTION, MASK, Column
from sd3_light.data.shards import ShardContent


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file and its values."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def caption_columns(text: Mapping[str, Tensor]) -> list[Column]:
    """Return the columns of caption tensors named as in a shard: ragged ones first."""
    ragged, fixed = list[Column](), list[Column]()
    for name, tensor in text.items():
        base, _, kind = name.rpartition(".")
        if kind == "tokens":
            longest = int(text[f"{base}.start"].diff().max())
            ragged.append(Column(base, CAPTION, dtype_name(tensor), (longest, *tensor.shape[1:]), (), ragged=True))
        elif kind != "start":
            fixed.append(Column(name, CAPTION, dtype_name(tensor), tuple(tensor.shape[1:]), ()))
    return [*ragged, *fixed]


def sd3_content(
    sample_id: Tensor,
    moments: Tensor,
    caption_start: Tensor,
    caption: Tensor,
    text: Mapping[str, Tensor],
    mask: Tensor | None = None,
) -> ShardContent:
    """Return the content of a shard with moments [n, v, 2C, h, w], which declares the tensors that it has."""
    columns = [Column("moments", "image", dtype_name(moments), tuple(moments.shape[2:]), ())]
    columns.append(Column("mask", MASK, "uint8", tuple(moments.shape[3:]), ()))
    values = {"moments": moments, **text} | ({} if mask is None else {"mask": mask})
    return ShardContent([*columns, *caption_columns(text)], sample_id, caption_start, caption, values)
