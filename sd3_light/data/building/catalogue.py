"""What the sources hold, on disk beside the cache, so that nothing is looked at twice and memory stays small.

A listing is one directory's rows (key, captions, where the bytes are, or why there is no sample) in parts of a few
thousand. A part is named by what it holds; when its pictures have been looked at (size, content hash) it stands under
that name, and a later run that lists the same rows finds it done. Parts are cut by content, so a new file makes one
part new. `signature` says whether a directory has to be listed at all. What could not be read is not taken as known:
the next run tries again, and until then the rows of a part with such pictures lie beside it.

    catalogue/NAME.json                 signature and parts of one directory
    catalogue/parts/DIGEST.rows.arrow   rows that were listed;  DIGEST.arrow: and looked at
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather

from sd3_light.config import DirectoryConfig, UserError
from sd3_light.data.building.chunks import chunks
from sd3_light.data.building.claims import Claims
from sd3_light.data.building.decode import Probe, SampleLocation, crashed_probe, probe_images
from sd3_light.data.building.workers import WorkerPool
from sd3_light.data.preprocess import PREPROCESS_VERSION, Reject
from sd3_light.data.sources import (
    Record,
    Rejected,
    location_from_text,
    location_text,
    occurrences,
    scan,
    signature,
)
from sd3_light.files import atomic_file, sweep_files, write_atomically
from sd3_light.randomness import sample_id

CATALOGUE_FOLDER = "catalogue"
PART_ROWS = 4096
_LOOK_ROWS = 64
_POLL_SECONDS = 0.2
_KEEP_SECONDS = 7 * 86400.0  # runs that began earlier may still read what the newest listing does not have
_UNREADABLE = "unreadable"

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class InputRow:
    """One input: a sample (its size and content hash once looked at), or one with a ``reason`` why it is none."""

    key: str
    image: str = ""
    mask: str = ""
    version: str = ""
    captions: tuple[str, ...] = ()
    width: int = 0
    height: int = 0
    digest: str = ""
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Source:
    """One [[directory]] as the catalogue knows it. ``label`` begins its samples' keys."""

    label: str
    index: int
    directory: DirectoryConfig

    @property
    def root(self) -> Path:
        """What locations are relative to."""
        return self.directory.path

    @property
    def name(self) -> str:
        """The label as part of a file name."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.label)[:40]
        return f"{plain}-{blake2b(self.label.encode('utf-8', 'surrogateescape'), digest_size=3).hexdigest()}"


@dataclass(frozen=True)
class Listing:
    """The parts that hold a source's rows, in order."""

    source: Source
    parts: tuple[str, ...]
    rows: int


def make_sources(directories: Sequence[DirectoryConfig]) -> list[Source]:
    """The directories with labels that tell them apart, wherever they stand in the list."""
    numbers = occurrences(directories)
    return [
        Source(f"{directory.path.name}#{number}", number, directory)
        for directory, number in zip(directories, numbers, strict=True)
    ]


