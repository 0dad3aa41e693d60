"""The data browser: the samples of a cache page by page, or those whose captions contain a text."""

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlencode

import pyarrow as pa
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.core.columns import named_bucket
from sd3_light.data.manifest import SHARDS, ShardEntry
from sd3_light.data.shards import Origin, read_origins
from sd3_light.pages import render_template
from sd3_light.report.inspect.cache_stats import ShardStats, bucket_order
from sd3_light.report.inspect.source_images import image_location
from sd3_light.report.inspect.verb import Inspection
from sd3_light.sources.buckets import resize_for
from sd3_light.sources.preprocess import Reject, fit
from sd3_light.sources.video import open_still
from sd3_light.ui.folders import Folders

PAGE_SIZE = 24
"""Samples per page."""

_SEARCH_SECONDS = 5.0
_INSPECT_SAMPLES = 24
_LARGEST_SIDE = 512  # pixels of a served image
_UNREADABLE = (OSError, pa.ArrowException, LookupError, ValueError, TypeError)  # a missing or damaged Arrow file


@dataclass(frozen=True)
class BrowsedSample:
    """A sample on a page; ``url`` is the address of its original, cropped as for the cache."""

    origin: Origin
    bucket: str
    url: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        bucket = named_bucket(self.bucket)
        return bucket.width, bucket.height


def caches_page(folders: Folders, datasets: Mapping[str, tuple[Path, Sequence[Path]]] = MappingProxyType({})) -> str:
    """Return the list of datasets, path and train TOMLs each by id, and of caches."""
    rows = []
    notes = []
    for cache_id, folder in folders.caches().items():
        try:
            manifest = folders.manifest(folder)
        except UserError as error:
            notes.append(str(error))
            continue
        rows.append((cache_id, Inspection(folder, manifest, ShardStats())))
    return render_template(
        "caches.html", rows=rows, datasets=datasets, roots=folders.roots, notes=notes, served="/data"
    )


def cache_page(folders: Folders, cache_id: str, number: int = 1, text: str = "") -> str:
    """Return page ``number`` of a cache's samples; with ``text`` only of those with a caption that contains it."""
    folder = folders.cache(cache_id)
    manifest = folders.manifest(folder)
    notes = list[str]()
    shards = sorted(manifest.shards, key=bucket_order)
    first = (number - 1) * PAGE_SIZE
    if text:
        matches = _search(folder, shards, text, first + PAGE_SIZE + 1, notes)
    else:
        matches = list(_slice(folder, shards, first, PAGE_SIZE + 1, notes))
    chosen = matches[first:] if text else matches
    samples = [
        BrowsedSample(origin, entry.bucket, f"/data/{cache_id}/image?{urlencode({'shard': entry.file, 'row': row})}")
        for entry, row, origin in chosen[:PAGE_SIZE]
    ]
    total = sum(entry.count for entry in shards)
    return render_template(
        "browse.html",
        name=folder.absolute().name,
        folder=folder,
        path=f"/data/{cache_id}",
        samples=samples,
        total=total,
        text=text,
        address=lambda page: f"/data/{cache_id}?{urlencode({'page': page, **({'text': text} if text else {})})}",
        has_more=len(chosen) > PAGE_SIZE,
        number=number,
        pages=None if text else -(-total // PAGE_SIZE),
        notes=notes,
        served="/data",
    )


def inspect_page(folders: Folders, cache_id: str) -> str:
    """Return the page of `sd3-light inspect` for a cache."""
    from sd3_light.report.inspect.cache_page import PAGE_SAMPLES, collect_content, render_page  # imports torch
    from sd3_light.report.inspect.cache_stats import inspect_cache

    inspection = inspect_cache(folders.cache(cache_id), PAGE_SAMPLES, seed=0)
    return render_page(collect_content(inspection, _INSPECT_SAMPLES, 0, None), served="/data")


def original_image(folders: Folders, cache_id: str, shard: str, row: int | None) -> bytes:
    """Return a sample's original as WebP, resized and cropped as for the cache. Raises UserError where it is not
    available."""
    folder = folders.cache(cache_id)
    manifest = folders.manifest(folder)
    entry = next((each for each in manifest.shards if each.file == shard), None)
    if entry is None or row is None or not 0 <= row < entry.count:
        raise UserError(f"{folder} has no sample {row} in {shard}")
    try:
        origin = read_origins(folder / SHARDS / entry.file)[row]
    except _UNREADABLE as error:
        message = f"shard {entry.file} cannot be read: {error}; run `sd3-light cache --verify` to repair it"
        raise UserError(message) from error
    try:
        image = open_still(image_location(manifest.places, entry.directory, origin.image))
    except Reject as error:
        raise UserError(f"{origin.key}: {error.detail or error.reason}") from error
    cropped = Image.fromarray(fit(image, resize_for(*image.size, named_bucket(entry.bucket))))
    cropped.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE), Image.Resampling.LANCZOS)  # never enlarges
    buffer = io.BytesIO()
    cropped.save(buffer, "WEBP", quality=88)
    return buffer.getvalue()


Match = tuple[ShardEntry, int, Origin]


def _slice(folder: Path, shards: Sequence[ShardEntry], first: int, count: int, notes: list[str]) -> Iterator[Match]:
    """Yield ``count`` samples from number ``first`` on; only their shards are read."""
    start = 0
    for entry in shards:
        low = max(first - start, 0)
        high = min(first + count - start, entry.count)
        if low < high:
            for row, origin in list(enumerate(_origins(folder, entry, notes)))[low:high]:
                yield entry, row, origin
        start += entry.count


def _search(folder: Path, shards: Sequence[ShardEntry], text: str, most: int, notes: list[str]) -> list[Match]:
    """Return up to ``most`` samples with a caption that contains the text, in the order of the cache."""
    matches: list[Match] = []
    started = time.monotonic()
    seen = 0
    wanted = text.casefold()
    for entry in shards:
        if len(matches) >= most:
            break
        if time.monotonic() - started > _SEARCH_SECONDS:
            notes.append(f"The search stopped after {seen:,} samples, to keep the page fast.")
            break
        origins = _origins(folder, entry, notes)
        seen += len(origins)
        for row, origin in enumerate(origins):
            if any(wanted in caption.casefold() for caption in origin.captions):
                matches.append((entry, row, origin))
    return matches[:most]


def _origins(folder: Path, entry: ShardEntry, notes: list[str]) -> list[Origin]:
    try:
        return read_origins(folder / SHARDS / entry.file)
    except _UNREADABLE as error:
        notes.append(f"The samples of shard {entry.file} are not shown, it cannot be read: {error}")
        return []
