"""What an update of a cache copies: values in the shards of the old manifest, found before anything is built.

A value is decided by its column and by its image, mask or caption. Each of them has a fingerprint, and a value of the
old manifest is copied where both are equal. The index maps fingerprints that the shards to build have to (old shard,
row). One process writes it, for one plan and one old manifest, and every builder reads it. So what is copied does not
depend on the number of builders, nor on what they have built when another one starts or is started again.

    catalogue/reuse-PLAN-MANIFEST.cells   sorted records of 24 bytes: fingerprint, number of the old shard, row
    catalogue/reuse-PLAN-MANIFEST.arrow   the old shards that are copied from; absent if there are none
    catalogue/reuse-PLAN-MANIFEST.json    the copied columns, the counts and the hash of the records; written last
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
from numpy.typing import NDArray

from sd3_light.cache.sorted_array import SortedArray
from sd3_light.core.columns import IMAGE, MASK, OPTIONAL, REFERENCE, Column, beside_captions, entry_of, stored_entry
from sd3_light.data.cache_plan import CachePlan, Member, PlannedShard, Text, reuse_name, texts_of
from sd3_light.data.manifest import Manifest, ShardEntry, damaged_mark
from sd3_light.data.shard_table import ShardTable
from sd3_light.data.shards import REFERENCES, stored_names
from sd3_light.files import atomic_file, file_sha256, write_atomically
from sd3_light.inputs import lines_of, open_regular, parse_json, read_json_file, require_regular
from sd3_light.runlog import progress
from sd3_light.sources.claims import Claims
from sd3_light.sources.preprocess import TRANSIENT

Place = tuple[int, int]
"""The number of a shard and a row of it: that of a sample, or that of a distinct caption."""

PIXELS = "pixels_fingerprint"
"""A field of the rejects of a shard: the hash of what was decoded."""

_CAPTIONS = "captions"
_FINGERPRINT = 16  # bytes
_RECORD = np.dtype(f"S{_FINGERPRINT + 8}")
_CHUNK = 1 << 14  # records that are compared at a time
_MANY_SHARDS = 500  # to compare fewer takes seconds


@dataclass(frozen=True)
class ValueCounts:
    """Images and distinct captions of shards: those that are encoded and those whose values are all copied."""

    images: int = 0
    copied_images: int = 0
    captions: int = 0
    copied_captions: int = 0

    def __add__(self, other: "ValueCounts") -> "ValueCounts":
        return ValueCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class CopiedColumns:
    """Which columns can be copied: all of an entry of samples (image, mask, rejected), and those of captions by name.

    ``encoded`` are the other columns of captions, ``encoded_entries`` the other entries. ``fingerprints``
    are those of the copied columns. ``beside`` are the images of samples that their captions are encoded
    with.
    """

    entries: tuple[str, ...] = ()
    captions: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    encoded_entries: tuple[str, ...] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    @staticmethod
    def of(columns: Sequence[Column], new: Mapping[str, str], old: Mapping[str, str]) -> "CopiedColumns":
        """Compare the fingerprints of a cache's columns with those of the old manifest."""
        same = {name: fingerprint for name, fingerprint in new.items() if old.get(name) == fingerprint}
        captions = [column.name for column in columns if column.per_caption]
        of_samples = [column for column in columns if not column.per_caption]
        changed = dict.fromkeys(entry_of(column) for column in of_samples if column.name not in same)
        entries = dict.fromkeys(entry for column in of_samples if (entry := entry_of(column)) not in changed)
        known = [name for name in captions if name in same]
        encoded = [name for name in captions if name not in known]
        return CopiedColumns(
            tuple(entries), tuple(known), tuple(encoded), tuple(changed), same, beside_captions(columns)
        )

    def __bool__(self) -> bool:
        return bool(self.entries or self.captions)


@dataclass(frozen=True)
class ShardCopies:
    """What a shard copies: for each entry the places by the numbers of samples, and those of captions by their text.

    The shards of places are numbered as in ``shards``.
    """

    shards: tuple[ShardEntry, ...] = ()
    entries: Mapping[str, Mapping[int, Place]] = field(default_factory=dict)
    captions: Mapping[Text, Place] = field(default_factory=dict)
    columns: CopiedColumns = CopiedColumns()


