"""Check whether a cache fits into host memory (law 10)."""

import json
from pathlib import Path

from sd3_light.system import available_memory

LARGEST_SHARE = 0.8
"""Share of the available memory that a cache may use."""


def manifest_bytes(manifest: Path) -> int | None:
    """Return the bytes of all shards in a manifest; None if it is missing or damaged, which is reported elsewhere."""
    try:
        return sum(int(shard["bytes"]) for shard in json.loads(manifest.read_bytes())["shards"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def too_large(nbytes: int, processes: int = 1) -> str | None:
    """Return why a cache of ``nbytes`` does not fit into memory for each of ``processes``; None if it does."""
    free = available_memory()
    if free is None or nbytes * processes <= LARGEST_SHARE * free:
        return None
    copies = f", {processes} times on this machine," if processes > 1 else ""
    return (
        f"the cache takes {nbytes / 1e9:.1f} GB{copies} and {free / 1e9:.1f} GB of memory are free, of which "
        f"{LARGEST_SHARE:.0%} may be taken; write sd3_streaming_dataset = true"
    )
