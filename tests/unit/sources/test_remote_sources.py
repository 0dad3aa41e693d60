"""Sources at a URL: a bucket is scanned like the folder that it was copied from, with few requests."""

import json
import os
import random
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd3_light import remote_file
from sd3_light import urls as protocols
from sd3_light.config import DirectoryConfig, UserError, load_config
from sd3_light.remote_file import RemoteFile
from sd3_light.sources.catalogue import Catalogue, Listing, make_sources
from sd3_light.sources.claims import Claims
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import Record, Rejected, location_version
from sd3_light.sources.scan import scan
from sd3_light.sources.signature import signature
from tests.object_store import ObjectStore, object_store, web_server
from tests.refusals import refused
from tests.unit.sources.inputs import png, structs, write_files, write_tar


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store("sources") as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr(protocols, "PAUSES_SEC", (0.0, 0.0))
    server.reset()
    yield server
    server.reset()


def write_sources(root: Path) -> Path:
    """Write all kinds of sources and rejects to a folder."""
    members = [(f"{n:04d}{suffix}", data) for n in range(6) for suffix, data in ((".png", png(n)), (".txt", b"a tar"))]
    write_files(root, {"a.png": png(20), "b::c#d.png": png(21), "lonely.png": png(22)})
    write_files(root, {"a.txt": "one", "b::c#d.txt": "two"})
    write_files(root, {"empty.png": b"", "empty.txt": "nothing", "words.txt": "no image", ".hidden.png": png(1)})
    write_files(root / "table", {"x.png": png(23), "y.jpg": png(24)})
    texts = {"x.png": "ecks", "y.jpg": "why", "z": "-"}
    rows = [{"file_name": name, "text": text} for name, text in texts.items()]
    write_files(root / "table", {"metadata.jsonl": "\n".join(map(json.dumps, rows))})
    write_files(root / "own", {"k.png": png(25), "k.caption": "kay", "l.png": png(26), "l.TXT": "ell"})
    write_files(root / "two", {"m.png": png(27), "a.csv": "file,text\nm.png,em\n", "b.csv": "file,text\nm.png,em\n"})
    for name in ("csv", "parquet"):
        write_files(root / name, {"n.png": png(28), "o.png": png(29)})
    write_files(root / "csv", {"labels.csv": "file,text\nn.png,en\n"})
    pq.write_table(pa.table({"file": ["n.png"], "text": ["en"]}), root / "parquet" / "labels.parquet")
    write_tar(root / "00000.tar", members)
    pq.write_table(pa.table({"url": ["u"], "caption": ["c"]}), root / "00000.parquet")
    images = structs(10)
    table = pa.table({"image": images, "text": [f"row {n}" for n in range(10)]})
    pq.write_table(table, root / "rows.parquet", row_group_size=4)
    write_files(root, {"broken.tar": b"no tar" * 500})
    return root


def facts(directory: DirectoryConfig) -> list[tuple[object, ...]]:
    """Return what a scan yields, with the bytes instead of their locations."""
    rows: list[tuple[object, ...]] = []
    for item in scan(directory, 0):
        if isinstance(item, Rejected):
            rows.append((item.key, item.reason))
        else:
            rows.append((item.key, item.captions, item.image.read(), item.mask and item.mask.read()))
    return rows


def test_a_bucket_is_scanned_like_its_folder(store: ObjectStore, tmp_path: Path) -> None:
    local = write_sources(tmp_path / "set")
    masks = tmp_path / "masks"
    write_files(masks, {"a.png": png(50), "00000/0003.png": png(51)})
    expected = facts(DirectoryConfig(path=local, mask_path=masks))
    assert len(expected) > 20
    assert {row[1] for row in expected if len(row) == 2} >= {"broken_tar", "missing_file", "no_caption"}
    assert {row[1] for row in expected} >= {("kay",), ("ell",), ("en",)}
    url = store.put(local)
    assert facts(DirectoryConfig(path=url, mask_path=store.put(masks))) == expected
    for file in ("00000.tar", "rows.parquet"):
        assert facts(DirectoryConfig(path=f"{url}/{file}")) == facts(DirectoryConfig(path=local / file)) != []


