"""Statistics of a cache from its own files, in bounded memory however large it is.

The manifest is read in full. Arrow files and safetensors headers are read from random shards until they hold a bounded
number of samples.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError, safe_open

from sd3_light.core.caption_lengths import CaptionSample, CutCaptions, count_cut_captions
from sd3_light.core.registry import family_of_folder
from sd3_light.data.manifest import REJECTED, SHARDS, Manifest, ShardEntry
from sd3_light.data.preprocess import REASONS
from sd3_light.data.shard_table import column
from sd3_light.data.shards import read_origins
from sd3_light.randomness import stream
from sd3_light.tensor_file import check_header

# Han and kana are written without spaces: each such character counts as a word
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+(?:['’-][^\W{_NO_SPACES}]+)*")
_CONTENT_KINDS = {"moments": "images", "mask": "masks", "clip_l": "text", "clip_g": "text", "t5": "text"}
_DTYPE_BYTES = {"I64": 8, "F16": 2, "BF16": 2, "U8": 1}


@dataclass(frozen=True)
class SampleRef:
    """One sample of a cache: a row of a shard."""

    entry: ShardEntry
    row: int


@dataclass
class ShardStats:
    """Statistics over some shards. ``tokens`` (of T5) is empty where all captions are padded to one length."""

    words: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    captions_per_sample: Counter[int] = field(default_factory=Counter)
    bytes_by_kind: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    shards: int = 0
    captions: CaptionSample = field(default_factory=CaptionSample)

    @property
    def samples(self) -> int:
        """The number of samples in these shards."""
        return sum(self.captions_per_sample.values())

    @property
    def mean_captions(self) -> float:
        """Captions per sample."""
        return self.words.total() / max(1, self.samples)

    def byte_shares(self, least: float = 0.005) -> str:
        """Return the share of each kind of content, the largest first: `images 96%, text 3%`."""
        total = max(1, self.bytes_by_kind.total())
        shares = ((name, size / total) for name, size in self.bytes_by_kind.most_common())
        return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= least)


@dataclass(frozen=True)
class Inspection:
    """A cache: its manifest, and statistics of some of its shards."""

    folder: Path
    manifest: Manifest
    stats: ShardStats
    cut: CutCaptions | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The counts of the build, without rejects."""
        return {name: count for name, count in self.manifest.counts.items() if not name.startswith(REJECTED)}

    @property
    def rejects(self) -> dict[str, int]:
        """reason -> inputs, the most frequent first."""
        return dict(Counter(self.manifest.rejects).most_common())

    @property
    def buckets(self) -> dict[str, int]:
        """bucket -> samples, the smallest and tallest first."""
        return _totals((shard.bucket, shard.count) for shard in sorted(self.manifest.shards, key=bucket_order))

    @property
    def directories(self) -> dict[str, int]:
        """Label of a source -> samples."""
        labels, counts = (column(self.manifest.shards, name).tolist() for name in ("directory", "count"))
        return _totals(zip(labels, counts, strict=True))

    @property
    def samples(self) -> int:
        """All samples of the cache; an image counts once per resolution."""
        return int(column(self.manifest.shards, "count").sum())

    @property
    def bytes(self) -> int:
        """The size of all shards."""
        return int(column(self.manifest.shards, "bytes").sum())

    @property
    def bytes_per_sample(self) -> float:
        """The mean size of a sample."""
        return self.bytes / max(1, self.samples)


def inspect_cache(folder: Path, samples: int, seed: int) -> Inspection:
    """Read the manifest of a cache, and random shards until they hold ``samples`` samples."""
    manifest = Manifest.load(folder)
    stats = ShardStats()
    real = manifest.recipe.get("text_tokens") == "real"
    for entry in shard_order(manifest, seed):
        if stats.samples >= samples:
            break
        _add_shard(folder / SHARDS / entry.file, real, stats)
    return Inspection(folder, manifest, stats, _count_cut(manifest, stats))


def shard_order(manifest: Manifest, seed: int) -> Iterator[ShardEntry]:
    """Yield the shards in the random order in which statistics read them."""
    order = stream(seed, "inspect shards", 0, 0, 0).permutation(len(manifest.shards))
    return (manifest.shards[index] for index in order.tolist())


