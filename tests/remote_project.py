"""A project in a bucket, and the content of a cache to compare with one on disk."""

import json
import shutil
from pathlib import Path
from typing import Any

from sd3_light.data.manifest import MANIFEST
from tests.object_store import ObjectStore
from tests.project import Project


class RemoteProject(Project):
    """A project whose images and cache are in a bucket; ``machine`` names the folder for the build's local mirror."""

    def __init__(self, local: Project, store: ObjectStore, folder: Path) -> None:
        shutil.copytree(local.folder, folder, ignore=shutil.ignore_patterns("images", "cache"))
        super().__init__(folder, local.model)
        self.source = store.put(local.images, f"{folder.parent.name}/images")
        self.url = self.source.replace("/images", "/cache")
        self.data(self.data_toml.read_text().replace('path = "images"', f'path = "{self.source}"'))
        text = self.train_toml.read_text().replace('cache_dir = "cache"', f'cache_dir = "{self.url}"')
        self.train_toml.write_text(f'stream_cache_dir = "machine"\n{text}')

    def build(self, machine: str = "machine", **flags: Any) -> int:
        """Run the cache stage as `sd3-light cache` does; return the number of encoded samples."""
        options = (f"stream_cache_dir={machine}", "caching_num_workers=0")
        (report,) = self.build_cache(*options, at_url=True, **flags)
        return report.encoded


def content(files: dict[str, bytes]) -> dict[str, object]:
    """Return shards with their side files, rejects and the manifest without the paths of sources."""
    manifest = json.loads(files[MANIFEST])
    del manifest["places"]
    shards = {name: data for name, data in files.items() if name.startswith("shards/")}
    return {**shards, "manifest": manifest, "rejects": files["rejects.jsonl"]}


def local_content(project: Project) -> dict[str, object]:
    paths = [path for path in project.cache.rglob("*") if path.is_file()]
    return content({str(path.relative_to(project.cache)): path.read_bytes() for path in paths})
