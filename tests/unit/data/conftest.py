"""A toy cache: shards whose tensors say which sample, variant and caption they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sd3_light.data.shards import Manifest, Origin, Sample, ShardEntry, write_shard
from sd3_light.data.stream import CachedDataset

WIDTHS = {"clip_l": (3, 4), "clip_g": (3, 6), "t5": (2, 12)}


def features(sample: int, caption: int) -> dict[str, torch.Tensor]:
    """Tokens and pooled vectors that carry the sample in their first place and the caption in their second."""

    def mark(*shape: int) -> torch.Tensor:
        values = torch.zeros(shape)
        values[..., 0], values[..., 1] = sample, caption
        return values

    tokens = {name: mark(*shape) for name, shape in WIDTHS.items()}
    return {**tokens, "clip_l.pooled": mark(4), "clip_g.pooled": mark(6)}


def toy_sample(number: int, captions: int = 1, variants: int = 1, mask: bool = False) -> Sample:
    """Sample ``number``: moments hold 10 number + variant, the mask is white on the left only."""
    moments = torch.stack([torch.full((4, 2, 4), 10.0 * number + variant) for variant in range(variants)])
    left = torch.tensor([[255, 255, 0, 0]] * 2, dtype=torch.uint8)
    return Sample(number, moments, [features(number, at) for at in range(captions)], left if mask else None)


def toy_shard(folder: Path, name: str, samples: list[Sample], bucket: str = "32x16", directory: int = 0) -> ShardEntry:
    """Write one shard below ``folder``; its entry."""
    shards = folder / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    entry = ShardEntry(f"{name}.safetensors", bucket, (32, 16), directory, 0, 0, "", name)
    origins = [Origin(f"key/{sample.sample_id}", "f", 32, 16, ("a caption",)) for sample in samples]
    return write_shard(shards, entry, samples, origins)


def toy_cache(
    folder: Path,
    sizes: tuple[int, ...] = (5, 3, 4),
    buckets: tuple[str, ...] | None = None,
    directories: tuple[int, ...] | None = None,
    captions: int = 1,
    variants: int = 1,
    mask: bool = False,
) -> CachedDataset:
    """Shards of ``sizes`` samples with ids from 1 on, each in its bucket and directory."""
    entries, first = [], 1
    for at, size in enumerate(sizes):
        samples = [toy_sample(number, captions, variants, mask) for number in range(first, first + size)]
        bucket = buckets[at] if buckets else "32x16"
        directory = directories[at] if directories else 0
        entries.append(toy_shard(folder, f"{directory:03d}-{bucket}-{at:05d}", samples, bucket, directory))
        first += size
    empty = toy_shard(folder, "empty", [toy_sample(0)], "empty", -1)
    Manifest({"t5_max_length": 2}, tuple(entries), empty, {"used": sum(sizes)}).save(folder)
    return CachedDataset(folder, Manifest.load(folder))


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return toy_sample


@pytest.fixture
def make_shard() -> Callable[..., ShardEntry]:
    return toy_shard


@pytest.fixture
def make_cache(tmp_path: Path) -> Callable[..., CachedDataset]:
    """`toy_cache` in the test's folder."""

    def make(**keys: object) -> CachedDataset:
        return toy_cache(tmp_path / "cache", **keys)  # type: ignore[arg-type]

    return make
