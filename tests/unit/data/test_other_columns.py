"""A cache of a made-up family: two image columns, one of them of a video, and captions in a fixed and two ragged ones.

Nothing here knows SD3's columns: the cache is written, read in batches, verified, held in memory and inspected.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from sd3_light.core.columns import SMALLEST, Bucket, Column, beside_captions
from sd3_light.cost.data_bytes import caption_bytes, image_bytes
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.reader import ShardReader
from sd3_light.data.resident import ResidentCache
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.data.slot_size import largest_batch_bytes
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.report.inspect import verb as inspect
from sd3_light.report.inspect.cache_page import write_cache_page
from tests.refusals import refused

LABEL = "clips#0"
SIZES = {"a": 3, "b": 5, "c": 4}
BUCKETS = {"a": Bucket(64, 32), "b": Bucket(64, 32), "c": Bucket(32, 64)}
BATCH = 2


def family_columns(bucket: Bucket) -> tuple[Column, ...]:
    height, width = -(-bucket.height // 32), -(-bucket.width // 32)
    return (
        Column("frames", "video", "float16", (4, 3, height, width), ("vae",)),
        Column("words", "caption", "bfloat16", (9, 6), ("llm", "tokenizer"), ragged=True),
        Column("depth", "image", "float32", (height, width), ("depth",)),
        Column("mask", "mask", "uint8", (height, width), ()),
        Column("style", "caption", "float32", (2,), ("judge",)),
        Column("glyphs", "caption", "uint8", (5, 2, 2), ("glyphs",), ragged=True),
    )


def rows_of(caption: int) -> dict[str, int]:
    """The rows of a caption in the ragged columns."""
    return {"words": 1 + caption % 9, "glyphs": caption % 5}


def content(first: int, count: int, bucket: Bucket, masked: bool) -> ShardContent:
    """Samples from number ``first`` with two variants and two captions; values are twice the number plus which."""
    columns = {column.name: column for column in family_columns(bucket)}
    captions = torch.arange(2 * first, 2 * (first + count))
    values: dict[str, Tensor] = {}
    for name in ("frames", "depth"):
        images = torch.arange(2 * first, 2 * (first + count)).view(count, 2)
        images = images.reshape(count, 2, *(1 for _ in columns[name].shape))
        values[name] = images.expand(count, 2, *columns[name].shape).to(getattr(torch, columns[name].dtype))
    for name in ("words", "glyphs"):
        rows = torch.tensor([rows_of(caption)[name] for caption in captions.tolist()])
        values[f"{name}.start"] = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
        repeated = captions.repeat_interleave(rows).reshape(-1, *(1 for _ in columns[name].row_shape))
        tokens = repeated.expand(-1, *columns[name].row_shape)
        values[f"{name}.tokens"] = tokens.to(getattr(torch, columns[name].dtype))
    values["style"] = captions[:, None].expand(-1, 2).float()
    if masked:
        values["mask"] = torch.full((count, *columns["mask"].shape), 7, dtype=torch.uint8)
        values["mask"][..., 0] = 200
    ids, starts = torch.arange(first, first + count), torch.arange(count + 1) * 2
    return ShardContent(family_columns(bucket), ids, starts, captions - 2 * first, values)


def write(folder: Path, name: str, samples: ShardContent, bucket: str) -> ShardEntry:
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    entry = ShardEntry(f"{name}.safetensors", bucket, (64, 64), LABEL, 0, 0, "", name)
    origins = [
        Origin(f"{LABEL}/{number}.png", "f", 128, 64, ("a dog", "a running dog"), json.dumps([f"{number}.png"]))
        for number in samples.sample_id.tolist()
    ]
    return write_shard(folder / SHARDS, entry, samples, origins)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards in two buckets; one has masks."""
    folder, first, entries = tmp_path / "cache", 1, []
    for name, count in SIZES.items():
        bucket = BUCKETS[name]
        entries.append(write(folder, name, content(first, count, bucket, masked=name == "b"), str(bucket)))
        first += count
    empty = write(folder, "empty", content(0, 1, SMALLEST, masked=False), "empty")
    sources = tmp_path / "images"
    sources.mkdir()
    Image.new("RGB", (128, 64), "teal").save(sources / "1.png")
    Manifest({}, tuple(entries), empty, {"used": 12}, {f"directory:{LABEL}": str(sources)}).save(folder)
    return folder


@pytest.fixture
def data(folder: Path) -> CachedDataset:
    return CachedDataset(LocalStore(folder), columns=family_columns)


