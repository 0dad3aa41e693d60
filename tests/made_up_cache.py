"""Caches of any family with random values, written without encoders."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.columns import EMPTY, SMALLEST, Bucket, Column, with_pairs
from sd3_light.core.family import Family
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.model.vision import teacher_column

LABEL = "images#0"


def write_cache(
    folder: Path,
    family: Family,
    model: ModelConfig,
    samples: Mapping[Bucket, int],
    masked: bool = False,
    paired: bool = False,
) -> Path:
    """Write a shard per bucket, with two captions per sample; captions of a ragged column have different lengths."""
    generator = torch.Generator().manual_seed(0)
    (folder / SHARDS).mkdir(parents=True)
    first = 1
    entries = []
    for bucket, count in samples.items():
        columns = _columns(family, model, bucket)
        columns = with_pairs(columns) if paired else columns
        content = _content(columns, range(first, first + count), 2, generator, masked)
        entries.append(_write(folder, str(bucket), content))
        first += count
    columns = _columns(family, model, SMALLEST)
    empty = _write(folder, EMPTY, _content(columns, range(1), 1, generator, masked=False))
    Manifest({}, tuple(entries), empty, {"used": first - 1}, {}).save(folder)
    return folder


def _columns(family: Family, model: ModelConfig, bucket: Bucket) -> tuple[Column, ...]:
    columns = family.columns(model, model.diffusers_path, bucket)
    teacher = teacher_column(model, columns)
    return columns if teacher is None else (*columns, teacher)


def _write(folder: Path, bucket: str, content: ShardContent) -> ShardEntry:
    size = (64, 64)
    entry = ShardEntry(f"{bucket}.safetensors", bucket, size, LABEL, 0, 0, "", bucket)
    numbers = content.sample_id.tolist()
    origins = [Origin(f"{LABEL}/{number}.png", "f", *size, ("a dog", "a cat")) for number in numbers]
    return write_shard(folder / SHARDS, entry, content, origins)


def _content(
    columns: Sequence[Column], ids: range, captions: int, generator: torch.Generator, masked: bool
) -> ShardContent:
    count = len(ids)
    values: dict[str, Tensor] = {}
    for column in columns:
        if column.reads == "mask":
            if masked:
                values[column.name] = torch.randint(256, (count, *column.shape), generator=generator).to(torch.uint8)
        elif column.ragged:
            rows = torch.randint(1, column.shape[0] + 1, (captions * count,), generator=generator)
            values[column.tensors[0]] = _normals(column, (int(rows.sum()), *column.row_shape), generator)
            values[column.tensors[1]] = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
        elif column.per_caption:
            values[column.name] = _normals(column, (captions * count, *column.shape), generator)
        elif column.dtype == "int8":
            shape = (count, 1, *column.shape)
            values[column.name] = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        else:
            values[column.name] = 0.5 * _normals(column, (count, 1, *column.shape), generator)
    starts = captions * torch.arange(count + 1)
    return ShardContent(columns, torch.tensor(list(ids)), starts, torch.arange(captions * count), values)


def _normals(column: Column, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(getattr(torch, column.dtype))