class Catalogue:
    """The catalogue in a cache folder, filled by any number of processes at once.

    ``share`` (rank, world) says where in the work a process begins, so that they meet late.
    """

    def __init__(self, cache_dir: Path, claims: Claims, share: tuple[int, int] = (0, 1)) -> None:
        self.folder, self.claims, self._share = cache_dir / CATALOGUE_FOLDER, claims, share
        self._parts = self.folder / "parts"

    def refresh(self, sources: Sequence[Source], on_listed: Callable[[int], None]) -> list[Listing]:
        """List what has changed since it was last listed; ``on_listed`` is told of each thousand rows or so."""
        self._parts.mkdir(parents=True, exist_ok=True)
        found: dict[str, Listing] = {}
        self._share_out(
            {source.name: source for source in sources},
            lambda name, source: self._is_listed(source, found),
            lambda name, source: self._list(source, on_listed),
        )
        return [found[source.name] for source in sources]

    def count_unprobed(self, listings: Sequence[Listing]) -> int:
        """How many rows have not been looked at."""
        parts = [part for listing in listings for part in listing.parts if not self._is_looked(part)]
        return sum(_num_rows(self._rows_file(part)) for part in parts)

    def probe_images(self, listings: Sequence[Listing], workers: int, on_looked: Callable[[int], None]) -> None:
        """Read every picture that is new: its size, its content hash, or why it cannot be used."""
        roots = {part: listing.source.root for listing in listings for part in listing.parts}
        with WorkerPool(workers, probe_images, crashed_probe) as pool:
            self._share_out(
                roots,
                lambda part, root: self._is_looked(part),
                lambda part, root: self._look_at(part, root, pool, on_looked),
            )

    def rows(self, part: str, numbers: Sequence[int] | None = None) -> list[InputRow]:
        """The rows of a part that has been looked at, all or those of the given numbers."""
        table = _read_part(self._part(part))
        return _from_table(table if numbers is None else table.take(list(numbers)))

    def rejected(self, part: str) -> list[InputRow]:
        """The rows of a part that has been looked at which are no samples."""
        table = _read_part(self._part(part))
        return _from_table(table.filter(pc.not_equal(table["reason"], "")))

    def prune_except(self, listings: Sequence[Listing]) -> None:
        """Remove the parts that no listing has any more, and what killed processes left."""
        wanted = {part for listing in listings for part in listing.parts}
        for path in self._parts.glob("*.arrow"):
            if path.name.split(".")[0] not in wanted:
                with suppress(FileNotFoundError):
                    if self.claims.started - path.stat().st_mtime > _KEEP_SECONDS:
                        path.unlink()
        for folder in (self.folder, self._parts):
            sweep_files(folder)

    def _share_out(
        self, pieces: dict[str, Any], is_done: Callable[[str, Any], bool], do: Callable[[str, Any], None]
    ) -> None:
        """Do what no other process does, and wait for what others do; a dead one's piece is taken over."""
        names = rotate_to_share(list(pieces), self._share)
        while names := [name for name in names if not self._try(name, pieces[name], is_done, do)]:
            time.sleep(_POLL_SECONDS)

    def _try(self, name: str, piece: Any, is_done: Callable[[str, Any], bool], do: Callable[[str, Any], None]) -> bool:
        """Do a piece unless it is done or another does it; whether it is done now."""
        if is_done(name, piece):
            return True
        if not self.claims.take(name):
            return False
        if not is_done(name, piece):
            do(name, piece)
        self.claims.release(name)
        return is_done(name, piece)

    def _is_listed(self, source: Source, found: dict[str, Listing]) -> bool:
        """Whether someone has compared this source with its listing since we began."""
        path = self._listing_file(source)
        if source.name not in found and self.claims.is_newer(path):
            data = json.loads(path.read_text(encoding="utf-8"))
            found[source.name] = Listing(source, tuple(data["parts"]), data["rows"])
        return source.name in found

    def _list(self, source: Source, on_listed: Callable[[int], None]) -> None:
        path = self._listing_file(source)
        now = _state_of(source)
        known = _read_listing(path)
        standing = all(self._part(part).is_file() or self._rows_file(part).is_file() for part in known.get("parts", ()))
        if known.get("signature") == now and standing:
            for part in known["parts"]:
                self._keep(part)
            path.touch()
            return
        parts, count = [], 0
        for rows in chunks(_listed(source), lambda row: sample_id(row.key), PART_ROWS):
            parts.append(digest := _digest_of(rows))
            count += len(rows)
            on_listed(len(rows))
            if any(row.reason == _UNREADABLE for row in rows):
                now = ""
            if not self._keep(digest):
                _write_table(self._rows_file(digest), rows)
        write_atomically(path, json.dumps({"signature": now, "rows": count, "parts": parts}).encode())

    def _look_at(
        self, part: str, root: Path, pool: WorkerPool[SampleLocation, Probe], on_looked: Callable[[int], None]
    ) -> None:
        rows = _from_table(_read_part(self._rows_file(part)))
        samples = [row for row in rows if not row.reason]
        batches = (samples[start : start + _LOOK_ROWS] for start in range(0, len(samples), _LOOK_ROWS))
        seen: list[Probe] = []
        for looked in pool.map([sample_location(row, root) for row in batch] for batch in batches):
            seen += looked
            on_looked(len(looked))
        answers = iter(seen)
        _write_table(self._part(part), [row if row.reason else _looked(row, next(answers)) for row in rows])
        if any(looked.reason == _UNREADABLE for looked in seen):
            self._rows_file(part).touch()
        else:
            self._rows_file(part).unlink(missing_ok=True)

    def _is_looked(self, part: str) -> bool:
        """Whether a part's pictures were looked at: since we began, if some of them could not be read."""
        rows = self._rows_file(part)
        return self._part(part).is_file() and (not rows.is_file() or self.claims.is_newer(rows))

    def _keep(self, part: str) -> bool:
        """Show that a part that was looked at is in use, so that no other run forgets it; False when there is none."""
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
    """The rows of a source as an earlier run looked at them; None where it has changed since, or was never seen."""
    folder = cache_dir / CATALOGUE_FOLDER
    path = folder / f"{source.name}.json"
    known = _read_listing(path)
    parts = [folder / "parts" / f"{part}.arrow" for part in known.get("parts", ())]
    if known.get("signature") != _state_of(source) or not all(part.is_file() for part in parts):
        return None
    return (row for part in parts for row in _from_table(_read_part(part)))


