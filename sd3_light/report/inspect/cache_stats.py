"""Statistics of a cache from its own files, in bounded memory however large it is.

The manifest is read in full. Arrow files and safetensors headers are read from random shards until they hold a bounded
number of samples.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sd3_light.config.faults import UserError
from sd3_light.core.caption_lengths import CaptionSample, CutCaptions, count_cut_captions
from sd3_light.core.columns import CAPTION, MASK, named_bucket
from sd3_light.core.registry import family_of_folder
from sd3_light.data.manifest import REJECTED, SHARDS, Manifest, ShardEntry
from sd3_light.data.shard_table import column
from sd3_light.data.shards import read_origins, stored_columns
from sd3_light.inputs import parse_json
from sd3_light.randomness import stream
from sd3_light.sources.preprocess import REASONS
from sd3_light.tensor_file import StoredTensor, read_tensor_file

# Han and kana are written without spaces: each such character counts as a word
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+(?:['’-][^\W{_NO_SPACES}]+)*")
_LEAST_SHARE = 0.005  # of a kind of content that is named
_CONTENT_KINDS = {"image": "images", MASK: "masks", CAPTION: "text"}


@dataclass(frozen=True)
class SampleRef:
    """One sample of a cache: a row of a shard."""

    entry: ShardEntry
    row: int


@dataclass
class ShardStats:
    """Statistics over some shards. ``tokens`` are the rows per caption in each ragged column."""

    words: Counter[int] = field(default_factory=Counter)
    tokens: dict[str, Counter[int]] = field(default_factory=dict)
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

    def token_counts(self) -> dict[str, Counter[int]]:
        """Return the tokens per caption where captions differ; columns with equal counts together: `clip_l, clip_g`."""
        names: dict[tuple[tuple[int, int], ...], list[str]] = {}
        for name, counts in self.tokens.items():
            if len(counts) > 1:
                names.setdefault(tuple(sorted(counts.items())), []).append(name)
        return {", ".join(columns): Counter(dict(counts)) for counts, columns in names.items()}

    def byte_shares(self) -> str:
        """Return the share of each kind of content, the largest first: `images 96%, text 3%`."""
        total = max(1, self.bytes_by_kind.total())
        shares = ((name, size / total) for name, size in self.bytes_by_kind.most_common())
        return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= _LEAST_SHARE)


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
    refuse_processed(manifest, folder)
    stats = ShardStats()
    for entry in shard_order(manifest, seed):
        if stats.samples >= samples:
            break
        _add_shard(folder / SHARDS / entry.file, stats)
    return Inspection(folder, manifest, stats, _count_cut(manifest, stats))


def refuse_processed(manifest: Manifest, location: str | Path) -> None:
    """Raise a UserError if shards are the processed data of a script, which have no images and captions to show."""
    if "units" in manifest.recipe:
        samples = int(column(manifest.shards, "count").sum())
        raise UserError(
            f"{location} is the processed data of a script, not a cache: {samples:,} samples in "
            f"{len(manifest.shards):,} shards, {manifest.nbytes / 1e6:,.1f} MB; read it with tasks.ProcessedDataset"
        )


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
    bucket = named_bucket(entry.bucket)
    return entry.resolution[0] * entry.resolution[1], bucket.width / bucket.height, entry.file


def num_words(text: str) -> int:
    """Return the number of words; a character of a script without spaces counts as one."""
    return len(_WORD.findall(text))


def quantile(lengths: Counter[int], share: float) -> int:
    """Return the smallest length that at least ``share`` of all do not exceed; 0 where there are none."""
    reached = 0
    wanted = share * lengths.total()
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


def _add_shard(path: Path, stats: ShardStats) -> None:
    try:
        origins = read_origins(path)
        captions = [origin.captions for origin in origins]
        tokens, sizes = _read_header(path)
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError) as error:
        stats.unreadable.append(f"{path.name}: {error}")
        return
    stats.shards += 1
    stats.captions_per_sample.update(map(len, captions))
    stats.words.update(num_words(caption) for texts in captions for caption in texts)
    stats.examples += [texts[0] for texts in captions[:1] if texts]
    for origin in origins:
        stats.captions.add(origin.key, origin.captions)
    for name, counts in tokens.items():
        stats.tokens.setdefault(name, Counter()).update(counts)
    stats.bytes_by_kind.update(sizes)


def _read_header(path: Path) -> tuple[dict[str, list[int]], Counter[str]]:
    """Return the tokens of every caption in each ragged column, and bytes by kind; values are not read."""
    tensors, metadata = read_tensor_file(path)
    columns = stored_columns(tensors, parse_json(metadata["shard"]))
    kinds = {column.tensors[0]: _CONTENT_KINDS.get(column.reads, column.reads) for column in columns}
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        sizes[kinds.get(name, "index")] += tensor.nbytes
    captions = _numbers(tensors["caption"])
    ragged = [column for column in columns if column.ragged]
    return {column.name: np.diff(_numbers(tensors[column.tensors[1]]))[captions].tolist() for column in ragged}, sizes


def _numbers(tensor: StoredTensor) -> NDArray[np.int64]:
    return np.frombuffer(b"".join(tensor.chunks()), "<i8").astype(np.int64, copy=False)