def refresh(folder: Path, url: str, probe: bool = True) -> tuple[Catalogue, list[Listing]]:
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        listings = catalogue.refresh(make_sources([DirectoryConfig(path=url)]), lambda _: None)
        if probe:
            catalogue.probe_images(listings, 0, lambda _: None)
        return catalogue, listings


def test_an_unchanged_bucket_is_not_read_again(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put(write_sources(tmp_path / "again"))
    _, listings = refresh(tmp_path / "cache", url)
    store.requests.clear()
    assert refresh(tmp_path / "cache", url)[1] == listings
    assert store.objects_read() == []
    assert {path for method, path in store.requests if method == "HEAD"} <= {"/sources/again"}  # no HEAD per object
    before = signature(DirectoryConfig(path=url), 0)
    store.files.pipe_file(f"{url}/a.txt", b"uno")  # of the same size: the ETag tells
    assert signature(DirectoryConfig(path=url), 0) != before
    catalogue, listings = refresh(tmp_path / "cache", url)
    rows = [row for part in listings[0].parts for row in catalogue.rows(part)]
    assert {row.captions for row in rows if row.key == "again#0/a.png"} == {("uno",)}


def test_a_listing_takes_few_requests(store: ObjectStore, tmp_path: Path) -> None:
    write_files(tmp_path / "many", {f"{n:03d}.png": png(n) for n in range(40)})
    rows = [f"{n:03d}.png,{n}" for n in range(40)]
    write_files(tmp_path / "many", {"metadata.csv": "\n".join(["file_name,text", *rows])})
    url = store.put(tmp_path / "many")
    store.requests.clear()
    refresh(tmp_path / "cache", url, probe=False)
    assert len(store.requests) < 20
    store.requests.clear()
    items = list(scan(DirectoryConfig(path=url, default_mask_file=f"{url}/000.png"), 0))
    assert len({location_version(item.mask) for item in items if isinstance(item, Record) and item.mask}) == 1
    assert len(store.requests) < 20


def test_parquet_and_tars_are_read_by_range(store: ObjectStore, tmp_path: Path) -> None:
    root, noise = tmp_path / "large", np.random.default_rng(0)
    root.mkdir()
    large = [noise.bytes(1 << 20) for _ in range(8)]
    pq.write_table(pa.table({"image": large, "text": list("abcdefgh")}), root / "x.parquet", row_group_size=2)
    write_tar(root / "y.tar", [(f"{n}{s}", data) for n in range(8) for s, data in ((".png", large[n]), (".txt", b"t"))])
    url = store.put(root)
    for file, most in (("x.parquet", 1 << 20), ("y.tar", 3 << 20)):
        store.reset()
        items = [item for item in scan(DirectoryConfig(path=f"{url}/{file}"), 0) if isinstance(item, Record)]
        assert len(items) == 8
        assert store.bytes_sent < most
    store.reset()
    assert [item.image.read() for item in items] == large
    assert store.bytes_sent < 1.2 * sum(map(len, large))


@pytest.mark.parametrize("seed", range(3))
def test_a_remote_file_reads_like_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "WINDOW_BYTES", 3000)
    monkeypatch.setattr(remote_file, "_FIRST_BYTES", 100)
    draws = random.Random(seed)
    data = draws.randbytes(50_000)
    fsspec.filesystem("memory").pipe_file("/reads/file", data)
    file, at = RemoteFile("memory://reads/file"), 0
    for _ in range(500):
        at = draws.choice([at, at, max(0, at - 50), at + 700, draws.randrange(60_000)])
        size = draws.choice([1, 30, 700, 9000])
        assert file.read_at(at, size) == data[at : at + size]
        assert len(file._window) <= 3000
        at += size
    file.seek(-10, 2)
    assert file.read() == data[-10:]


