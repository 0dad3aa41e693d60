"""The table of a large manifest: the same shards and batches as a list, mapped instead of parsed."""

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from sd3_light.data import manifest as manifest_module
from sd3_light.data.manifest import CACHE_FORMAT, MANIFEST, Manifest, ShardEntry
from sd3_light.data.shard_table import ShardTable, column, group_shards
from sd3_light.data.sides import HeldOut
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset, MicroBatches
from tests.refusals import refused

MakeCache = Callable[..., CachedDataset]
BUCKETS = ("256x256", "288x224", "64x512")


def entry(number: int) -> ShardEntry:
    digest = sha256(str(number).encode()).hexdigest()
    bucket, sides = BUCKETS[number % 3], (256, 256) if number % 2 else (64, 512)
    label = f"part-{number % 4}#0"
    return ShardEntry(f"{label}-{digest[:20]}.safetensors", bucket, sides, label, 9, 900 + number, digest, digest[:32])


def manifest_of(count: int) -> Manifest:
    recipe, places = {"format": 2, "text_tokens": "real"}, {"directory:part-0#0": "bilder/größe"}
    return Manifest(recipe, tuple(map(entry, range(count))), entry(count), {"used": 9 * count}, places)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "TABLE_SHARDS", 2)


def tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrow"))


def damaged(folder: Path) -> str:
    return refused(r"manifest\.json is damaged .*; `sd3-light cache CONFIG` writes it again", Manifest.load, folder)


