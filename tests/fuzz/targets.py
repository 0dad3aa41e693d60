"""The targets: each writes a mutated input into an empty folder and returns the command that reads it.

A command may write below ``folder / "out"`` and, for the cache stage, into ``folder / "cache"``.
"""

import csv
import hashlib
import io
import json
import random
import shutil
import tarfile
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd3_light import recipes
from sd3_light.config.base import walk_tables
from sd3_light.config.schema_dataset import DatasetDefaults, DirectoryConfig
from sd3_light.config.schema_train import TrainConfig
from sd3_light.report.run_charts import x_table
from sd3_light.ui.folders import Folders
from sd3_light.ui.run_pages import compare_page, comparison_charts, run_page, runs_page
from tests.fuzz.mutation import mutate_bytes, mutate_json, odd, set_keys
from tests.fuzz.pages import write_pages
from tests.fuzz.world import World, rewrite

Command = list[object]
Target = Callable[[World, Path, random.Random], Command]


def _recipes() -> list[dict[str, Any]]:
    texts = [path.read_text(encoding="utf-8") for path in Path(str(files(recipes))).rglob("*.toml")]
    return [raw for raw in map(tomllib.loads, texts) if "output_dir" in raw]


def _write_toml(path: Path, raw: dict[str, Any], rng: random.Random) -> None:
    try:
        data = tomli_w.dumps(raw).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError):  # null, or a number that TOML lacks
        data = json.dumps(raw, default=str).encode()
    path.write_bytes(mutate_bytes(data, rng) if rng.random() < 0.08 else data)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value if item is not None] if isinstance(value, list) else value


def _project(world: World, folder: Path) -> dict[str, Any]:
    """Write a valid dataset TOML whose images are the world's, and return a valid train config."""
    shutil.copy(world.project.data_toml, folder / "data.toml")
    (folder / "images").symlink_to(world.project.images)
    return tomllib.loads(world.project.train_toml.read_text(encoding="utf-8"))


def train_config(world: World, folder: Path, rng: random.Random) -> Command:
    """A train TOML: keys of the schema on the test project, or a shipped recipe with the paths of the project."""
    raw = _project(world, folder)
    if rng.random() < 0.3:
        recipe = rng.choice(_recipes())
        paths = {key: raw[key] for key in ("output_dir", "dataset", "cache_dir")}
        model = {**recipe.get("model", {}), "diffusers_path": str(world.model), "size": "tiny2", "init": "random"}
        raw = {**recipe, **paths, "eval_datasets": [], "model": {**model, "train_type": "sd3_light_pretrain"}}
        raw.pop("adapter", None)
    set_keys(raw, TrainConfig, rng, rng.choice((0, 1, 1, 2, 4)), valid_share=0.85)
    _write_toml(folder / "train.toml", _without_none(raw), rng)
    command: Command = ["check", folder / "train.toml"]
    if rng.random() < 0.2:
        table, schema = rng.choice(list(walk_tables(TrainConfig)))
        key = ".".join(filter(None, (table, rng.choice(list(schema.model_fields)))))
        command += ["--set", f"{key}={str(odd(rng)).replace(chr(0), '')}"]
    return [*command, "--processes", rng.choice((1, 2, 64))] if rng.random() < 0.3 else command


def dataset_config(world: World, folder: Path, rng: random.Random) -> Command:
    """A dataset TOML with one or two directories."""
    raw = _project(world, folder)
    data: dict[str, Any] = {"directory": [{"path": "images"} for _ in range(rng.choice((1, 1, 2)))]}
    sizes = ({"size_buckets": [[64, 64]]}, {"resolutions": [64]}, {"resolutions": [64], "enable_ar_bucket": True})
    data |= rng.choice(sizes)
    set_keys(data, DatasetDefaults, rng, rng.choice((0, 1, 2)), valid_share=0.85)
    set_keys(data["directory"][0], DirectoryConfig, rng, rng.choice((0, 0, 1, 2)), valid_share=0.85)
    _write_toml(folder / "data.toml", _without_none(data), rng)
    _write_toml(folder / "train.toml", raw, random.Random(0))
    return ["check", folder / "train.toml"]


def _row(world: World, rng: random.Random, name: str) -> dict[str, Any]:
    caption = "a red circle" if rng.random() < 0.8 else odd(rng)
    row = {rng.choice(("file_name", "image", "path")): name, rng.choice(("text", "caption", "prompt")): caption}
    return mutate_json(row, rng) if rng.random() < 0.15 else row


