"""How fast the data pages of `sd3-light ui` open: `python benchmarks/data_page.py [SAMPLES] [FOLDER]`.

Writes the catalogue of a made-up dataset and the tables of a made-up cache (no images, no encoders), serves them, and
prints the seconds (of the clock and of the CPU, which other programs do not lengthen) and bytes of each page: the first
time, and again.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import uvicorn

from sd3_light.config.load_dataset import load_directories
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin
from sd3_light.engines import Launch
from sd3_light.sources.catalogue import CATALOGUE_FOLDER, PART_ROWS, InputRow, make_sources, write_part
from sd3_light.ui.folders import folder_id
from sd3_light.ui.server import Site, make_app

SHARD = 1024
WORDS = ("cat", "dog", "red", "blue", "house", "tree", "watercolor", "sunny", "portrait", "two", "forest", "sea")
PAGES = {
    "list": "",
    "page 20,000": "?page=20000",
    "text": "?text=watercolor",
    "tag": "?tag=forest",
    "where": "?where=" + quote("width > height and caption_length < 40"),
    "by caption length": "?sort=caption+length",
    "duplicates": "?show=duplicates",
    "tags": "?tags=1",
}


def rows(count: int) -> Iterator[InputRow]:
    """Yield made-up samples; every 500th has the bytes of the one before it."""
    draws = np.random.default_rng(0)
    for number in range(count):
        caption = ", ".join(WORDS[each] for each in draws.integers(len(WORDS), size=draws.integers(1, 30)))
        width, height = (64 * side for side in draws.integers(4, 32, size=2).tolist())
        name = f"{number:09d}.jpg"
        digest = f"{number - (number % 500 == 499):032x}"
        yield InputRow(f"images#0/{name}", json.dumps([name]), "", "1-1", (caption,), width, height, digest)


def write_dataset(folder: Path, count: int) -> Path:
    """Write a dataset TOML and the catalogue that `sd3-light cache` would have left."""
    toml = folder / "data.toml"
    (folder / "images").mkdir(parents=True)
    toml.write_text('resolutions = [512]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    directories, _ = load_directories(toml)
    (source,) = make_sources(directories)
    catalogue = toml.with_suffix(".cache") / CATALOGUE_FOLDER
    (catalogue / "parts").mkdir(parents=True)
    parts = []
    samples = rows(count)
    for start in range(0, count, PART_ROWS):
        part = f"{start:032x}"
        write_part(catalogue / "parts" / f"{part}.arrow", [next(samples) for _ in range(min(PART_ROWS, count - start))])
        parts.append(part)
    listing = {"signature": "", "rows": count, "parts": parts}
    (catalogue / f"{source.name}.json").write_text(json.dumps(listing), encoding="utf-8")
    return toml


def write_cache(folder: Path, count: int) -> Path:
    """Write a manifest and the Arrow files of a cache, without tensors."""
    (folder / SHARDS).mkdir(parents=True)
    samples = rows(count)
    entries = []
    for start in range(0, count, SHARD):
        own = [next(samples) for _ in range(min(SHARD, count - start))]
        origins = [Origin(row.key, "f", row.width, row.height, row.captions, row.image) for row in own]
        columns = {name: [getattr(origin, name) for origin in origins] for name in Origin.__dataclass_fields__}
        file = f"{start:09d}.safetensors"
        table = pa.table({**columns, "captions": [list(texts) for texts in columns["captions"]]})
        feather.write_feather(table, str(folder / SHARDS / file.replace(".safetensors", ".arrow")), "uncompressed")
        entries.append(ShardEntry(file, "512x512", (512, 512), "images#0", len(own), 1, "", "f"))
    empty = ShardEntry("empty", "empty", (0, 0), "", 0, 0, "", "")
    Manifest({}, tuple(entries), empty, {"used": count}, {"directory:images#0": str(folder)}).save(folder)
    return folder


def serve(root: Path) -> str:
    """Serve a folder and return the address."""
    server = uvicorn.Server(
        uvicorn.Config(make_app(Site.of_folders([root], [], root / "out", Launch)), port=0, log_level="warning")
    )
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def main() -> None:
    """Measure."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(sys.argv[2] if len(sys.argv) > 2 else temporary)
        toml, cache = root / "data.toml", root / "other"
        if not toml.exists():
            write_dataset(root, count)
            write_cache(cache, count)
        address = serve(root)
        pages = {name: f"/datasets/{folder_id(toml)}{query}" for name, query in PAGES.items()}
        pages |= {"cache": f"/data/{folder_id(cache)}", "cache, search": f"/data/{folder_id(cache)}?text=nothing"}
        with urlopen(f"{address}/data") as reply:  # the search of the folders
            reply.read()
        for name, path in pages.items():
            times = []
            for _ in range(2):
                started = time.perf_counter()
                used = time.process_time()
                with urlopen(address + path) as reply:
                    size = len(reply.read())
                times.append(f"{time.perf_counter() - started:6.2f} s ({time.process_time() - used:.2f} s of CPU)")
            print(f"{name:20}{times[0]} first,{times[1]} again, {size / 1000:,.0f} kB", flush=True)


if __name__ == "__main__":
    main()
