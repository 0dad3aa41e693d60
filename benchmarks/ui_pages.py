"""How fast do the pages of `sd3-light ui` open?

    python benchmarks/ui_pages.py data|runs [COUNT] [FOLDER]

`data` writes the catalogue of a made-up dataset and the tables of a made-up cache of COUNT samples (no images, no
encoders). `runs` writes 1,000 runs of 2,000 logged steps, and one whose log has COUNT lines. Each page is opened the
first time after a server has started, and again; it prints seconds of the clock, seconds of the CPU (which other
programs do not lengthen) and bytes. The made-up files were just written or are read once, so they are in the system's
memory: a slow disk adds its time.
"""

import itertools
import json
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
from common.basics import parser_of

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


def write_log(folder: Path, count: int, offset: float = 0.0) -> None:
    """Write a log with a line per step, as long as those of training, and an evaluation of two kinds every 5,000."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    bands = [f"0.{tenth}-{(tenth + 1) / 10:.1f}" for tenth in range(10)]
    measured = dict.fromkeys(("data_wait", "mfu", "tflops_per_gpu", "host_memory_gib", "param_norm"), 0.123456789012345)
    (folder / "config.toml").write_text(f"max_steps = {count}\n[optimizer]\nlr = {1e-4 * (1 + offset)}\n", "utf-8")
    with (folder / "log.jsonl").open("w", encoding="utf-8") as file:
        start = {"event": "start", "time": 1.8e9, "step": 0, "samples": 0, "total": count}
        file.write(json.dumps(start) + "\n")
        for step in range(1, count + 1):
            loss = offset + 0.3 + 2.0 ** (-step / count * 8) + 0.05 * float(draws.random())
            position = {"time": 1.8e9 + 0.3 * step, "step": step, "samples": 64 * step}
            values = {"loss": loss, "flow": loss, "band": dict.fromkeys(bands, loss), "lr": 1e-4, "grad_norm": 0.5}
            event = {"event": "step", **position, **values, **measured, "samples_per_second": 200.0}
            file.write(json.dumps(event) + "\n")
            for weights in ("raw", "ema") if step % min(5000, count) == 0 else ():
                losses = {"flow": loss, "flow_se": 0.01} | dict.fromkeys((f"flow@0.{t}" for t in range(1, 10)), loss)
                common = {"set": "validation", "weights": weights}
                file.write(json.dumps({"event": "eval", **position, **common, **losses}) + "\n")


def write_runs(root: Path, count: int) -> None:
    """Write 1,000 runs with short logs, and one with a long log."""
    write_log(root / "many" / "run0000", 2000)
    text = (root / "many" / "run0000" / "log.jsonl").read_bytes()
    for number in range(1, 1000):
        folder = root / "many" / f"run{number:04d}"
        folder.mkdir()
        (folder / "config.toml").write_text(f"max_steps = 2000\n[optimizer]\nlr = {number * 1e-6}\n", "utf-8")
        (folder / "log.jsonl").write_bytes(text)
    write_log(root / "long", count)


def opened(address: str, path: str) -> str:
    """Return how long a page takes, and its size."""
    started = time.perf_counter()
    used = time.process_time()
    with urlopen(address + path) as reply:
        size = len(reply.read())
    seconds = time.perf_counter() - started
    return f"{seconds:6.2f} s ({time.process_time() - used:.2f} s of CPU), {size / 1000:,.0f} kB"


def measure_runs(root: Path, count: int) -> None:
    """Print the time of each page of runs, each with a server that has read nothing before."""
    if not (root / "long").exists():
        write_runs(root, count)
    runs = [folder_id(root / "many" / f"run{number:04d}") for number in range(20)]
    long = f"/runs/{folder_id(root / 'long')}"
    compared = "/compare?" + "&".join(f"run={run}" for run in runs)
    pages = {
        "1,001 runs": "/",
        "1,001 runs by loss": "/?sort=loss",
        "a run": f"/runs/{runs[0]}",
        "20 runs compared": compared,
        "long log": long,
    }
    for name, path in pages.items():
        address = serve(root)
        first = opened(address, path)
        print(f"{name:20}{first} first,{opened(address, path)} again", flush=True)
    started = time.perf_counter()
    for _ in itertools.count():
        with urlopen(address + long) as reply:
            if b"still being read" not in reply.read():
                break
        time.sleep(0.5)
    print(f"{'long log, complete':20}{time.perf_counter() - started:6.2f} s later")
    print(f"{'long log, again':20}{opened(address, long)}")
    for share in (1000, 100, 10):
        window = f"/curves?from={count // 2}&to={count // 2 + count // share}&name=loss&name=grad_norm"
        print(f"{f'1/{share} of it, finer':20}{opened(address, long + window)}", flush=True)


def measure_data(root: Path, count: int) -> None:
    """Print the time of each page of data."""
    toml, cache = root / "data.toml", root / "other"
    if not toml.exists():
        write_dataset(root, count)
        write_cache(cache, count)
    address = serve(root)
    pages = {name: f"/datasets/{folder_id(toml)}{query}" for name, query in PAGES.items()}
    pages |= {"cache": f"/data/{folder_id(cache)}", "cache, search": f"/data/{folder_id(cache)}?text=nothing"}
    opened(address, "/data")  # the search of the folders
    for name, path in pages.items():
        first = opened(address, path)
        print(f"{name:20}{first} first,{opened(address, path)} again", flush=True)


def main() -> None:
    """Measure."""
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=("data", "runs"))
    parser.add_argument("count", type=int, nargs="?", default=1_000_000)
    parser.add_argument("folder", type=Path, nargs="?", help="keeps the files; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or Path(temporary)
        (measure_data if args.kind == "data" else measure_runs)(root, args.count)


if __name__ == "__main__":
    main()
