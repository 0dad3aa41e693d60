"""Options and results of the cache stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sd3_light.cache.reuse import ValueCounts
from sd3_light.data.shard_table import ShardEntry

Review = Callable[[Sequence[ShardEntry], bool], None]
"""Gets the shards of a cache as they will be, and whether their counts are known; images of new shards may be rejected
when they are decoded."""


@dataclass(frozen=True)
class CacheOptions:
    """Options of the cache stage beyond the config.

    ``trust``: use a cache that has a manifest without checking it against the sources. ``regenerate``: encode
    everything again. ``verify``: hash every shard and encode damaged ones again. ``prune``: delete unused files.
    ``dry_run``: report the state of the cache and write only the catalogue. ``at_url``: build caches at URLs too, which
    are otherwise used as they are. ``part``: (I, N) builds only every N-th shard from the I-th, and no manifest.
    ``finish``: encode no image; write the manifest of the parts. ``ray``: encode on the Ray cluster at this address
    ("": as Ray chooses), with ``ray_actors`` encoders (None: one per GPU or CPU of the cluster). ``review`` gets the
    training set's shards before anything is encoded, and may refuse them.
    """

    trust: bool = False
    regenerate: bool = False
    verify: bool = False
    prune: bool = False
    dry_run: bool = False
    at_url: bool = False
    part: tuple[int, int] | None = None
    finish: bool = False
    ray: str | None = None
    ray_actors: int | None = None
    review: Review | None = None


@dataclass(frozen=True)
class CacheReport:
    """Results for one dataset. ``encoded`` counts the samples of shards that this process built, ``values`` what it
    encoded and copied for them, ``reused`` the samples of other shards, ``small_buckets`` those of buckets below one
    global batch."""

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)
    encoded: int = 0
    reused: int = 0
    small_buckets: dict[str, int] = field(default_factory=dict)
    values: ValueCounts = field(default_factory=ValueCounts)
