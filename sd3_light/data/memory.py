"""Whether a cache fits into host memory (law 10)."""

import json
from pathlib import Path

from sd3_light.system import available_memory

LARGEST_SHARE = 0.8
"""Of the memory that is free now, what a cache may take."""


def manifest_bytes(manifest: Path) -> int | None:
    """Bytes of all shards that a manifest lists; None where it is missing or damaged, which others tell."""
    try:
        return sum(int(shard["bytes"]) for shard in json.loads(manifest.read_bytes())["shards"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def too_large(nbytes: int, processes: int = 1) -> str | None:
    """Why a cache of so many bytes cannot be held in memory by each of ``processes``; None where it can."""
    free = available_memory()
    if free is None or nbytes * processes <= LARGEST_SHARE * free:
        return None
    whose = f", {processes} times on this machine," if processes > 1 else ""
    return (
        f"the cache takes {nbytes / 1e9:.1f} GB{whose} and {free / 1e9:.1f} GB of memory are free, of which "
        f"{LARGEST_SHARE:.0%} may be taken; write sd3_streaming_dataset = true"
    )