def batches(data: CachedDataset, seed: int = 0) -> Sequence[dict[str, Tensor]]:
    order = data.order(seed, {LABEL: 1.0}, lambda resolution: BATCH)
    return [data.read(order.picks(step), seed) for step in range(2 * order.steps_per_epoch)]


def test_batches_have_every_column(data: CachedDataset) -> None:
    seen, masked = set(), 0
    for batch in batches(data):
        names = {"frames", "depth", "style", "words", "words.length", "glyphs", "glyphs.length"}
        assert batch.keys() == names | {"mask", "sample_id", "epoch", "repeat"}
        assert batch["frames"].dtype == torch.float16
        assert batch["frames"].shape[:3] == (BATCH, 4, 3)
        assert batch["depth"].shape == (BATCH, *batch["frames"].shape[-2:])
        assert batch["glyphs"].shape[2:] == (2, 2)
        for name in ("words", "glyphs"):
            assert batch[f"{name}.length"].dtype == torch.int64
            assert batch[name].shape[1] == batch[f"{name}.length"].max()
        for row, sample in enumerate(batch["sample_id"].tolist()):
            variant, caption = int(batch["depth"][row, 0, 0]) - 2 * sample, int(batch["style"][row, 0])
            assert variant in (0, 1)
            assert caption - 2 * sample in (0, 1)
            assert (batch["frames"][row] == 2 * sample + variant).all(), "the same variant in every column"
            for name, count in rows_of(caption).items():
                assert int(batch[f"{name}.length"][row]) == count
                assert (batch[name][row, :count].float() == caption).all()
                assert not batch[name][row, count:].any(), "padded with zeros"
            if batch["mask"] is not None:
                masked += 1
                expected = torch.full_like(batch["mask"][row], 255)
                if 4 <= sample < 9:
                    expected = torch.full_like(expected, 7)
                    expected[:, -1 if variant else 0] = 200
                assert torch.equal(batch["mask"][row], expected), "mirrored with a flipped image"
            seen.add((sample, variant))
    assert {sample for sample, _ in seen} == set(range(1, 13))
    assert {variant for _, variant in seen} == {0, 1}
    assert masked


def test_the_cache_is_held_in_memory(data: CachedDataset) -> None:
    tall, wide = ResidentCache(data, torch.device("cpu")).buckets
    assert wide.images.keys() == {"frames", "depth"}
    assert wide.images["frames"].shape == (16, 4, 3, 1, 2)
    assert tall.masks is None
    assert wide.masks is not None
    assert wide.masks[:3].unique().tolist() == [255]
    assert wide.masked.tolist() == [False] * 3 + [True] * 5
    text = wide.text
    assert (text.fixed.keys(), text.tokens.keys()) == ({"style"}, {"words", "glyphs"})
    for sample, number in enumerate(wide.ids.tolist()):
        images = wide.images["depth"][wide.first_image[sample] : wide.first_image[sample + 1]]
        assert images[:, 0, 0].tolist() == [2 * number, 2 * number + 1]
        captions = wide.captions[wide.first_caption[sample] : wide.first_caption[sample + 1]]
        for value, caption in enumerate(captions.tolist(), start=2 * number):
            assert text.fixed["style"][caption].tolist() == [value] * 2
            for name, count in rows_of(value).items():
                start, end = text.starts[name][caption : caption + 2]
                assert end - start == count
                assert (text.tokens[name][start:end].float() == value).all()
    assert not text.tokens["words"][text.zero_row("words")].any()
    assert np.diff(text.starts["words"])[text.empty] == 1


def test_slots_fit_the_largest_batch_of_columns_as_they_are(data: CachedDataset) -> None:
    """A family without a join passes its columns on."""
    largest = largest_batch_bytes(data, [BATCH, BATCH], lambda columns: columns)
    most = max(sum(value.nbytes for value in batch.values() if value is not None) for batch in batches(data))
    declared = family_columns(BUCKETS["a"])
    each = image_bytes(declared).value + caption_bytes(declared).value + 128
    assert most <= largest <= 4096 + BATCH * each, "and not much larger"


def test_the_cache_is_inspected(folder: Path, tmp_path: Path) -> None:
    inspection = inspect.run(folder)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(inspect.render(inspection))
    text = " ".join(console.export_text().split())
    assert "words tokens per caption" in text
    assert "glyphs tokens per caption" in text
    assert inspection.stats.bytes_by_kind.keys() == {"images", "video", "masks", "text", "index"}
    assert not inspection.stats.unreadable
    page = write_cache_page(folder, tmp_path / "page.html", samples=12)
    assert len(page.samples) == 12
    assert sum(bool(card.original) for card in page.samples) == 1
    assert not any(card.decoded for card in page.samples), "no VAE is known"