def test_throttling_is_survived(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put(write_sources(tmp_path / "busy"))
    expected = facts(DirectoryConfig(path=url))
    refused: set[tuple[str, str]] = set()

    def first_time(method: str, path: str) -> bool:
        is_first = (method, path) not in refused
        refused.add((method, path))
        return is_first

    store.fails = first_time
    assert facts(DirectoryConfig(path=url)) == expected
    assert len(refused) > 10


def test_a_store_that_stays_away_is_one_line(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put(write_sources(tmp_path / "away"))
    refresh(tmp_path / "cache", url, probe=False)
    store.fails = lambda method, path: path.endswith("a.png")
    caught = refused(r"cannot read s3://sources/away/a\.png .*AWS_ACCESS_KEY_ID", refresh, tmp_path / "cache", url)
    assert "testing" not in caught
    store.reset()
    refresh(tmp_path / "cache", url)


def test_a_vanished_object_is_rejected_and_tried_again(store: ObjectStore, tmp_path: Path) -> None:
    url = store.put(write_sources(tmp_path / "gone"))
    items = [item for item in scan(DirectoryConfig(path=url), 0) if isinstance(item, Record)]
    refresh(tmp_path / "cache", url, probe=False)
    store.files.rm(f"{url}/a.png")
    with pytest.raises(Reject, match="no such object"):
        next(item for item in items if item.key.endswith("/a.png")).image.read()
    with Claims(tmp_path / "cache" / "claims") as claims:  # the object was there when the bucket was listed
        catalogue = Catalogue(tmp_path / "cache", claims)
        listing = json.loads(next(catalogue.folder.glob("*.json")).read_text())
        source = make_sources([DirectoryConfig(path=url)])[0]
        listings = [Listing(source, tuple(listing["parts"]), listing["rows"])]
        catalogue.probe_images(listings, 0, lambda _: None)
        rows = [row for part in listings[0].parts for row in catalogue.rows(part)]
    assert {row.reason for row in rows if row.key == "gone#0/a.png"} == {"unreadable"}


def test_files_and_folders_on_the_web(store: ObjectStore, tmp_path: Path) -> None:
    local = write_sources(tmp_path / "web")
    store.put(local)
    store.files.chmod(f"{store.url}/web/00000.tar", "public-read")
    store.files.chmod(f"{store.url}/web/rows.parquet", "public-read")
    for file in ("00000.tar", "rows.parquet"):
        url = f"{os.environ['AWS_ENDPOINT_URL']}/sources/web/{file}"
        assert facts(DirectoryConfig(path=url)) == facts(DirectoryConfig(path=local / file)) != []
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))  # it lists folders, and ignores ranges
    with web_server(handler) as web:
        assert facts(DirectoryConfig(path=f"{web}/web/table")) == facts(DirectoryConfig(path=local / "table"))
        write_files(tmp_path / "page" / "sub", {"a.png": png(1), "a.txt": "one"})
        (tmp_path / "page" / "index.html").write_text('<a href="sub/">a</a> <a href="./sub/">b</a>')
        assert len(facts(DirectoryConfig(path=f"{web}/page"))) == 1, "a page may name a folder twice"
        write_tar(tmp_path / "large.tar", [("a.png", bytes(1 << 18)), ("a.txt", b"a")])
        with pytest.raises(UserError, match=r"/large\.tar: its server ignores requests for a range; copy the file"):
            facts(DirectoryConfig(path=f"{web}/large.tar"))


def test_problems_of_a_url_are_one_line(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(r"path: s3://sources/none does not exist; correct it", scan, DirectoryConfig(path="s3://sources/none"), 0)
    refused(r"fsspec does not support the protocol 'nowhere'", scan, DirectoryConfig(path="nowhere://sources/none"), 0)
    with monkeypatch.context() as patch:  # asked once: a retry would not help
        patch.setattr(protocols, "PAUSES_SEC", (1e9,))
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.setenv("HOME", str(tmp_path))
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(UserError, match=r"cannot read s3://sources/none .*credentials.*; check the network and"):
            scan(DirectoryConfig(path="s3://sources/none"), 0)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "s3://key:hush@bucket/set"\n')
    (tmp_path / "train.toml").write_text('output_dir = "run"\ndataset = "data.toml"\n')
    caught = refused("a URL must not contain a user or password", load_config, tmp_path / "train.toml")
    assert "hush" not in caught