def _scan(world: World, folder: Path, rng: random.Random, source: str = "images") -> Command:
    """Check a dataset, or cache it now and then."""
    _write_toml(folder / "train.toml", tomllib.loads(world.project.train_toml.read_text()), random.Random(0))
    (folder / "data.toml").write_text(f'size_buckets = [[64, 64]]\n[[directory]]\npath = "{source}"\n')
    return ["cache" if rng.random() < 0.02 else "check", folder / "train.toml"]


def caption_table(world: World, folder: Path, rng: random.Random) -> Command:
    images = folder / "images"
    images.mkdir()
    for name, data in world.images[:4]:
        (images / name).write_bytes(mutate_bytes(data, rng) if rng.random() < 0.1 else data)
    rows = [_row(world, rng, name) for name, _ in world.images[:4]]
    kind = rng.choice(("captions.json", "metadata.jsonl", "metadata.csv", "metadata.json"))
    if kind.endswith(".csv"):
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(rows[0].keys())
        writer.writerows([str(value) for value in row.values()] for row in rows)
        data = text.getvalue().encode("utf-8", "surrogatepass")
    elif kind.endswith(".jsonl"):
        data = "\n".join(map(json.dumps, rows)).encode()
    else:
        data = json.dumps(rows if rng.random() < 0.5 else {name: "a circle" for name, _ in world.images}).encode()
    (images / kind).write_bytes(mutate_bytes(data, rng) if rng.random() < 0.3 else data)
    return _scan(world, folder, rng)


def tar(world: World, folder: Path, rng: random.Random) -> Command:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=rng.choice((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT))) as file:
        for name, data in world.images[:4]:
            stem = Path(name).stem if rng.random() < 0.9 else rng.choice(("../x", "/abs", "a.b", "x" * 90, "日"))
            caption = rng.choice((b"a circle", b"", b"\xff", json.dumps({"caption": odd(rng)}).encode()))
            for suffix, content in ((".png", data), (rng.choice((".txt", ".json")), caption)):
                info = tarfile.TarInfo(stem + suffix)
                info.size = len(content)
                info.type = rng.choice((tarfile.REGTYPE,) * 20 + (tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE))
                file.addfile(info, io.BytesIO(content) if info.isreg() else None)
    data = buffer.getvalue()
    (folder / "images.tar").write_bytes(mutate_bytes(data, rng) if rng.random() < 0.4 else data)
    return _scan(world, folder, rng, "images.tar")


def parquet(world: World, folder: Path, rng: random.Random) -> Command:
    images: list[Any] = [data for _, data in world.images[:4]]
    images = [rng.choice((data, b"", None)) if rng.random() < 0.1 else data for data in images]
    kinds: list[Any] = [images, [{"bytes": data, "path": "x"} for data in images], ["x"] * 4]
    texts: list[Any] = [["a circle"] * 4, [["a", "b"]] * 4, [None, "a", "b", ""], [1, 2, 3, 4], [b"\xff"] * 4]
    column = texts[0] if rng.random() < 0.7 else rng.choice(texts)
    image = rng.choice(("image", "jpg", "x"))
    table = pa.table({image: rng.choice((kinds[0], *kinds)), rng.choice(("text", "caption")): column})
    buffer = io.BytesIO()
    compression = rng.choice(("none", "snappy", "zstd"))
    pq.write_table(table, buffer, compression=compression, row_group_size=rng.choice((1, 100)))
    data = buffer.getvalue()
    (folder / "images.parquet").write_bytes(mutate_bytes(data, rng) if rng.random() < 0.4 else data)
    return _scan(world, folder, rng, "images.parquet")


