"""What a cache's own files tell of it, in bounded memory however large it is.

The manifest is read whole; of the shards' Arrow files and indices only as many, chosen at random, as a bounded number
of samples needs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError, safe_open

from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.preprocess import REASONS
from sd3_light.data.shards import read_origins
from sd3_light.randomness import stream

REJECTED = "rejected: "
"""How the names of a manifest's counts of rejects begin."""

# Han and kana are written without spaces: each such character counts as a word
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+(?:['’-][^\W{_NO_SPACES}]+)*")
_PARTS = {"moments": "pictures", "mask": "masks", "clip_l": "text", "clip_g": "text", "t5": "text"}
_BYTES = {"I64": 8, "F16": 2, "BF16": 2, "U8": 1}


@dataclass(frozen=True)
class Pick:
    """One sample of a cache: a row of a shard."""

    entry: ShardEntry
    row: int


@dataclass
class Survey:
    """What the captions of some shards are like. ``tokens`` are T5's, empty where captions are padded to one length;
    ``parts`` are bytes by what they are for; ``unread`` names the shards that could not be read."""

    words: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    captions_each: Counter[int] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    shards: int = 0

    @property
    def samples(self) -> int:
        """How many samples were looked at."""
        return sum(self.captions_each.values())


@dataclass(frozen=True)
class Inspection:
    """A cache: its manifest, and a survey of its captions."""

    folder: Path
    manifest: Manifest
    survey: Survey

    @property
    def counts(self) -> dict[str, int]:
        """The build's own counts, without those of rejects."""
        return {name: count for name, count in self.manifest.counts.items() if not name.startswith(REJECTED)}

    @property
    def rejects(self) -> dict[str, int]:
        """reason -> inputs, the most frequent first."""
        counts = self.manifest.counts
        found = {name.removeprefix(REJECTED): counts[name] for name in counts if name.startswith(REJECTED)}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def buckets(self) -> dict[str, int]:
        """bucket -> samples, the smallest and the tallest first."""
        return tally((shard.bucket, shard.count) for shard in sorted(self.manifest.shards, key=bucket_order))

    @property
    def directories(self) -> dict[str, int]:
        """Label of a source -> samples."""
        return tally((shard.directory, shard.count) for shard in self.manifest.shards)

    @property
    def samples(self) -> int:
        """All samples of the cache; a picture counts once for each of its resolutions."""
        return sum(shard.count for shard in self.manifest.shards)

    @property
    def bytes(self) -> int:
        """All bytes of the shards."""
        return sum(shard.bytes for shard in self.manifest.shards)


def inspect_cache(folder: Path, samples: int, seed: int) -> Inspection:
    """Read a cache's manifest, and the captions of about ``samples`` samples. Raises UserError where there is none."""
    manifest = Manifest.load(folder)
    return Inspection(folder, manifest, survey(folder, manifest, samples, seed))


def survey(folder: Path, manifest: Manifest, samples: int, seed: int) -> Survey:
    """Look into shards chosen at random until they hold ``samples`` samples, or all shards."""
    found = Survey()
    real = manifest.recipe.get("text_tokens") == "real"
    for number in stream(seed, "inspect shards", 0, 0, 0).permutation(len(manifest.shards)).tolist():
        if found.samples >= samples:
            break
        _look_into(folder / SHARDS / manifest.shards[number].file, real, found)
    return found


def draw(shards: Sequence[ShardEntry], number: int, seed: int) -> list[Pick]:
    """``number`` samples (or all), any as likely as any other, by bucket, shard and row."""
    shards = sorted(shards, key=bucket_order)
    ends = np.cumsum([shard.count for shard in shards], dtype=np.int64)
    total = int(ends[-1]) if shards else 0
    # without shuffle numpy draws distinct numbers without a list of all
    chosen = stream(seed, "inspect samples", 0, 0, 0).choice(total, min(number, total), replace=False, shuffle=False)
    picks = []
    for index in sorted(chosen.tolist()):
        at = int(np.searchsorted(ends, index, side="right"))
        picks.append(Pick(shards[at], index - (int(ends[at - 1]) if at else 0)))
    return picks


def bucket_order(entry: ShardEntry) -> tuple[int, float, str]:
    """Sorts by area of the resolution, then from tall to wide, then by name."""
    width, height = sides(entry.bucket)
    return entry.resolution[0] * entry.resolution[1], width / height, entry.file


def sides(bucket: str) -> tuple[int, int]:
    """Width and height of a bucket's text."""
    width, height = bucket.split("x")
    return int(width), int(height)


def num_words(text: str) -> int:
    """Words of a caption; a character of a script without spaces counts as one."""
    return sum(1 for _ in _WORD.finditer(text))


def quantile(lengths: Counter[int], share: float) -> int:
    """The least length that at least ``share`` of all do not exceed; 0 where there are none."""
    reached, wanted = 0, share * sum(lengths.values())
    for length in sorted(lengths):
        reached += lengths[length]
        if reached >= wanted:
            return length
    return 0


def explain(reason: str) -> str:
    """What a reason's code means."""
    return REASONS.get(reason, "a reason that this version does not know")


def tally(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums by name, in the order in which names come."""
    sums: dict[str, int] = {}
    for name, count in pairs:
        sums[name] = sums.get(name, 0) + count
    return sums


def _look_into(path: Path, real: bool, found: Survey) -> None:
    try:
        captions = [origin.captions for origin in read_origins(path)]
        tokens, parts = _look_at_tensors(path, real)
    except (OSError, pa.ArrowException, SafetensorError, LookupError) as fault:
        found.unread.append(f"{path.name}: {fault}")
        return
    found.shards += 1
    found.captions_each.update(map(len, captions))
    found.words.update(num_words(caption) for texts in captions for caption in texts)
    found.examples += [texts[0] for texts in captions[:1] if texts]
    found.tokens.update(tokens)
    found.parts.update(parts)


def _look_at_tensors(path: Path, real: bool) -> tuple[list[int], Counter[str]]:
    """T5 tokens of every caption where they differ, and what the shard's bytes are for; features are not read."""
    tokens: list[int] = []
    parts: Counter[str] = Counter()
    with safe_open(path, framework="numpy") as file:
        if real:
            tokens = np.diff(file.get_tensor("t5.start"))[file.get_tensor("caption")].tolist()
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            tensor = file.get_slice(name)
            parts[_PARTS.get(name.split(".")[0], "index")] += math.prod(tensor.get_shape()) * _BYTES[tensor.get_dtype()]
    return tokens, parts
