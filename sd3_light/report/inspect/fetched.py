"""A cache at a URL for inspection: its manifest, its rejects and the shards that are shown, in a temporary folder."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sd3_light.config.base import is_url
from sd3_light.data.manifest import DUPLICATES_FILE, REJECTS_FILE, SHARDS, Manifest, ShardEntry
from sd3_light.data.store.remote import download, load_remote_manifest
from sd3_light.remote_file import read_remote
from sd3_light.report.inspect.cache_stats import draw_samples, refuse_processed, shard_order
from sd3_light.runlog import progress

REMOTE_SAMPLES = 1_000
"""Statistics of a cache at a URL use the captions of about this many samples: whole shards are downloaded for them."""


@contextmanager
def opened(cache: str, cards: int, seed: int) -> Iterator[tuple[Path, int | None]]:
    """Yield the folder of a cache, and how many samples statistics may use (None: the usual number).

    Of a URL the folder contains what statistics and ``cards`` samples of a page need. It is deleted at the end.
    """
    if not is_url(cache):
        yield Path(cache), None
        return
    url = cache.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="sd3-light-inspect-") as parent:
        manifest = load_remote_manifest(url, Path(parent))
        refuse_processed(manifest, url)
        folder = Path(parent) / url.rpartition("/")[2]
        (folder / SHARDS).mkdir(parents=True)
        manifest.save(folder)
        (folder / REJECTS_FILE).write_bytes(read_remote(f"{url}/{REJECTS_FILE}"))
        (folder / DUPLICATES_FILE).write_bytes(read_remote(f"{url}/{DUPLICATES_FILE}"))
        entries = {entry.file: entry for entry in _needed(manifest, cards, seed)}
        with progress("downloading shards", len(entries), "shards") as bar:
            for file, entry in entries.items():
                with open(folder / SHARDS / file, "w+b") as target:
                    download(f"{url}/{SHARDS}/{file}", entry, target)
                table = Path(SHARDS, file).with_suffix(".arrow")
                (folder / table).write_bytes(read_remote(f"{url}/{table}"))
                bar.advance()
        yield folder, REMOTE_SAMPLES


def _needed(manifest: Manifest, cards: int, seed: int) -> Iterator[ShardEntry]:
    count = 0
    for entry in shard_order(manifest, seed):
        if count >= REMOTE_SAMPLES:
            break
        yield entry
        count += entry.count
    yield from (ref.entry for ref in draw_samples(manifest.shards, cards, seed))