def _mutated_header(data: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a changed header, metadata or length, or changed bytes."""
    length = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    action = rng.choice(("none", "header", "metadata", "metadata", "length", "bytes", "values"))
    if action == "header":
        header = mutate_json(header, rng, rng.choice((1, 2)))
    if action == "metadata" and "__metadata__" in header:
        key = rng.choice(list(header["__metadata__"]))
        try:
            header["__metadata__"][key] = json.dumps(mutate_json(json.loads(header["__metadata__"][key]), rng))
        except ValueError:
            header["__metadata__"] = mutate_json(header["__metadata__"], rng)
    text = json.dumps(header).encode()
    text = mutate_bytes(text, rng) if action == "bytes" else text
    values = mutate_bytes(values, rng) if action == "values" else values
    size = rng.choice((0, 1, len(text) + 1, 2**50, 2**64 - 1)) if action == "length" else len(text)
    return size.to_bytes(8, "little") + text + values


def lora(world: World, folder: Path, rng: random.Random) -> Command:
    (folder / "lora.safetensors").write_bytes(_mutated_header(world.lora.read_bytes(), rng))
    (folder / "out").mkdir()
    layout = rng.choice(("diffusers", "kohya", "peft"))
    return ["lora", "convert", folder / "lora.safetensors", folder / "out" / "new.safetensors", "--layout", layout]


def single_file(world: World, folder: Path, rng: random.Random) -> Command:
    path = folder / "single.safetensors"
    path.write_bytes(_mutated_header(world.single_file.read_bytes(), rng))
    (folder / "out").mkdir()
    if rng.random() < 0.5:
        _project(world, folder)
        shutil.copy(world.project.train_toml, folder / "train.toml")
        options = (f"model.init={path}", "model.size=tiny2", "model.num_layers=1")
        return ["check", folder / "train.toml", *(word for option in options for word in ("--set", option))]
    return ["convert", path, folder / "out" / "model", "--base", world.model]


def model_folder(world: World, folder: Path, rng: random.Random) -> Command:
    """A JSON file or the weights' header of a model folder."""
    model = world.linked_model(folder / "model")
    path = rng.choice(sorted(model.glob("*/*.json")) + sorted(model.glob("*.json")))
    if rng.random() < 0.2:
        path = rng.choice(sorted(model.glob("*/*.safetensors")))
        rewrite(path, _mutated_header(path.read_bytes(), rng))
    elif rng.random() < 0.2:
        rewrite(path, mutate_bytes(path.read_bytes(), rng))
    else:
        rewrite(path, json.dumps(mutate_json(json.loads(path.read_text(encoding="utf-8")), rng)).encode())
    (folder / "out").mkdir()
    if rng.random() < 0.7:
        _project(world, folder)
        text = world.project.train_toml.read_text().replace(str(world.model), str(model))
        (folder / "train.toml").write_text(text.replace('init = "random"', f'init = "{model}"\nnum_layers = 1'))
        return ["check", folder / "train.toml"]
    return ["convert", model, folder / "out" / "single.safetensors", *rng.choice(([], ["--text-encoders"]))]


def manifest(world: World, folder: Path, rng: random.Random) -> Command:
    """The manifest, the list of rejects or a shard of a cache."""
    cache = Path(shutil.copytree(world.cached.cache, folder / "copy"))
    path = cache / "manifest.json"
    if rng.random() < 0.2:
        path = rng.choice(sorted((cache / "shards").iterdir()))
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    elif rng.random() < 0.2:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    else:
        path.write_text(json.dumps(mutate_json(json.loads(path.read_text()), rng, rng.choice((0, 1, 1, 2)))))
    (folder / "out").mkdir()
    page = ["--out", folder / "out" / "page.html", "--samples", 2] if rng.random() < 0.03 else []
    return ["inspect", cache, *page]


def shuffled(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with the keys of all its objects in another order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], rng) for key in rng.sample(list(value), len(value))}
    return value


def checkpoint_index(world: World, folder: Path, rng: random.Random) -> Command:
    """The index of a checkpoint, with the right digest in most cases: changed values, or only another layout."""
    run = Path(shutil.copytree(world.run.run, folder / "run"))
    (folder / "data.toml").write_bytes(world.run.data_toml.read_bytes())
    index = max(run.glob("checkpoints/step-*")) / "index.json"
    content = json.loads(index.read_text())
    if rng.random() < 0.4:  # the same facts, in another order and with an unknown one
        content = shuffled({**content, "facts": {**content["facts"], "unknown": [None]}}, rng)
    else:
        content = mutate_json(content, rng, rng.choice((1, 1, 2)))
    if isinstance(content, dict) and rng.random() < 0.8:
        content.pop("sha256", None)
        text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        content["sha256"] = hashlib.sha256(text).hexdigest()
    data = json.dumps(content, indent=rng.choice((None, 1))).encode()
    index.write_bytes(mutate_bytes(data, rng) if rng.random() < 0.2 else data)
    (folder / "out").mkdir()
    weights = rng.choice(([], ["--weights", "raw"], ["--weights", "ema"], ["--weights", "nothing"]))
    return ["export", run, folder / "out" / "model", *weights]


