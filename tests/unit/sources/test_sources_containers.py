import json
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd3_light.sources import parquet
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import Record, Rejected
from tests.unit.sources.inputs import captions, png, rejects, scan_items, structs, write_files, write_tar


def test_tars_as_img2dataset_writes_them(tmp_path: Path) -> None:
    for shard in ("00001", "00000"):
        members = []
        for n in range(3):
            key = f"{shard}{n:04d}"
            about = json.dumps({"caption": f"json {key}", "url": "http://example.org", "status": "success"})
            members += [(f"{key}.jpg", png(n)), (f"{key}.json", about.encode())]
            if n != 2:
                members.append((f"{key}.txt", f"text {key}".encode()))
        write_tar(tmp_path / f"{shard}.tar", members)
        write_files(tmp_path, {f"{shard}_stats.json": "{}"})
        pq.write_table(pa.table({"url": ["u"], "caption": ["c"]}), tmp_path / f"{shard}.parquet")
    items = scan_items(tmp_path)
    assert rejects(items) == {f"{shard}.parquet": "no_image_column" for shard in ("00000", "00001")}, "its logs"
    shards = ("00000", "00001")
    assert list(captions(items)) == [f"{shard}.tar/{shard}{n:04d}.jpg" for shard in shards for n in range(3)]
    assert captions(items)["00000.tar/000000000.jpg"] == ("text 000000000",)
    assert captions(items)["00000.tar/000000002.jpg"] == ("json 000000002",)
    assert [item.image.read() for item in items if isinstance(item, Record)] == [png(n) for n in (0, 1, 2)] * 2


def test_a_tar_that_shrinks_is_rejected_when_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "set.tar", [("a.png", png()), ("a.txt", b"a")])
    (item,) = scan_items(path)
    assert isinstance(item, Record)
    path.write_bytes(path.read_bytes()[:520])
    with pytest.raises(Reject, match="truncated"):
        item.image.read()


@pytest.mark.parametrize(
    "columns",
    [
        {"image": structs(50), "text": [f"row {n}" for n in range(50)]},
        {"image": [png(n) for n in range(50)], "caption": [f"row {n}" for n in range(50)]},
        {"jpg": [png(n) for n in range(50)], "txt": [f"row {n}".encode() for n in range(50)]},
        {"PNG": [png(n) for n in range(50)], "Prompt": [f"row {n}" for n in range(50)], "text": list(range(50))},
    ],
)
@pytest.mark.parametrize("row_group_size", [7, 1000])
def test_parquet_with_image_bytes(tmp_path: Path, columns: dict[str, Any], row_group_size: int) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    items = scan_items(tmp_path)
    assert captions(items) == {f"train.parquet/{n:09d}": (f"row {n}",) for n in range(50)}
    order = list(enumerate(items))
    random.Random(0).shuffle(order)
    for n, item in [*order[:20], *enumerate(items)]:
        assert isinstance(item, Record)
        assert pickle.loads(pickle.dumps(item)).image.read() == png(n)


@contextmanager
def arrow_memory() -> Iterator[Any]:
    """Yield Arrow's memory pool for this block, which knows its peak."""
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        parquet._close_cursor()  # it holds memory of the pool
        pa.set_memory_pool(default)


SIZE, ROWS = 1 << 20, 40
LARGE = {
    "image": ({"image": [bytes(SIZE)] * ROWS, "text": ["a"] * ROWS}, "file_too_large"),
    "struct": ({"image": [{"bytes": bytes(SIZE), "path": None}] * ROWS, "text": ["a"] * ROWS}, "file_too_large"),
    "caption": ({"image": [png()] * ROWS, "text": [f"{'x' * SIZE}y"] * ROWS}, "caption_too_long"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_cells_are_rejected_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Equal cells are stored once: a small file may hold many large ones, and few of them are in memory together."""
    columns, reason = LARGE[kind]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert (tmp_path / "a.parquet").stat().st_size < SIZE / 100
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 3 * SIZE)
    with arrow_memory() as pool:
        reasons = [_reject(item) for item in scan_items(tmp_path, max_image_mb=0.5)]
    assert [reject.reason for reject in reasons] == [reason] * ROWS
    assert pool.max_memory() < 12 * SIZE
    if kind != "caption":
        assert reasons[0].detail == "1.0 MB, max_image_mb = 0.5"
        assert {len(item.image.read()) for item in scan_items(tmp_path) if isinstance(item, Record)} == {SIZE}


def _reject(item: Record | Rejected) -> Reject:
    if isinstance(item, Rejected):
        return Reject(item.reason, item.detail)
    with pytest.raises(Reject) as caught:
        item.image.read()
    return caught.value


def test_tars_read_the_configured_key_of_their_json(tmp_path: Path) -> None:
    members = [
        ("a.png", png()),
        ("a.txt", b"short"),
        ("a.json", json.dumps({"caption": "short", "long_caption": "long"}).encode()),
        ("b.png", png()),
        ("b.txt", b"only a text"),
        ("c.png", png()),
        ("c.json", b'{"caption": "short"}'),
    ]
    path = write_tar(tmp_path / "set.tar", members)
    items = scan_items(path, caption_column="long_caption")
    assert captions(items) == {"set.tar/a.png": ("long",), "set.tar/b.png": ("only a text",)}
    (reject,) = (item for item in items if isinstance(item, Rejected))
    assert (reject.reason, reject.detail) == ("no_caption", "no value in 'long_caption' (caption_column)")


def test_parquet_reads_the_configured_columns(tmp_path: Path) -> None:
    columns = {"image": [png(0)], "photo": [png(1)], "text": ["short"], "Long": ["long"], "number": [1]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (item,) = scan_items(tmp_path, image_column="photo", caption_column="long")
    assert isinstance(item, Record)
    assert (item.captions, item.image.read()) == (("long",), png(1))
    for key, column, reason in (
        ("image_column", "nowhere", "no_image_column"),
        ("image_column", "number", "no_image_column"),
        ("caption_column", "nowhere", "no_caption_column"),
        ("caption_column", "number", "no_caption_column"),
    ):
        (reject,) = scan_items(tmp_path, **{key: column})
        assert isinstance(reject, Rejected)
        assert reject.reason == reason
        assert f"{column!r} ({key})" in reject.detail


def test_several_caption_columns_of_containers(tmp_path: Path) -> None:
    columns = {"image": [png(0), png(1)], "text": ["short", "s"], "Long": [b"long", None], "number": [1, 2]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    items = scan_items(tmp_path / "a.parquet", caption_column=["long", "text"])
    assert list(captions(items).values()) == [("long", "short"), ("s", "s")]
    (reject,) = scan_items(tmp_path / "a.parquet", caption_column=["text", "number"])
    assert isinstance(reject, Rejected)
    assert reject.reason == "no_caption_column"
    members = [("a.png", png()), ("a.json", b'{"long": "long", "short": "short"}'), ("b.png", png()), ("b.txt", b"b")]
    path = write_tar(tmp_path / "set.tar", members)
    items = scan_items(path, caption_column=["short", "long"])
    assert captions(items) == {"set.tar/a.png": ("short", "long"), "set.tar/b.png": ("b", "b")}