def _read_listing(path: Path) -> dict[str, Any]:
    """A directory's listing; none where there is none, or a damaged one: it is made anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"signature", "parts", "rows"} <= found.keys() else {}


def _read_part(path: Path) -> Any:
    try:
        return feather.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run again: it is made anew") from error


def _state_of(source: Source) -> str:
    return f"{signature(source.directory, source.index)}-{PREPROCESS_VERSION}"


def rotate_to_share(items: Sequence[Item], share: tuple[int, int]) -> list[Item]:
    """Items begun at a process's own share of them."""
    start = len(items) * share[0] // share[1]
    return [*items[start:], *items[:start]]


def sample_location(row: InputRow, root: Path) -> SampleLocation:
    """Where a row's bytes are."""
    image = location_from_text(row.image, root)
    assert image is not None, row.key
    return SampleLocation(image, location_from_text(row.mask, root))


def _listed(source: Source) -> Iterator[InputRow]:
    for found in scan(source.directory, source.index):
        yield _rejected(found, source.root) if isinstance(found, Rejected) else _sample(found, source.root)


def _rejected(found: Rejected, root: Path) -> InputRow:
    return InputRow(found.key, location_text(found.image, root), reason=found.reason, detail=found.detail)


def _sample(record: Record, root: Path) -> InputRow:
    image, mask = location_text(record.image, root), location_text(record.mask, root)
    try:
        version = record.image.version() + ("" if record.mask is None else f"+{record.mask.version()}")
    except Reject as reject:
        return InputRow(record.key, image, reason=reject.reason, detail=reject.detail)
    return InputRow(record.key, image, mask, version, record.captions)


def _looked(row: InputRow, seen: Probe) -> InputRow:
    return replace(
        row, width=seen.width, height=seen.height, digest=seen.digest, reason=seen.reason, detail=seen.detail
    )


def _digest_of(rows: Sequence[InputRow]) -> str:
    digest = blake2b(str(PREPROCESS_VERSION).encode(), digest_size=16)
    for row in rows:
        digest.update(repr((row.key, row.image, row.mask, row.version, row.captions, row.reason, row.detail)).encode())
    return digest.hexdigest()


_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("key", "image", "mask", "version", "digest", "reason", "detail")),
        ("captions", pa.list_(pa.string())),
        ("width", pa.int32()),
        ("height", pa.int32()),
    ]
)


def _write_table(path: Path, rows: Sequence[InputRow]) -> None:
    columns = {name: [getattr(row, name) for row in rows] for name in InputRow.__dataclass_fields__}
    with atomic_file(path) as temporary:
        # not compressed, so that a unit reads the rows it wants and no others
        feather.write_feather(pa.table(columns, schema=_SCHEMA), str(temporary), compression="uncompressed")


def _from_table(table: Any) -> list[InputRow]:
    return [InputRow(**{**values, "captions": tuple(values["captions"])}) for values in table.to_pylist()]


def _num_rows(path: Path) -> int:
    try:
        return int(feather.read_table(path, columns=["key"], memory_map=True).num_rows)
    except FileNotFoundError:  # another process has just looked at them
        return 0