def test_a_small_manifest_is_one_json_file(tmp_path: Path) -> None:
    manifest = manifest_of(30)
    manifest.save(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    values = asdict(manifest)
    assert values.pop("held_out") is None, "absent in a cache that is not divided"
    assert text == json.dumps({"format": CACHE_FORMAT, **values}, indent=1, ensure_ascii=False)
    assert tables(tmp_path) == []
    assert Manifest.load(tmp_path) == manifest


@pytest.mark.parametrize("limit", [10, 1000])
def test_a_divided_manifest_says_what_is_held_out(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "TABLE_SHARDS", limit)
    files = [entry.file for entry in manifest_of(30).shards]
    held_out = HeldOut({files[3]: (5, -(2**62))}, {files[4]: (7,)})
    replace(manifest_of(30), held_out=held_out).save(tmp_path)
    assert Manifest.load(tmp_path).held_out == held_out
    text = (tmp_path / MANIFEST).read_text(encoding="utf-8")
    (tmp_path / MANIFEST).write_text(text.replace('"unused": {', '"unusual": {'), encoding="utf-8")
    assert "held_out has a wrong type" in damaged(tmp_path)


@pytest.mark.usefixtures("small_limit")
def test_a_large_manifest_has_a_table(tmp_path: Path) -> None:
    manifest = manifest_of(40)
    manifest.save(tmp_path)
    opened, content = Manifest.load(tmp_path), json.loads((tmp_path / MANIFEST).read_text())
    assert content["format"] == CACHE_FORMAT
    assert [path.name for path in tables(tmp_path)] == [content["shards"]["file"]]
    assert isinstance(opened.shards, ShardTable)
    assert (len(opened.shards), set(opened.shards)) == (40, set(manifest.shards))
    assert replace(opened, shards=()) == replace(manifest, shards=())
    assert opened == Manifest.load(tmp_path) != manifest
    assert opened.shards[7] == list(opened.shards)[7] == opened.shards[-33]
    assert list(opened.shards[5:9]) == list(opened.shards)[5:9]
    listed, mapped = group_shards(manifest.shards), group_shards(opened.shards)
    assert [replace(bucket, shards=tuple(bucket.shards)) for bucket in mapped] == list(listed)
    for name in ("count", "bytes", "directory", "bucket"):
        assert sorted(column(opened.shards, name).tolist()) == sorted(column(manifest.shards, name).tolist())
    with pytest.raises(IndexError):
        opened.shards[40]


@pytest.mark.usefixtures("small_limit")
def test_a_new_table_replaces_the_old_one(tmp_path: Path) -> None:
    for count in (5, 6, 6):
        manifest_of(count).save(tmp_path)
        assert len(tables(tmp_path)) == 1
        assert len(Manifest.load(tmp_path).shards) == count
    previous = tables(tmp_path)[0].read_bytes()
    Manifest.load(tmp_path).save(tmp_path)  # as `inspect` does with the table of a URL
    assert tables(tmp_path)[0].read_bytes() == previous
    manifest_of(2).save(tmp_path)
    assert tables(tmp_path) == []


@pytest.mark.usefixtures("small_limit")
def test_a_damaged_table_is_reported(tmp_path: Path) -> None:
    manifest_of(9).save(tmp_path)
    (path,) = tables(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "has other bytes than those that were written" in damaged(tmp_path)
    path.write_bytes(data[:100])
    assert "has other bytes" in damaged(tmp_path)
    path.unlink()
    assert "No such file" in damaged(tmp_path)


def forge(folder: Path, rows: pa.RecordBatch, **changes: object) -> None:
    """Replace the table of a manifest by another one, with a correct hash."""
    content = json.loads((folder / MANIFEST).read_text())
    with pa.OSFile(str(folder / "forged"), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_batch(rows)
    data = (folder / "forged").read_bytes()
    digest = sha256(data).hexdigest()
    table = {"file": f"manifest-{digest[:20]}.arrow", "count": rows.num_rows, "bytes": len(data), "sha256": digest}
    (folder / table["file"]).write_bytes(data)
    (folder / MANIFEST).write_text(json.dumps({**content, "shards": {**table, **changes}}))


def changed(rows: pa.RecordBatch, name: str, values: list[object]) -> pa.RecordBatch:
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, name, pa.array(values, rows.schema.field(at).type))


@pytest.mark.usefixtures("small_limit")
def test_a_forged_table_is_reported(tmp_path: Path) -> None:
    manifest_of(9).save(tmp_path)
    rows = pa.ipc.open_file(tables(tmp_path)[0].read_bytes()).get_batch(0)
    files = rows["file"].to_pylist()
    forge(tmp_path, rows)
    assert len(Manifest.load(tmp_path).shards) == 9
    forgeries: list[tuple[pa.RecordBatch, dict[str, object], str]] = [
        (changed(rows, "file", ["../elsewhere", *files[1:]]), {}, "in another folder"),
        (changed(rows, "file", [None, *files[1:]]), {}, "a value is missing"),
        (changed(rows, "bytes", [-1] * 9), {}, "not positive"),
        (changed(rows, "bucket", ["wide"] * 9), {}, "buckets are not valid"),
        (rows.take(pa.array([1, 0, *range(2, 9)])), {}, "not sorted"),
        (rows.drop_columns(["count"]), {}, "its columns are not"),
        (rows, {"count": 8}, "lists 9 shards instead of 8"),
        (rows, {"file": "../manifest.arrow"}, "wrong name"),
    ]
    for forged, changes, message in forgeries:
        forge(tmp_path, forged, **changes)
        assert message in damaged(tmp_path)


@pytest.mark.usefixtures("small_limit")
def test_batches_do_not_depend_on_the_form_of_the_manifest(make_cache: MakeCache, tmp_path: Path) -> None:
    keys = {"sizes": (5, 3, 4, 6), "buckets": ("32x16", "16x32", "32x16", "32x16"), "captions": 2, "variants": 2}
    mapped = make_cache(**keys, directories=("b#0", "a#0", "a#0", "b#0"))
    assert isinstance(mapped.manifest.shards, ShardTable)
    folder = tmp_path / "cache"
    shards = list(map(asdict, mapped.manifest.shards))
    listing = {"format": CACHE_FORMAT, **asdict(replace(mapped.manifest, shards=())), "shards": shards}
    (folder / MANIFEST).write_text(json.dumps(listing))
    listed = CachedDataset(LocalStore(folder))
    assert isinstance(listed.manifest.shards, tuple)
    repeats = {"a#0": 2.0, "b#0": 1.5}
    orders = [data.order(5, repeats, lambda resolution: 4, 2) for data in (mapped, listed)]
    assert orders[0] == orders[1]
    for step in range(2 * orders[0].steps_per_epoch):
        both = zip((mapped, listed), orders, strict=True)
        batches = [MicroBatches(data, order, 0, 1, 1)[step] for data, order in both]
        assert batches[0].keys() == batches[1].keys()
        for name, value in batches[0].items():
            assert torch.equal(value, batches[1][name]) if value is not None else batches[1][name] is None


def test_opening_needs_little_time_and_memory_per_shard(tmp_path: Path) -> None:
    """A list takes about 400 bytes and 30 microseconds per shard."""
    count = 12_000
    manifest_of(count).save(tmp_path)
    Manifest.load(tmp_path)
    started = time.process_time()
    tracemalloc.start()
    shards = Manifest.load(tmp_path).shards
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    seconds = time.process_time() - started
    assert isinstance(shards, ShardTable)
    assert len(shards) == count
    assert held < 3 * count
    assert peak < 30 * count + (1 << 20)  # the buffer of the hash
    assert seconds < 5e-6 * count + 0.1
    assert os.stat(tables(tmp_path)[0]).st_size < 300 * count
