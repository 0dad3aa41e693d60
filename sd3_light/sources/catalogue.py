"""The catalogue: the contents of the sources, stored beside the cache so that no image is probed twice.

A listing holds one directory's rows (key, captions, location of the bytes, or the reason why an input is rejected) in
parts of a few thousand rows. A part is named by a digest of its rows and written under that name once its images are
probed (size, content hash, a thumbnail if similar images are to be found), so a later run that lists the same rows
reuses it. Parts are cut by content: a new file changes one part. `signature` shows whether a directory must be listed
again. Images that could not be read are retried by the next run; until then the rows of their part are kept beside it.

    catalogue/NAME.json                 signature and parts of one directory
    catalogue/parts/DIGEST.rows.arrow   listed rows
    catalogue/parts/DIGEST.arrow        probed rows
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather

from sd3_light.config import DirectoryConfig, UserError
from sd3_light.config.base import DataLocation
from sd3_light.files import atomic_file, sweep_files, write_atomically
from sd3_light.inputs import read_json_file, require_regular
from sd3_light.randomness import sample_id
from sd3_light.sources.claims import Claims
from sd3_light.sources.decode import CRASHED_PROBE, Probe, SampleLocation, probe_images
from sd3_light.sources.locations import location_from_text, location_text
from sd3_light.sources.preprocess import PREPROCESS_VERSION, Reject
from sd3_light.sources.records import Record, Rejected, location_version
from sd3_light.sources.scan import occurrences, scan
from sd3_light.sources.signature import signature
from sd3_light.sources.workers import BatchPool, WorkerPool

CATALOGUE_FOLDER = "catalogue"
PART_ROWS = 4096
_PROBE_BATCH = 64
_KEEP_SECONDS = 7 * 86400.0  # a run that started earlier may still read parts that the newest listing lacks
_UNREADABLE = "unreadable"
_ROWS_VERSION = 2  # of what a part stores

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InputRow:
    """One input: a sample (with its size and content hash once probed), or a rejected input with a ``reason``.

    A video has ``frames`` at the rate ``fps``, as in `Probe`.
    """

    key: str
    image: str = ""
    mask: str = ""
    version: str = ""
    captions: tuple[str, ...] = ()
    width: int = 0
    height: int = 0
    digest: str = ""
    thumbnail: bytes = b""
    reason: str = ""
    detail: str = ""
    attributes: str = ""
    rejected: str = ""
    mask_digest: str = ""
    rejected_digest: str = ""
    frames: int = 0
    fps: float = 0.0
    references: tuple[str, ...] = ()
    reference_digests: tuple[str, ...] = ()


def size_text(row: InputRow) -> str:
    """Return the size of a probed row for messages: ``64x48``, with the frames of a video."""
    frames = f", {row.frames} frames" if row.frames else ""
    rate = f" at {row.fps:g} per second" if row.frames and row.fps else ""
    return f"{row.width}x{row.height}{frames}{rate}"


@dataclass(frozen=True)
class Source:
    """One [[directory]] of the dataset config. Its samples' keys start with ``label``.

    ``compared``: its images are compared with others, by thumbnails.
    """

    label: str
    index: int
    directory: DirectoryConfig
    compared: bool = False

    @property
    def root(self) -> DataLocation:
        """The folder or URL that locations are relative to."""
        return self.directory.path

    @property
    def drops_similar(self) -> bool:
        """Whether images that are similar to an earlier one are left out."""
        return self.directory.duplicates == "drop_similar"

    @property
    def has_thumbnails(self) -> bool:
        """Whether its images are probed with thumbnails."""
        return self.compared or self.drops_similar

    @property
    def name(self) -> str:
        """The label in a form that is valid in file names."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.label)[:40]
        return f"{plain}-{blake2b(self.label.encode('utf-8', 'surrogateescape'), digest_size=3).hexdigest()}"


@dataclass(frozen=True)
class Listing:
    """The parts with a source's rows, in order, and the numbers of samples that do not match ``where`` and that
    ``exclude`` lists."""

    source: Source
    parts: tuple[str, ...]
    rows: int
    unmatched: int = 0
    excluded: int = 0