def _count_cut(manifest: Manifest, stats: ShardStats) -> CutCaptions | None:
    """Count the captions that were cut, if the tokenizers of the cache are still where they were."""
    folder = Path(manifest.places.get("diffusers_path", ""))
    if not (folder / "tokenizer").is_dir():
        return None
    limits = family_of_folder(folder).encoding.text_limits(folder, manifest.recipe)
    return count_cut_captions(stats.captions.captions(), limits)


def draw_samples(shards: Sequence[ShardEntry], number: int, seed: int) -> list[SampleRef]:
    """Return ``number`` samples (or all), uniformly at random, in the order of bucket, shard and row."""
    shards = sorted(shards, key=bucket_order)
    ends = np.cumsum([shard.count for shard in shards], dtype=np.int64)
    total = int(ends[-1]) if shards else 0
    # without shuffle, numpy draws distinct numbers without listing all of them
    chosen = stream(seed, "inspect samples", 0, 0, 0).choice(total, min(number, total), replace=False, shuffle=False)
    refs = []
    for index in sorted(chosen.tolist()):
        shard = int(np.searchsorted(ends, index, side="right"))
        refs.append(SampleRef(shards[shard], index - (int(ends[shard - 1]) if shard else 0)))
    return refs


def bucket_order(entry: ShardEntry) -> tuple[int, float, str]:
    """Return the sort key of a shard: area of its resolution, then from tall to wide, then its name."""
    width, height = bucket_size(entry.bucket)
    return entry.resolution[0] * entry.resolution[1], width / height, entry.file


def bucket_size(bucket: str) -> tuple[int, int]:
    """Return the width and height of a bucket's name."""
    width, height = bucket.split("x")
    return int(width), int(height)


def num_words(text: str) -> int:
    """Return the number of words; a character of a script without spaces counts as one."""
    return sum(1 for _ in _WORD.finditer(text))


def quantile(lengths: Counter[int], share: float) -> int:
    """Return the smallest length that at least ``share`` of all do not exceed; 0 where there are none."""
    reached, wanted = 0, share * lengths.total()
    for length in sorted(lengths):
        reached += lengths[length]
        if reached >= wanted:
            return length
    return 0


def reason_meaning(reason: str) -> str:
    """Return what the code of a reason means."""
    return REASONS.get(reason, "a reason that this version does not know")


def _totals(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sum by name, in the order of first occurrence."""
    sums: Counter[str] = Counter()
    for name, count in pairs:
        sums[name] += count
    return sums


def _add_shard(path: Path, real: bool, stats: ShardStats) -> None:
    try:
        origins = read_origins(path)
        captions = [origin.captions for origin in origins]
        tokens, sizes = _read_header(path, real)
    except (OSError, pa.ArrowException, SafetensorError, LookupError, ValueError, TypeError) as error:
        stats.unreadable.append(f"{path.name}: {error}")
        return
    stats.shards += 1
    stats.captions_per_sample.update(map(len, captions))
    stats.words.update(num_words(caption) for texts in captions for caption in texts)
    stats.examples += [texts[0] for texts in captions[:1] if texts]
    for origin in origins:
        stats.captions.add(origin.key, origin.captions)
    stats.tokens.update(tokens)
    stats.bytes_by_kind.update(sizes)


def _read_header(path: Path, real: bool) -> tuple[list[int], Counter[str]]:
    """Return the T5 tokens of every caption where lengths differ, and bytes by kind; features are not read."""
    tokens: list[int] = []
    sizes: Counter[str] = Counter()
    check_header(path)
    with safe_open(path, framework="numpy") as file:
        if real:
            tokens = np.diff(file.get_tensor("t5.start"))[file.get_tensor("caption")].tolist()
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensor = file.get_slice(name)
            kind = _CONTENT_KINDS.get(name.split(".")[0], "index")
            sizes[kind] += math.prod(tensor.get_shape()) * _DTYPE_BYTES[tensor.get_dtype()]
    return tokens, sizes