@dataclass(frozen=True)
class Update:
    """A build on an old manifest: ``shards`` are to be built in the folder ``shards``, and ``columns`` can be copied.

    ``entries`` are those that samples may have.

    ``old`` is the manifest, ``digest`` a hash of its bytes.
    """

    plan: CachePlan
    planned: Sequence[PlannedShard]
    old: Manifest
    digest: str
    columns: CopiedColumns
    shards: Path
    entries: tuple[str, ...] = (IMAGE, *OPTIONAL)

    @property
    def path(self) -> Path:
        """The path of the index, without a suffix."""
        return self.plan.path.with_name(reuse_name(self.plan.path, self.digest))

    def sources(self) -> list[ShardEntry]:
        """Return the old shards to copy from: complete ones that this update does not replace under their name."""
        replaced = {shard.file for shard in self.planned}
        entries = ShardTable.of(self.old.shards) if self.old.shards else ()
        return [entry for entry in entries if entry.file not in replaced and self._exists(entry)]

    def _exists(self, entry: ShardEntry) -> bool:
        path = self.shards / entry.file
        return path.is_file() and path.stat().st_size == entry.bytes and not damaged_mark(path).exists()


class ReuseIndex:
    """The written index of an update. Raises OSError, ValueError and others if its files are missing or damaged."""

    def __init__(self, path: Path) -> None:
        facts = read_json_file(path.with_suffix(".json"))
        lists = ("entries", "captions", "encoded", "encoded_entries", "beside")
        names = {name: tuple(facts["columns"][name]) for name in lists}
        self.columns = CopiedColumns(**{**facts["columns"], **names})
        self.counts = ValueCounts(**facts["counts"])
        cells = path.with_suffix(".cells")
        if file_sha256(cells) != facts["sha256"]:  # a wrong row would be a wrong image
            raise ValueError(f"{cells} is damaged")
        self._cells = _map_records(cells)
        table = path.with_suffix(".arrow")
        self._shards = ShardTable.read(table) if table.is_file() else ()

    def copies(self, members: Sequence[Member]) -> ShardCopies:
        """Return what the shard with these samples copies."""
        texts = list(distinct_texts(members, self.columns.beside))
        fingerprints = [member.fingerprints for member in members]
        entries = {
            entry: self._find(each.get(stored_entry(entry), "") for each in fingerprints)
            for entry in self.columns.entries
        }
        captions = self._find(text.fingerprint for text in texts)
        used = {number for found in (*entries.values(), captions) for number, _ in found.values()}
        numbers = {number: index for index, number in enumerate(sorted(used))}

        def renumbered(found: Mapping[int, Place]) -> dict[int, Place]:
            return {at: (numbers[number], row) for at, (number, row) in found.items()}

        return ShardCopies(
            tuple(self._shards[number] for number in numbers),
            {entry: renumbered(found) for entry, found in entries.items()},
            {texts[at]: place for at, place in renumbered(captions).items()},
            self.columns,
        )

    def _find(self, fingerprints: Iterable[str]) -> dict[int, Place]:
        """Return the places of fingerprints in the index, by their position."""
        records = _as_bytes(fingerprints).astype(_RECORD)
        if not len(records) or not len(self._cells):
            return {}
        index = np.searchsorted(self._cells, records).clip(max=len(self._cells) - 1)
        cells = _columns_of(self._cells[index])
        same = (cells[:, :_FINGERPRINT] == _columns_of(records)[:, :_FINGERPRINT]).all(axis=1)
        places = cells[:, _FINGERPRINT:].copy().view(">u4").tolist()
        return {at: (places[at][0], places[at][1]) for at in np.flatnonzero(same).tolist()}


def distinct_texts(members: Iterable[Member], beside: Sequence[str]) -> dict[Text, int]:
    """Return the distinct captions of samples, numbered in order."""
    texts = dict.fromkeys(text for member in members for text in texts_of(member, beside))
    return {text: number for number, text in enumerate(texts)}