def is_end(count: int, identity: int, max_items: int) -> bool:
    """Return whether the item with this hash ends a chunk of ``count`` items.

    The content decides, so that an inserted item changes one or two chunks. They have ``max_items // 4`` to
    ``max_items`` items (the last may have fewer), a little over half of ``max_items`` on average.
    """
    return count >= max_items or (count >= max_items // 4 and identity % max(2, max_items // 3) == 0)


def chunks(items: Iterable[T], identity: Callable[[T], int], max_items: int) -> Iterator[list[T]]:
    """Yield the items in order, in chunks that end as `is_end` says."""
    chunk: list[T] = []
    for item in items:
        chunk.append(item)
        if is_end(len(chunk), identity(item), max_items):
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def make_sources(directories: Sequence[DirectoryConfig], compared: bool = False) -> list[Source]:
    """Give each directory a unique label that does not depend on its position in the list."""
    numbers = occurrences(directories)
    return [
        Source(f"{directory.name}#{number}", number, directory, compared)
        for directory, number in zip(directories, numbers, strict=True)
    ]


class Catalogue:
    """The catalogue in a cache folder. Any number of processes fill it; each starts at its ``share`` (rank, world)."""

    def __init__(self, cache_dir: Path, claims: Claims, share: tuple[int, int] = (0, 1)) -> None:
        self.folder = cache_dir / CATALOGUE_FOLDER
        self.claims = claims
        self._share = share
        self._parts = self.folder / "parts"
        self._unprobed: dict[str, int] = {}  # rows by part that `probe_images` has yet to report

    def refresh(self, sources: Sequence[Source], on_listed: Callable[[int], None]) -> list[Listing]:
        """List the sources that changed; ``on_listed`` is called with the number of new rows, part by part."""
        self._parts.mkdir(parents=True, exist_ok=True)
        listings: dict[str, Listing] = {}
        by_name = {source.name: source for source in sources}
        self.claims.divide(
            rotate_to_share(list(by_name), self._share),
            lambda name: self._is_listed(by_name[name], listings),
            lambda name: self._list(by_name[name], on_listed),
        )
        return [listings[source.name] for source in sources]

    def count_unprobed(self, listings: Sequence[Listing]) -> int:
        """Return the number of rows that have not been probed."""
        parts = [part for listing in listings for part in listing.parts if not self._is_probed(part)]
        self._unprobed = {part: _num_rows(self._rows_file(part)) for part in parts}
        return sum(self._unprobed.values())

    def probe_images(
        self,
        listings: Sequence[Listing],
        workers: int,
        on_probed: Callable[[int], None],
        pool: BatchPool[SampleLocation, Probe] | None = None,
    ) -> None:
        """Read every new image: store its size and content hash, or the reason why it cannot be used.

        ``pool`` reads them; without it, ``workers`` processes of this machine. The numbers for ``on_probed`` add up to
        `count_unprobed`.
        """
        sources = {part: listing.source for listing in listings for part in listing.parts}

        def is_probed(part: str) -> bool:
            is_done = self._is_probed(part)
            if is_done and (rest := self._unprobed.pop(part, 0)) > 0:  # rejected rows, and parts of other processes
                on_probed(rest)
            return is_done

        def count(part: str, num_images: int) -> None:
            self._unprobed[part] = self._unprobed.get(part, 0) - num_images
            on_probed(num_images)

        with WorkerPool(0 if pool else workers, probe_images, CRASHED_PROBE) as own:
            self.claims.divide(
                rotate_to_share(list(sources), self._share),
                is_probed,
                lambda part: self._probe_part(part, sources[part], pool or own, partial(count, part)),
            )

    def rows(self, part: str, numbers: Sequence[int] | None = None) -> list[InputRow]:
        """Return the rows of a probed part, all of them or those with the given numbers."""
        table = _read_part(self._part(part))
        return _from_table(table if numbers is None else table.take(list(numbers)))

    def rejected(self, part: str) -> list[InputRow]:
        """Return the rejected rows of a probed part."""
        table = _read_part(self._part(part))
        return _from_table(table.filter(pc.not_equal(table["reason"], "")))

    def prune_except(self, listings: Sequence[Listing]) -> None:
        """Remove old parts that no listing contains, and temporary files of killed processes."""
        wanted = {part for listing in listings for part in listing.parts}
        for path in self._parts.glob("*.arrow"):
            if path.name.split(".")[0] not in wanted:
                with suppress(FileNotFoundError):
                    if self.claims.started - path.stat().st_mtime > _KEEP_SECONDS:
                        path.unlink()
        for folder in (self.folder, self._parts):
            sweep_files(folder)

    def _is_listed(self, source: Source, listings: dict[str, Listing]) -> bool:
        """Return whether any process has refreshed this listing since this run started."""
        path = self._listing_file(source)
        if source.name not in listings and self.claims.is_newer(path, source.name):
            data = read_json_file(path)
            source = _as_listed(source, data)
            left_out = data.get("unmatched", 0), data.get("excluded", 0)
            listings[source.name] = Listing(source, tuple(data["parts"]), data["rows"], *left_out)
        return source.name in listings

    def _list(self, source: Source, on_listed: Callable[[int], None]) -> None:
        path = self._listing_file(source)
        known = _read_listing(path)
        source = _as_listed(source, known)
        current = _signature_of(source)
        complete = all(self._part(part).is_file() or self._rows_file(part).is_file() for part in known.get("parts", ()))
        if known.get("signature") == current and complete:
            for part in known["parts"]:
                self._mark_used(part)
            path.touch()
            return
        parts = []
        count = 0
        unmatched = itertools.count()
        excluded = itertools.count()
        items = scan(
            source.directory, source.index, on_unmatched=partial(next, unmatched), on_excluded=partial(next, excluded)
        )
        rows_in_order = (_as_row(entry, source.root) for entry in items)
        for rows in chunks(rows_in_order, lambda row: sample_id(row.key), PART_ROWS):
            parts.append(digest := _digest_of(rows, source))
            count += len(rows)
            on_listed(len(rows))
            if any(row.reason == _UNREADABLE for row in rows):
                current = ""
            if not self._mark_used(digest):
                write_part(self._rows_file(digest), rows)
        listing = {"signature": current, "rows": count, "parts": parts, "thumbnails": source.has_thumbnails}
        listing |= {"unmatched": next(unmatched), "excluded": next(excluded)}
        write_atomically(path, json.dumps(listing).encode())

    def _probe_part(
        self, part: str, source: Source, pool: BatchPool[SampleLocation, Probe], on_probed: Callable[[int], None]
    ) -> None:
        rows = _from_table(_read_part(self._rows_file(part)))
        samples = [row for row in rows if not row.reason]
        batches = (samples[start : start + _PROBE_BATCH] for start in range(0, len(samples), _PROBE_BATCH))
        probes: list[Probe] = []
        locations = ([to_probe(sample_location(row, source.root), source) for row in batch] for batch in batches)
        for batch in pool.map(locations):
            probes += batch
            on_probed(len(batch))
        results = iter(probes)
        write_part(self._part(part), [row if row.reason else replace(row, **asdict(next(results))) for row in rows])
        if any(probe.reason == _UNREADABLE for probe in probes):
            self._rows_file(part).touch()
        else:
            self._rows_file(part).unlink(missing_ok=True)

    def _is_probed(self, part: str) -> bool:
        """Return whether a part was probed; if some images were unreadable, whether that was during this run."""
        rows = self._rows_file(part)
        return self._part(part).is_file() and (not rows.is_file() or self.claims.is_newer(rows, part))

    def _mark_used(self, part: str) -> bool:
        """Touch a probed part, so that no other run prunes it. Return False if it does not exist."""
        try:
            os.utime(self._part(part))
        except FileNotFoundError:
            return False
        return True

    def _listing_file(self, source: Source) -> Path:
        return self.folder / f"{source.name}.json"

    def _part(self, digest: str) -> Path:
        return self._parts / f"{digest}.arrow"

    def _rows_file(self, digest: str) -> Path:
        return self._parts / f"{digest}.rows.arrow"


def read_last_listing(cache_dir: Path, source: Source) -> Iterator[InputRow] | None:
    """Return the probed rows of a source from an earlier run; None if it has changed since or was never listed.

    Rows of a source that is compared have no thumbnails if that run did not need them.
    """
    folder = cache_dir / CATALOGUE_FOLDER
    path = folder / f"{source.name}.json"
    known = _read_listing(path)
    source = _as_listed(replace(source, compared=False), known)
    parts = [folder / "parts" / f"{part}.arrow" for part in known.get("parts", ())]
    if known.get("signature") != _signature_of(source) or not all(part.is_file() for part in parts):
        return None
    return (row for part in parts for row in _from_table(_read_part(part)))


def _read_listing(path: Path) -> dict[str, Any]:
    """Return a directory's listing; {} if it is missing or damaged."""
    try:
        listing = read_json_file(path)
    except (FileNotFoundError, ValueError):
        return {}
    return listing if isinstance(listing, dict) and {"signature", "parts", "rows"} <= listing.keys() else {}


def _as_listed(source: Source, listing: dict[str, Any]) -> Source:
    """Return a source whose images keep their thumbnails: another config may need those of the same catalogue."""
    return replace(source, compared=True) if listing.get("thumbnails") is True else source


def _read_part(path: Path) -> Any:
    try:
        require_regular(path)
        return feather.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run again to rebuild it") from error


def _signature_of(source: Source) -> str:
    return f"{signature(source.directory, source.index)}-{_probed_version(source)}"


def _probed_version(source: Source) -> str:
    """Return the version of what probing stores, which the names of signatures and parts contain."""
    fps = source.directory.fps
    videos = "" if source.directory.frames is None else "-videos" if fps is None else f"-videos-{fps:g}"
    thumbnails = "-thumbnails" if source.has_thumbnails else ""
    return f"{PREPROCESS_VERSION}.{_ROWS_VERSION}{thumbnails}{videos}"


def rotate_to_share(items: Sequence[T], share: tuple[int, int]) -> list[T]:
    """Return the items rotated to start at this process's share (rank, world)."""
    start = len(items) * share[0] // share[1]
    return [*items[start:], *items[:start]]


def sample_location(row: InputRow, root: DataLocation) -> SampleLocation:
    """Return the locations of a row's images and mask."""
    image = location_from_text(row.image, root)
    assert image is not None, row.key
    mask, rejected = (location_from_text(text, root) for text in (row.mask, row.rejected))
    references = tuple(filter(None, (location_from_text(text, root) for text in row.references)))
    return SampleLocation(image, mask, rejected=rejected, references=references)


def to_probe(location: SampleLocation, source: Source) -> SampleLocation:
    """Return a location with what a source wants to know of its samples."""
    directory = source.directory
    fps = None if directory.frames is None else directory.fps or 0.0
    return replace(location, with_thumbnail=source.has_thumbnails, fps=fps)


def _as_row(entry: Record | Rejected, root: DataLocation) -> InputRow:
    image = location_text(entry.image, root)
    if isinstance(entry, Rejected):
        return InputRow(entry.key, image, reason=entry.reason, detail=entry.detail)
    try:
        version = location_version(entry.image)
        for other in filter(None, (entry.mask, entry.rejected, *entry.references)):
            version += f"+{location_version(other)}"
    except Reject as reject:
        return InputRow(entry.key, image, reason=reject.reason, detail=reject.detail)
    mask, rejected = (location_text(other, root) for other in (entry.mask, entry.rejected))
    return InputRow(
        entry.key,
        image,
        mask,
        version,
        entry.captions,
        attributes=entry.attributes,
        rejected=rejected,
        references=tuple(location_text(reference, root) for reference in entry.references),
    )


def _digest_of(rows: Sequence[InputRow], source: Source) -> str:
    digest = blake2b(_probed_version(source).encode(), digest_size=16)
    for row in rows:
        digest.update(repr((row.key, row.image, row.mask, row.version, row.captions, row.reason, row.detail)).encode())
        digest.update(f"{row.attributes}{row.rejected}{''.join(row.references)}".encode())
    return digest.hexdigest()


_LISTS = ("captions", "references", "reference_digests")
_ROW_SCHEMA = pa.schema(
    [
        *(
            (name, pa.string())
            for name in (
                *("key", "image", "mask", "version", "attributes", "reason", "detail", "rejected"),
                *("digest", "mask_digest", "rejected_digest"),
            )
        ),
        *((name, pa.list_(pa.string())) for name in _LISTS),
        ("thumbnail", pa.binary()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("frames", pa.int32()),
        ("fps", pa.float64()),
    ]
)


def write_part(path: Path, rows: Sequence[InputRow]) -> None:
    """Write the rows of a part, uncompressed: reading the rows of a unit does not read the whole part."""
    columns = {name: [getattr(row, name) for row in rows] for name in InputRow.__dataclass_fields__}
    with atomic_file(path) as temporary:
        feather.write_feather(pa.table(columns, schema=_ROW_SCHEMA), str(temporary), compression="uncompressed")


def _from_table(table: Any) -> list[InputRow]:
    return [InputRow(**{**values, **{name: tuple(values[name]) for name in _LISTS}}) for values in table.to_pylist()]


def _num_rows(path: Path) -> int:
    try:
        require_regular(path)
        return int(feather.read_table(path, memory_map=True).num_rows)
    except FileNotFoundError:  # another process has just probed them
        return 0
