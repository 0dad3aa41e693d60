"""What the cache of a project holds, and changes of its samples."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from sd3_light.data.manifest import MANIFEST, SHARDS, Manifest, ShardEntry
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import read_origins
from tests.project import Project


def contents(project: Project) -> dict[str, bytes]:
    """Return the cache as training sees it: shards and their side files, rejects, and the manifest without paths."""
    manifest = json.loads((project.cache / MANIFEST).read_text(encoding="utf-8"))
    shards = {path.name: path.read_bytes() for path in (project.cache / SHARDS).iterdir()}
    facts = {key: value for key, value in manifest.items() if key != "places"}
    return {**shards, "manifest": repr(facts).encode(), "rejects": (project.cache / "rejects.jsonl").read_bytes()}


def reject_lines(project: Project) -> list[dict[str, str]]:
    return [json.loads(line) for line in (project.cache / "rejects.jsonl").read_text(encoding="utf-8").splitlines()]


def shard_of(project: Project, name: str) -> Path:
    """Return the shard that contains the image ``name``."""
    (path,) = (
        path
        for path in (project.cache / SHARDS / entry.file for entry in Manifest.load(project.cache).shards)
        if any(origin.key.endswith(f"/{name}") for origin in read_origins(path))
    )
    return path


def readers(project: Project) -> Iterator[tuple[ShardEntry, ShardReader]]:
    for entry in Manifest.load(project.cache).shards:
        yield entry, ShardReader(project.cache / SHARDS / entry.file, entry)


def harm(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def captions_of(project: Project) -> dict[str, Any]:
    captions: dict[str, Any] = json.loads((project.images / "captions.json").read_text(encoding="utf-8"))
    return captions


def write_captions(project: Project, captions: Mapping[str, Any]) -> None:
    (project.images / "captions.json").write_text(json.dumps(captions), encoding="utf-8")


def change_caption(project: Project, name: str = "000007.png", text: str = "something else") -> None:
    captions = captions_of(project)
    write_captions(project, {**captions, name: [text, *captions[name][1:]]})


def change_image(project: Project, name: str = "000007.png") -> None:
    with Image.open(project.images / name) as image:
        size = image.size
    Image.new("RGB", size, "white").save(project.images / name)
