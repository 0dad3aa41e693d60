"""A toy cache: shards whose tensors encode their sample, variant and caption."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from tests.shards import sd3_content
from tests.unit.sources.conftest import cache, images, small_parts  # noqa: F401 - fixtures

WIDTHS = {"clip_l": 4, "clip_g": 6, "t5": 12}
PADDED = {"clip_l": 3, "clip_g": 3, "t5": 2}
LABEL = "toy#0"


def token_counts(sample: int, caption: int, real: bool) -> dict[str, int]:
    """Return the tokens per encoder: constant if padded, else by sample and caption."""
    return {"clip_l": 1 + (sample + caption) % 3, "clip_g": 1 + sample % 2, "t5": sample % 4} if real else PADDED


def toy_content(
    numbers: Sequence[int],
    captions: int = 1,
    variants: int = 1,
    mask: bool = False,
    real: bool = False,
    bucket: str = "32x16",
) -> ShardContent:
    """Build samples ``numbers``: moments are 10 number + variant, the mask is white on the left half; every token and
    pooled vector starts with the sample and the caption."""
    count, distinct = len(numbers), [(number, caption) for number in numbers for caption in range(captions)]
    moments = torch.tensor([[10.0 * number + variant for variant in range(variants)] for number in numbers])
    text = {}
    for name, width in WIDTHS.items():
        lengths = [token_counts(*pair, real)[name] for pair in distinct]
        marks = torch.tensor([pair for pair, length in zip(distinct, lengths, strict=True) for _ in range(length)])
        tokens = torch.zeros(sum(lengths), width)
        tokens[:, :2] = marks.reshape(-1, 2)
        text[f"{name}.tokens"] = tokens.bfloat16()
        text[f"{name}.start"] = torch.tensor([0, *lengths]).cumsum(0)
    for name in ("clip_l", "clip_g"):
        pooled = torch.zeros(len(distinct), WIDTHS[name])
        pooled[:, :2] = torch.tensor(distinct)
        text[f"{name}.pooled"] = pooled.bfloat16()
    width, height = (8, 8) if bucket == "empty" else map(int, bucket.split("x"))
    latent = (height // 8, width // 8)
    left = torch.zeros(latent, dtype=torch.uint8)
    left[:, : latent[1] // 2] = 255
    return sd3_content(
        torch.tensor(numbers),
        moments[:, :, None, None, None].expand(-1, -1, 4, *latent).half(),
        torch.arange(count + 1) * captions,
        torch.arange(count * captions),
        text,
        left.expand(count, -1, -1) if mask else None,
    )


def toy_shard(folder: Path, name: str, content: ShardContent, bucket: str = "32x16", label: str = LABEL) -> ShardEntry:
    shards = folder / SHARDS
    shards.mkdir(parents=True, exist_ok=True)
    resolution = (0, 0) if bucket == "empty" else (32, 16)
    entry = ShardEntry(f"{name}.safetensors", bucket, resolution, label, 0, 0, "", name)
    ids = content.sample_id.tolist()
    return write_shard(shards, entry, content, [Origin(f"key/{sample}", "f", 32, 16, ("a caption",)) for sample in ids])


def fake_cache(
    folder: Path,
    sizes: tuple[int, ...] = (5, 3, 4),
    buckets: tuple[str, ...] | None = None,
    directories: tuple[str, ...] | None = None,
    captions: int = 1,
    variants: int = 1,
    mask: bool = False,
    real: bool = False,
) -> Manifest:
    """Write shards of ``sizes`` samples with ids from 1, each with its bucket and directory."""
    entries, first = [], 1
    for number, size in enumerate(sizes):
        bucket = buckets[number] if buckets else "32x16"
        content = toy_content(range(first, first + size), captions, variants, mask, real, bucket)
        directory = directories[number] if directories else LABEL
        entries.append(toy_shard(folder, f"{directory}-{bucket}-{number:05d}", content, bucket, directory))
        first += size
    empty = toy_shard(folder, "empty", toy_content([0], real=real, bucket="empty"), "empty", "")
    recipe = {"t5_max_length": 2, "text_tokens": "real" if real else "padded"}
    manifest = Manifest(recipe, tuple(entries), empty, {"used": sum(sizes)})
    manifest.save(folder)
    return manifest


@pytest.fixture
def make_cache(tmp_path: Path) -> Callable[..., CachedDataset]:
    def make(**keys: object) -> CachedDataset:
        fake_cache(tmp_path / "cache", **keys)  # type: ignore[arg-type]
        return CachedDataset(LocalStore(tmp_path / "cache"))

    return make