def log(world: World, folder: Path, rng: random.Random) -> Command:
    lines = (world.run.run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    events = [mutate_json(event, rng) if rng.random() < 0.1 else event for event in events]
    data = "".join(json.dumps(event) + "\n" for event in events).encode()
    (folder / "run").mkdir()
    (folder / "run" / "log.jsonl").write_bytes(mutate_bytes(data, rng) if rng.random() < 0.2 else data)
    (folder / "out").mkdir()
    return ["report", folder / "run", *(["--out", folder / "out" / "page.html"] if rng.random() < 0.3 else [])]


def log_pages(world: World, folder: Path, rng: random.Random) -> Command:
    """The log and the config of a run on the pages of `sd3-light ui`, also where the log counts as a long one."""
    log(world, folder, rng)
    config = (world.run.run / "config.toml").read_bytes()
    (folder / "run" / "config.toml").write_bytes(mutate_bytes(config, rng) if rng.random() < 0.5 else config)
    steps = rng.choice(((0.0, 3.0), (-1e300, 1e300), (2.0, 1.0), (odd_number(rng), odd_number(rng))))
    return [open_pages, folder, steps, rng.choice((1, 1 << 23))]


def odd_number(rng: random.Random) -> float:
    """Return a step that no run has."""
    return rng.choice((0.0, -1.0, 1e-320, 1e308, 2.0**53, 0.5))


def open_pages(folder: Path, steps: tuple[float, float], quick_bytes: int) -> None:
    """Open the pages of the runs in a folder, and its finer curves. Raises UserError."""
    folders = Folders([folder])
    runs_page(folders)
    (run_id,) = folders.runs()
    for look in range(2):
        run = folders.run(run_id)
        report = folders.report(run, quick_bytes)
        x_table(report, run_id)
        comparison_charts({"run": report})
        if look == 0:
            folders.wait_for(run)
    run_page(folders, run_id)
    compare_page(folders, [run_id])
    for curve in folders.fine_curves(run, steps, ["loss", "band/0.0-0.1", "no/such", "time"]).values():
        json.dumps([curve.points, curve.extremes], allow_nan=False)


def drawn_image(world: World, folder: Path, rng: random.Random) -> Command:
    """The settings in a PNG that is drawn again: changed values, in one of the layouts of text chunks, or damaged."""
    facts = {"prompt": "a star", "negative_prompt": "", "seed": 3, "width": 32, "height": 32, "steps": 1}
    facts |= {"guidance": 1.5, "sampler": "euler", "shift": 2.0, "dtype": "float32", "threads": 1, "frames": 1}
    facts |= {"model": "a", "fingerprint": "", "loras": rng.choice(([], [{"file": "a", "strength": 1}]))}
    facts = mutate_json(facts, rng, rng.choice((0, 1, 1, 2, 4)))
    for name in ("width", "height", "steps", "threads", "frames"):  # valid ones that take minutes or gigabytes
        if isinstance(facts, dict) and isinstance(facts.get(name), int) and facts[name] > 64:
            facts[name] = rng.choice((0, 7, 32))
    chunks = PngInfo()
    text = json.dumps(facts, ensure_ascii=rng.random() < 0.8).encode("utf-8", "replace").decode()
    add = rng.choice((chunks.add_text, chunks.add_itxt))
    add("sd3_light", text, zip=rng.random() < 0.2)
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG", pnginfo=chunks)
    data = image.getvalue()
    (folder / "image.png").write_bytes(mutate_bytes(data, rng) if rng.random() < 0.2 else data)
    return ["sample", world.model, "--from", folder / "image.png", "--out", folder / "out", "--no-grid"]


TARGETS: dict[str, Target] = {
    "train_config": train_config,
    "dataset_config": dataset_config,
    "caption_table": caption_table,
    "tar": tar,
    "parquet": parquet,
    "lora": lora,
    "single_file": single_file,
    "model_folder": model_folder,
    "manifest": manifest,
    "checkpoint_index": checkpoint_index,
    "log": log,
    "log_pages": log_pages,
    "drawn_image": drawn_image,
    "pages": write_pages,
}