def open_reuse(update: Update, claims: Claims, fetch_tables: Callable[[Iterable[str]], None]) -> ReuseIndex:
    """Return the index of an update. A new one is written by one process while the others wait.

    ``fetch_tables`` makes the Arrow files of shards readable.
    """
    path = update.path

    def write(_: str) -> None:
        _write(update, fetch_tables)

    claims.divide([path.name], lambda _: path.with_suffix(".json").is_file(), write)
    try:
        return ReuseIndex(path)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        write(path.name)  # damaged: it follows from plan and manifest, so rebuild it, once
        return ReuseIndex(path)


def undecoded_lines(shards: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines about images that earlier builds could not decode."""
    for path in shards.glob("*.rejects.jsonl"):
        try:
            with open_regular(path) as file:
                lines = [parse_json(line) for line in lines_of(file)]
        except ValueError:  # it is not a list of rejects, and will be written again
            continue
        yield from (line for line in lines if isinstance(line, dict))


def _write(update: Update, fetch_tables: Callable[[Iterable[str]], None]) -> None:
    columns = update.columns
    names = (*update.entries, _CAPTIONS)
    wanted = {name: SortedArray(f"S{_FINGERPRINT}") for name in names}
    _add_wanted(update, wanted)
    copied = {*map(stored_entry, columns.entries), *([_CAPTIONS] if columns.captions else [])}
    cells = SortedArray(_RECORD)
    searched = {name: array for name, array in wanted.items() if name in copied and len(array.values)}
    used = list(_add_cells(update, searched, cells, fetch_tables))
    images = {entry: wanted[entry] for entry in update.entries if entry != MASK}
    totals = [sum(len(array.values) for array in images.values()), len(wanted[_CAPTIONS].values)]
    whole = [array for entry, array in images.items() if entry not in map(stored_entry, columns.encoded_entries)]
    found = [sum(_count_found(array, cells) for array in whole), 0]
    if not columns.encoded:  # else every caption lacks some value
        found[1] = _count_found(wanted[_CAPTIONS], cells)
    counts = ValueCounts(totals[0] - found[0], found[0], totals[1] - found[1], found[1])
    _save(update.path, columns, counts, used, cells.values)


def _add_wanted(update: Update, wanted: Mapping[str, SortedArray]) -> None:
    """Add the fingerprints of what the shards consist of, without samples that are known to be rejected."""
    # what earlier builds could not decode, this one cannot either
    lines = (line for line in undecoded_lines(update.shards) if line.get("reason") not in TRANSIENT)
    rejects = {str(line[PIXELS]) for line in lines if PIXELS in line}
    total = len(update.planned)
    shown = progress("comparing with the old shards", total, "shards") if total > _MANY_SHARDS else nullcontext()
    with shown as bar:
        for shard in update.planned:
            members = update.plan.members(shard)
            if rejects:
                members = [member for member in members if member.pixels_fingerprint not in rejects]
            fingerprints = [member.fingerprints for member in members]
            for entry in update.entries:
                wanted[entry].add(_as_bytes(each[entry] for each in fingerprints if entry in each))
            texts = distinct_texts(members, update.columns.beside)
            wanted[_CAPTIONS].add(_as_bytes(text.fingerprint for text in texts))
            if bar is not None:
                bar.advance()


def _add_cells(
    update: Update,
    wanted: Mapping[str, SortedArray],
    cells: SortedArray,
    fetch_tables: Callable[[Iterable[str]], None],
) -> Iterator[ShardEntry]:
    """Add the records of old shards whose fingerprints are wanted. Yield the shards that have any."""
    sources = update.sources()
    number = 0
    fetch_tables(entry.file for entry in sources)
    for entry in sources:
        read = dict.fromkeys([*wanted, *update.columns.beside])
        names = list(dict.fromkeys(map(_stored_name, read)))
        table = _read_table((update.shards / entry.file).with_suffix(".arrow"), names, entry)
        if table is None:
            continue
        fingerprints = {name: _fingerprints(table, name, update.columns.beside) for name in wanted}
        records = [_wanted_records(fingerprints[name], wanted[name], number) for name in wanted]
        if any(map(len, records)):
            for part in records:
                cells.add(part)
            yield entry
            number += 1


def _read_table(path: Path, names: list[str], entry: ShardEntry) -> Any:
    """Return columns of the Arrow file of exactly this shard; None if it is damaged or of another build."""
    try:
        require_regular(path)
        table = feather.read_table(path, stored_names(path, names), memory_map=True)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, LookupError):
        return None
    is_same = (table.schema.metadata or {}).get(b"sha256") == entry.sha256.encode()
    return table if is_same and table.num_rows == entry.count else None


def _stored_name(name: str) -> str:
    """Return the column of a shard's Arrow file that has the fingerprints of an entry, or captions."""
    return REFERENCES if name.startswith(REFERENCE) else name if name == _CAPTIONS else f"{name}_fingerprint"


def _fingerprints(table: Any, name: str, beside: Sequence[str]) -> NDArray[np.bytes_]:
    """Return the fingerprints of a shard's rows, or of its distinct captions in their order."""
    if name != _CAPTIONS:
        return _as_bytes(_of_entry(table, name))
    captions = table[_CAPTIONS].to_pylist()
    seen = zip(*(_of_entry(table, entry) for entry in beside), strict=True) if beside else [()] * len(captions)
    images = map("".join, seen)
    texts = dict.fromkeys(Text(text, image) for image, own in zip(images, captions, strict=True) for text in own)
    return _as_bytes(text.fingerprint for text in texts)


def _of_entry(table: Any, entry: str) -> list[str]:
    """Return the fingerprints of an entry of a shard's rows; those of an absent one are empty."""
    if not entry.startswith(REFERENCE):
        return list(table[f"{entry}_fingerprint"].to_pylist())
    if REFERENCES not in table.column_names:
        return [""] * table.num_rows
    number = int(entry.removeprefix(REFERENCE))
    return [(own[number : number + 1] or [""])[0] for own in table[REFERENCES].to_pylist()]


def _wanted_records(fingerprints: NDArray[np.bytes_], wanted: SortedArray, number: int) -> NDArray[np.bytes_]:
    rows = np.flatnonzero(wanted.contains(fingerprints))
    records = np.zeros((len(rows), _RECORD.itemsize), np.uint8)
    records[:, :_FINGERPRINT] = _columns_of(fingerprints)[rows]
    places = np.stack([np.full(len(rows), number), rows], axis=1).astype(">u4")
    records[:, _FINGERPRINT:] = places.view(np.uint8)
    return records.view(_RECORD).ravel()


def _count_found(wanted: SortedArray, cells: SortedArray) -> int:
    """Return how many of the wanted fingerprints have a record."""
    known = cells.values
    matches = 0
    for start in range(0, len(wanted.values) if len(known) else 0, _CHUNK):
        records = wanted.values[start : start + _CHUNK].astype(_RECORD)
        index = np.searchsorted(known, records).clip(max=len(known) - 1)
        matches += int((known[index].astype(f"S{_FINGERPRINT}") == records.astype(f"S{_FINGERPRINT}")).sum())
    return matches


def _save(
    path: Path, columns: CopiedColumns, counts: ValueCounts, used: Sequence[ShardEntry], cells: NDArray[np.bytes_]
) -> None:
    with atomic_file(path.with_suffix(".cells")) as temporary, open(temporary, "wb") as file:
        cells.tofile(file)
    path.with_suffix(".arrow").unlink(missing_ok=True)
    if used:
        with atomic_file(path.with_suffix(".arrow")) as temporary:
            ShardTable.of(used).write(temporary)
    digest = file_sha256(path.with_suffix(".cells"))
    facts = {"columns": asdict(columns), "counts": asdict(counts), "sha256": digest}
    write_atomically(path.with_suffix(".json"), json.dumps(facts).encode())


def _as_bytes(fingerprints: Iterable[str]) -> NDArray[np.bytes_]:
    """Return hexadecimal fingerprints as an array; an empty one becomes zeros, which no hash is."""
    text = "".join(fingerprint or "0" * (2 * _FINGERPRINT) for fingerprint in fingerprints)
    return np.frombuffer(bytes.fromhex(text), f"S{_FINGERPRINT}")


def _columns_of(records: NDArray[np.bytes_]) -> NDArray[np.uint8]:
    """Return records as an array of their bytes: an element of type S would lose the zeros at its end."""
    return np.ascontiguousarray(records).view(np.uint8).reshape(len(records), records.itemsize)


def _map_records(path: Path) -> NDArray[np.bytes_]:
    require_regular(path)
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, _RECORD)
    return np.memmap(path, _RECORD, "r")
