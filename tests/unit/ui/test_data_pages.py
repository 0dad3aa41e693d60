"""The data browser: pages of samples, the search in captions, and the originals."""

import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.data.shards import Origin, write_shard
from sd3_light.ui import data_pages
from sd3_light.ui.data_pages import PAGE_SIZE, cache_page, caches_page, original_image
from sd3_light.ui.folders import Folders, folder_id
from tests.refusals import refused
from tests.shards import sd3_content
from tests.unit.pages.parsed_page import ParsedPage

LABEL = "images#0"
COUNTS = {"32x32": 20, "48x32": 15}


def write_entry(folder: Path, bucket: str, count: int) -> ShardEntry:
    width, height = map(int, bucket.split("x"))
    names = [f"{bucket}-{number}.png" for number in range(count)]
    origins = [
        Origin(f"{LABEL}/{name}", "f", 2 * width, 2 * height, (f"a Cat {number}", "一只猫"), json.dumps([name]))
        for number, name in enumerate(names)
    ]
    zeros = torch.zeros(count, 1, 8, 2, 2, dtype=torch.float16)
    content = sd3_content(torch.arange(count), zeros, torch.arange(count + 1), torch.zeros(count, dtype=torch.long), {})
    entry = ShardEntry(f"{bucket}.safetensors", bucket, (width, height), LABEL, 0, 0, "", "f")
    return write_shard(folder / "shards", entry, content, origins)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with 35 samples; the original of the first one exists."""
    root = tmp_path_factory.mktemp("data")
    folder, images = root / "cache", root / "images"
    (folder / "shards").mkdir(parents=True)
    images.mkdir()
    Image.new("RGB", (64, 64), (10, 200, 30)).save(images / "32x32-0.png")
    shards = [write_entry(folder, bucket, count) for bucket, count in COUNTS.items()]
    empty = ShardEntry("empty", "empty", (0, 0), "", 0, 0, "", "")
    Manifest({}, tuple(shards), empty, {"used": 35}, {f"directory:{LABEL}": str(images)}).save(folder)
    return folder


@pytest.fixture
def folders(cache: Path) -> Folders:
    return Folders([cache.parent])


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of searches, which stands still."""
    now = [0.0]
    monkeypatch.setattr(data_pages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def keys(page: str) -> list[str]:
    return re.findall(rf"{LABEL}/\S+?\.png", ParsedPage(page).text)


def test_the_list_shows_caches_and_notes_damaged_ones(folders: Folders, cache: Path) -> None:
    text = ParsedPage(caches_page(folders)).text
    assert "35 samples in 2 buckets" in text
    broken = cache.parent / "broken"
    (broken / "shards").mkdir(parents=True)
    (broken / "manifest.json").write_text("{")
    try:
        assert "is damaged" in ParsedPage(caches_page(Folders([cache.parent]))).text
    finally:
        (broken / "manifest.json").unlink()


def test_pages_show_every_sample_once(folders: Folders, cache: Path) -> None:
    first, second, third = (cache_page(folders, folder_id(cache), number) for number in (1, 2, 3))
    assert [len(keys(page)) for page in (first, second, third)] == [PAGE_SIZE, 35 - PAGE_SIZE, 0]
    assert len({*keys(first), *keys(second)}) == 35
    assert "page 1 of 2" in ParsedPage(first).text
    assert "page=2" in first
    assert "page=3" not in second
    assert "page=1" in second
    assert len(keys(cache_page(folders, folder_id(cache), 1, "CAT 1"))) == 11 + 6
    assert keys(cache_page(folders, folder_id(cache), 1, "cat 19")) == [f"{LABEL}/32x32-19.png"]
    assert len(keys(cache_page(folders, folder_id(cache), 2, "猫"))) == 35 - PAGE_SIZE
    assert "No sample matches" in cache_page(folders, folder_id(cache), 1, "dog")


def test_a_long_search_stops(folders: Folders, cache: Path, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    read = data_pages._origins

    def read_slowly(*args: Any) -> Any:
        now[0] += 5.1
        return read(*args)

    monkeypatch.setattr(data_pages, "_origins", read_slowly)
    assert "The search stopped after 20 samples" in cache_page(folders, folder_id(cache), 1, "cat")


def test_a_damaged_shard_is_noted_and_the_others_are_shown(cache: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(cache, tmp_path / "cache"))
    (copied / "shards" / "32x32.arrow").write_bytes(b"not Arrow")
    page = cache_page(Folders([tmp_path]), folder_id(copied), 1)
    assert "The samples of shard 32x32.safetensors are not shown" in ParsedPage(page).text
    assert all("48x32" in key for key in keys(page))
    with pytest.raises(UserError, match=r"32x32\.safetensors cannot be read: .*; run `sd3-light cache --verify`"):
        original_image(Folders([tmp_path]), folder_id(copied), "32x32.safetensors", 0)


def test_the_original_is_cropped_as_for_the_cache(folders: Folders, cache: Path) -> None:
    with Image.open(io.BytesIO(original_image(folders, folder_id(cache), "32x32.safetensors", 0))) as image:
        assert image.size == (32, 32)
    for shard, row in (("32x32.safetensors", 1), ("32x32.safetensors", 99), ("../manifest.json", 0)):
        refused("", original_image, folders, folder_id(cache), shard, row)


def test_the_manifest_is_parsed_per_change(cache: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = [], Manifest.from_json
    monkeypatch.setattr(Manifest, "from_json", staticmethod(lambda *values: parsed.append(values) or parse(*values)))
    for _ in range(3):
        original_image(folders, folder_id(cache), "32x32.safetensors", 0)
        cache_page(folders, folder_id(cache))
    assert len(parsed) == 1
    text = (cache / "manifest.json").read_bytes()
    try:
        (cache / "manifest.json").write_bytes(text + b" ")
        cache_page(folders, folder_id(cache))
        assert len(parsed) == 2
        (cache / "manifest.json").write_bytes(b"{")
        refused(r"manifest\.json is damaged", cache_page, folders, folder_id(cache))
    finally:
        (cache / "manifest.json").write_bytes(text)
