"""The inspect stage: what a data set became."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from sd3_light.data.shards import Manifest, read_origins


@dataclass(frozen=True)
class Inspection:
    """Counts of a cache, and a few of its samples."""

    folder: Path
    counts: dict[str, int]
    buckets: dict[str, int]
    bytes: int
    captions: list[str]


def run(cache: Path, examples: int = 5) -> Inspection:
    """Look at a cache by its manifest, and at the captions of its first shard."""
    manifest = Manifest.load(cache)
    buckets: Counter[str] = Counter()
    for shard in manifest.shards:
        buckets[shard.bucket] += shard.count
    origins = read_origins(cache / "shards" / manifest.shards[0].file)
    captions = [caption for origin in origins[:examples] for caption in origin.captions]
    size = sum(shard.bytes for shard in manifest.shards)
    return Inspection(cache, manifest.counts, dict(buckets), size, captions)


def render(found: Inspection) -> Table:
    """One screen."""
    table = Table("what", "value", title=str(found.folder))
    for name, count in found.counts.items():
        table.add_row(name, f"{count:,}")
    for bucket, count in sorted(found.buckets.items()):
        table.add_row(f"bucket {bucket}", f"{count:,} samples")
    samples = max(1, sum(found.buckets.values()))
    table.add_row("on disk", f"{found.bytes / 1e6:,.1f} MB, {found.bytes / samples / 1e3:,.1f} kB a sample")
    for caption in found.captions:
        table.add_row("caption", caption)
    return table