def test_a_column_reads_several_entries(tmp_path: Path) -> None:
    """The text encoder of an edit model sees the reference: equal captions of two samples have different values."""
    columns = (
        Column("moments", "image", "float16", (2, 1, 1), ("vae",)),
        Column("reference", "reference", "float16", (2, 1, 1), ("vae",)),
        Column("text", "caption+reference", "bfloat16", (4, 2), ("llm", "vae"), ragged=True),
    )
    assert columns[2].per_caption
    assert beside_captions(columns) == ("reference",)
    assert not beside_captions(family_columns(BUCKETS["a"]))
    rows = torch.arange(6.0).bfloat16()[:, None].expand(6, 2)
    values = {"moments": torch.zeros(2, 1, 2, 1, 1).half(), "reference": torch.ones(2, 1, 2, 1, 1).half()}
    values |= {"text.tokens": rows, "text.start": torch.tensor([0, 2, 6])}
    samples = ShardContent(columns, torch.arange(1, 3), torch.arange(3), torch.arange(2), values)
    folder = tmp_path / "cache"
    entry = write(folder, "edits", samples, "64x64")
    Manifest({}, (entry,), write(folder, "empty", samples, "empty"), {"used": 2}, {}).save(folder)
    data = CachedDataset(LocalStore(folder), columns=lambda bucket: columns)
    (batch, *_) = batches(data)
    for row, sample in enumerate(batch["sample_id"].tolist()):
        count = int(batch["text.length"][row])
        assert batch["text"][row, :count, 0].tolist() == ([0, 1] if sample == 1 else [2, 3, 4, 5])
    assert batch["reference"].unique().tolist() == [1]
    assert data.new_reader(entry).columns[2].reads == "caption+reference"


def changed(folder: Path, name: str, change: dict[str, object], **others: Tensor) -> Manifest:
    """Write a shard again with another column, and the manifest with its new entry."""
    bucket, manifest = BUCKETS[name], Manifest.load(folder)
    old = content(1, SIZES[name], bucket, masked=False)
    columns = [replace(column, **change) if column.name == "depth" else column for column in old.columns]  # type: ignore[arg-type]
    values = {str(change.get("name", key)) if key == "depth" else key: value for key, value in old.values.items()}
    entry = write(folder, name, replace(old, columns=columns, values={**values, **others}), str(bucket))
    shards = tuple(entry if shard.file == entry.file else shard for shard in manifest.shards)
    replace(manifest, shards=shards).save(folder)
    return Manifest.load(folder)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("kind", ["name", "reads", "dtype", "shape"])
def test_shards_with_other_columns_are_refused(folder: Path, kind: str, declared: bool) -> None:
    count = SIZES["b"]
    changes: dict[str, tuple[dict[str, object], Tensor]] = {
        "name": ({"name": "normals"}, torch.zeros(count, 2, 1, 2)),
        "reads": ({"reads": "control"}, torch.zeros(count, 2, 1, 2)),
        "dtype": ({"dtype": "float16"}, torch.zeros(count, 2, 1, 2).half()),
        "shape": ({"shape": (2, 2)}, torch.zeros(count, 2, 2, 2)),
    }
    change, values = changes[kind]
    changed(folder, "b", change, **{str(change.get("name", "depth")): values})
    columns = family_columns if declared else None
    streamed, held = (CachedDataset(LocalStore(folder), columns=columns) for _ in range(2))
    refused(r"shard .* belongs to another cache \(it has .*, expected ", batches, streamed)
    refused("belongs to another cache", ResidentCache, held, torch.device("cpu"))


def test_sizes_differ_between_buckets_but_not_within_one(folder: Path) -> None:
    data = CachedDataset(LocalStore(folder))
    assert len({str(data.new_reader(entry).columns) for entry in data.manifest.shards}) > 1
    renamed = replace(data.manifest, shards=tuple(replace(entry, bucket="64x32") for entry in data.manifest.shards))
    renamed.save(folder)
    refused(r"expected frames of the video, float16 \[4, 3, 1, 2\]", batches, CachedDataset(LocalStore(folder)))


def test_variants_of_image_columns_must_be_equally_many(folder: Path) -> None:
    old = content(1, 2, BUCKETS["a"], masked=False)
    entry = write(folder, "odd", replace(old, values={**old.values, "depth": old.values["depth"][:, :1]}), "64x32")
    refused("numbers of variants of its columns differ", ShardReader, folder / SHARDS / entry.file, entry)
