"""The samples of a dataset as columns in memory-mapped Arrow tables: filtered, sorted and counted without row objects.

A million samples take about 30 bytes each of memory beside the pages of the files.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
from numpy.typing import NDArray

from sd3_light.config.condition import BUILT_IN, CAPTION_LENGTH, HEIGHT, WIDTH, ConditionError, parse_condition
from sd3_light.config.faults import UserError
from sd3_light.inputs import read_json_file, require_regular
from sd3_light.sources.buckets import misfit
from sd3_light.sources.catalogue import CATALOGUE_FOLDER, Source
from sd3_light.sources.groups import group_images
from sd3_light.sources.locations import location_from_text
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import Location

SORTS = ("", "pixels", "aspect", "caption length", "similarity")
"""What samples are sorted by; "" is the order of the dataset."""
SHOWS = ("used", "all", "excluded", "rejected", "edited", "duplicates")
"""Which samples are shown."""

_MOST_TAGS = 200
_MOST_COUNTED = 300_000  # samples whose tags are counted

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """What a page shows: ``like`` is the key of an image that others are compared with."""

    show: str = "used"
    text: str = ""
    tag: str = ""
    where: str = ""
    reason: str = ""
    sort: str = ""
    descending: bool = False
    like: str = ""


@dataclass(frozen=True)
class IndexedSample:
    """One row of an index."""

    key: str
    image: str
    captions: tuple[str, ...]
    width: int
    height: int
    reason: str
    detail: str
    source: Source

    @property
    def location(self) -> Location:
        """Where the bytes of its image are. Raises Reject."""
        try:
            location = location_from_text(self.image, self.source.root)
        except ValueError as error:
            raise Reject("missing_file", str(error)) from error
        if location is None:
            raise Reject("missing_file", "it has no image")
        return location


@dataclass(frozen=True)
class SampleIndex:
    """The samples and rejects of a dataset. ``numbers`` are those of their sources, ``parts`` of the same length.

    ``excluded`` are the keys that are left out, ``edited`` those whose captions were changed here. ``groups`` has for
    each row the first of those that look like it, if that is known.
    """

    table: Any
    sources: Sequence[Source]
    numbers: NDArray[np.int16]
    excluded: frozenset[str] = frozenset()
    edited: frozenset[str] = frozenset()
    groups: Rows | None = None

    @staticmethod
    def of_parts(folder: Path, listings: Sequence[tuple[Source, Sequence[str]]]) -> "SampleIndex":
        """Open the parts of listings in a catalogue's folder. Raises UserError if one is damaged or missing."""
        tables = []
        numbers = [np.zeros(0, np.int16)]
        for number, (_, parts) in enumerate(listings):
            for part in parts:
                table = _read(folder / "parts" / f"{part}.arrow")
                tables.append(table)
                numbers.append(np.full(table.num_rows, number, np.int16))
        sources = [source for source, _ in listings]
        return SampleIndex(pa.concat_tables(tables) if tables else _EMPTY, sources, np.concatenate(numbers))

    @staticmethod
    def of_cache(cache: Path, sources: Sequence[Source]) -> "SampleIndex | None":
        """Open what the last `sd3-light cache` has listed; None if that was not all of these sources."""
        listings = []
        folder = cache / CATALOGUE_FOLDER
        try:
            for source in sources:
                listing = read_json_file(folder / f"{source.name}.json")
                parts = listing["parts"]
                if not all(isinstance(part, str) and part.isalnum() for part in parts):
                    return None
                listings.append((source, parts))
            return SampleIndex.of_parts(folder, listings)
        except (OSError, ValueError, LookupError, TypeError, UserError):
            return None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def _starts(self) -> Rows:
        """The position of each sample's first caption among all captions, and their number."""
        lengths = pc.list_value_length(self.table["captions"]).to_numpy().astype(np.int64)
        return np.concatenate([[0], np.cumsum(lengths)])

    @cached_property
    def _captions(self) -> Any:
        return pc.list_flatten(self.table["captions"])

    @cached_property
    def lengths(self) -> Rows:
        """The characters of each sample's longest caption, without the prefix, as `where` counts them."""
        longest = self._per_sample(pc.utf8_length(self._captions).to_numpy().astype(np.int64), np.maximum)
        prefixes = np.array([len(source.directory.caption_prefix) for source in self.sources] or [0])
        return np.maximum(longest - prefixes[self.numbers], 0) if len(self) else longest

    @cached_property
    def sides(self) -> NDArray[np.int64]:
        """Width and height of each image, 0 where they are not known."""
        columns = [self.table[name].to_numpy().astype(np.int64) for name in ("width", "height")]
        return np.stack(columns, axis=1)

    @cached_property
    def is_excluded(self) -> NDArray[np.bool_]:
        """Whether each sample is listed in `exclude`."""
        return self._are_keys(self.excluded)

    @cached_property
    def is_rejected(self) -> NDArray[np.bool_]:
        """Whether each input is rejected."""
        return np.asarray(pc.not_equal(self.table["reason"], "").to_numpy(), bool)

    @cached_property
    def reasons(self) -> dict[str, int]:
        """Reason -> rejected inputs that are not excluded, the most frequent first."""
        chosen = self.table["reason"].filter(pa.array(self.is_rejected & ~self.is_excluded))
        return _counts(chosen)

    @cached_property
    def duplicate_groups(self) -> Rows:
        """For each row the first of its group of equal or similar images; of an image alone, itself."""
        return self._equal_groups() if self.groups is None else self.groups

    @cached_property
    def has_thumbnails(self) -> bool:
        """Whether images can be compared with each other."""
        return len(self) > 0 and bool(pc.any(pc.greater(pc.binary_length(self.table["thumbnail"]), 0)).as_py())

    def with_groups(self) -> "SampleIndex":
        """Return the index with groups of similar images, which takes a while."""
        digests = self.table["digest"]

        def images() -> Iterator[tuple[Sequence[str], bytes]]:
            for digest, thumbnail in zip(digests, self.table["thumbnail"], strict=True):
                yield (digest.as_py(),) if digest.as_py() else (), thumbnail.as_py()

        return replace(self, groups=group_images(images()).astype(np.int64))

    def with_captions(self, changes: Mapping[int, Sequence[str]]) -> "SampleIndex":
        """Return the index with other captions of some rows, which are `edited` now."""
        column = self.table["captions"]
        chunks = []
        start = 0
        for chunk in column.chunks:
            inside = {row - start: texts for row, texts in changes.items() if start <= row < start + len(chunk)}
            if inside:
                values = chunk.to_pylist()
                for row, texts in inside.items():
                    values[row] = list(texts)
                chunk = pa.array(values, chunk.type)
            chunks.append(chunk)
            start += len(column.chunks[len(chunks) - 1])
        position = self.table.schema.get_field_index("captions")
        table = self.table.set_column(position, "captions", pa.chunked_array(chunks, column.type))
        edited = self.edited | {self.table["key"][row].as_py() for row in changes}
        return replace(self, table=table, edited=edited)

    def with_rejects(self, rejects: Mapping[str, tuple[str, str]]) -> "SampleIndex":
        """Return the index with reason and detail of samples that were found to be unusable, by key."""
        rows = [row for row in self.rows_of(list(rejects)).tolist() if not self.is_rejected[row]]
        return self._with_reasons({row: rejects[self.table["key"][row].as_py()] for row in rows})

    def with_misfits(self) -> "SampleIndex":
        """Return the index with the reasons of images that do not fit the buckets of their directory."""
        facts = np.column_stack([self.sides, self.table["frames"].to_numpy(), self.numbers]).astype(np.int64)
        different, inverse = np.unique(facts, axis=0, return_inverse=True)
        reasons = [
            misfit(width, height, self.sources[number].directory, frames) if width else ""
            for width, height, frames, number in different.tolist()
        ]
        numbers = inverse.reshape(-1)
        is_unusable = np.array([bool(reason) for reason in reasons], bool)[numbers] & ~self.is_rejected
        return self._with_reasons({row: (reasons[numbers[row]], "") for row in np.flatnonzero(is_unusable).tolist()})

    def without_reasons(self, keys: Collection[str], reasons: Collection[str]) -> "SampleIndex":
        """Return the index where samples with these keys are not rejected for one of these reasons any more."""
        rows = self.rows_of(list(keys)).tolist()
        return self._with_reasons({row: ("", "") for row in rows if self.table["reason"][row].as_py() in reasons})

    def _with_reasons(self, changes: Mapping[int, tuple[str, str]]) -> "SampleIndex":
        table = self.table
        for item, name in enumerate(("reason", "detail")):
            if changes:
                values = table[name].to_pylist()
                for row, pair in changes.items():
                    values[row] = pair[item]
                position = table.schema.get_field_index(name)
                table = table.set_column(position, name, pa.chunked_array([pa.array(values, pa.string())]))
        return replace(self, table=table)

    def row_of(self, key: str) -> int:
        """Return the row of a sample. Raises UserError for an unknown key."""
        row = int(pc.index(self.table["key"], pa.scalar(key)).as_py())
        if row < 0:
            raise UserError(f"there is no sample {key:.200}; list the images again")
        return row

    def rows_of(self, keys: Sequence[str]) -> Rows:
        """Return the rows of the samples with these keys, in the order of the dataset."""
        return np.flatnonzero(self._are_keys(frozenset(keys)))

    def keys(self, rows: Rows) -> list[str]:
        """Return the keys of rows."""
        return [str(each["key"]) for each in self._take(("key",), rows)]

    def samples(self, rows: Rows) -> list[IndexedSample]:
        """Return some rows."""
        values = self._take(("key", "image", "captions", "width", "height", "reason", "detail"), rows)
        sources = [self.sources[number] for number in self.numbers[rows]]
        return [
            IndexedSample(**{**each, "captions": tuple(each["captions"])}, source=source)
            for each, source in zip(values, sources, strict=True)
        ]

    def _take(self, names: Sequence[str], rows: Rows) -> list[dict[str, Any]]:
        """Return columns of some rows; only the parts with these rows are read."""
        batches = self.table.select(names).to_batches()
        ends = np.cumsum([batch.num_rows for batch in batches])
        order = np.argsort(rows, kind="stable")
        owners = np.searchsorted(ends, rows[order], side="right")
        values: list[dict[str, Any]] = []
        for owner in np.unique(owners).tolist():
            inside = rows[order][owners == owner] - (ends[owner] - batches[owner].num_rows)
            values += batches[owner].take(pa.array(inside)).to_pylist()
        return [values[position] for position in np.argsort(order, kind="stable")]

    def find(self, query: Query) -> Rows:
        """Return the rows that a query matches, in its order. Raises UserError for one that is not valid."""
        rows = np.flatnonzero(self._shown(query) & self._matches(query))
        if query.show == "duplicates":
            order = np.argsort(self.duplicate_groups[rows], kind="stable")
            return rows[order]
        values = self._sort_values(query)
        if values is None:
            return rows[::-1] if query.descending else rows
        ranked = values[rows]
        return rows[np.argsort(-ranked if query.descending else ranked, kind="stable")]

    def tags(self, rows: Rows) -> tuple[dict[str, int], bool]:
        """Return the most frequent tags of rows with the number of captions, and whether all rows were counted."""
        counts: dict[str, int] = {}
        counted = rows[:_MOST_COUNTED]
        for number, source in enumerate(self.sources):
            own = counted[self.numbers[counted] == number]
            mask = np.zeros(len(self), bool)
            mask[own] = True
            captions = pc.list_flatten(self.table["captions"].filter(pa.array(mask)))
            parts = pc.list_flatten(pc.split_pattern(captions, source.directory.cache_shuffle_delimiter.strip() or " "))
            for tag, count in _counts(pc.utf8_trim_whitespace(parts)).items():
                counts[tag] = counts.get(tag, 0) + count
        counts.pop("", None)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return dict(ranked[:_MOST_TAGS]), len(counted) == len(rows)

    def _shown(self, query: Query) -> NDArray[np.bool_]:
        match query.show:
            case "all":
                return np.ones(len(self), bool)
            case "excluded":
                return self.is_excluded
            case "rejected":
                chosen = self.is_rejected & ~self.is_excluded
                return chosen & pc.equal(self.table["reason"], query.reason).to_numpy() if query.reason else chosen
            case "edited":
                return self._are_keys(self.edited)
            case "duplicates":
                used = ~self.is_excluded & ~self.is_rejected
                sizes = np.bincount(self.duplicate_groups[used], minlength=len(self))
                return used & (sizes[self.duplicate_groups] > 1)
        return ~self.is_excluded & ~self.is_rejected

    def _matches(self, query: Query) -> NDArray[np.bool_]:
        matches = np.ones(len(self), bool)
        if query.text:
            has_text = pc.match_substring(self._captions, query.text, ignore_case=True)
            keys = pc.match_substring(self.table["key"], query.text, ignore_case=True).to_numpy()
            matches &= self._per_sample(has_text.to_numpy(), np.logical_or) | keys
        if query.tag:
            matches &= self._has_tag(query.tag)
        if query.where.strip():
            matches &= self._where(query.where)
        return matches

    def _has_tag(self, tag: str) -> NDArray[np.bool_]:
        has_tag = np.zeros(len(self._captions), bool)
        owners = np.repeat(self.numbers, np.diff(self._starts))
        for number, source in enumerate(self.sources):
            ends = _quoted(source.directory.cache_shuffle_delimiter.strip() or " ")
            pattern = rf"(?s)(\A|{ends})\s*{_quoted(tag)}\s*({ends}|\z)"
            has_tag |= (owners == number) & pc.match_substring_regex(self._captions, pattern).to_numpy()
        return self._per_sample(has_tag, np.logical_or)

    def _where(self, where: str) -> NDArray[np.bool_]:
        try:
            condition = parse_condition(where)
        except ConditionError as error:
            raise UserError(f"where: {error}") from error
        if condition.kinds:
            raise UserError(
                f"where: {next(iter(condition.kinds))!r} is a column of a table, which this page does not keep; it "
                f"knows {', '.join(BUILT_IN)}. In the dataset TOML `where` knows all columns"
            )
        # each different size and length is evaluated once
        facts = np.column_stack([self.sides, self.lengths])
        packed = (facts[:, 0] << 42) | (facts[:, 1] << 21) | np.minimum(facts[:, 2], 2**21 - 1)
        _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
        names = (WIDTH, HEIGHT, CAPTION_LENGTH)
        verdicts = [condition.matches(dict(zip(names, map(int, facts[row]), strict=True))) for row in first]
        return np.array(verdicts, bool)[inverse] if len(self) else np.zeros(0, bool)

    def _sort_values(self, query: Query) -> NDArray[Any] | None:
        match query.sort:
            case "":
                return None
            case "pixels":
                return np.asarray(self.sides.prod(axis=1))
            case "aspect":
                return self.sides[:, 0] / np.maximum(self.sides[:, 1], 1)
            case "caption length":
                return self.lengths
            case "similarity":
                return self._differences(query.like)
        raise UserError(f"samples cannot be sorted by {query.sort!r:.40}; use one of {', '.join(SORTS[1:])}")

    def _differences(self, key: str) -> NDArray[np.float64]:
        """Return the mean difference of every image's thumbnail from that of one image; images without one are last."""
        if not key:
            raise UserError("open `similar` below an image to sort by how much others look like it")
        wanted = self.table["thumbnail"][self.row_of(key)].as_py()
        if not wanted:
            raise UserError("the images were not compared yet; press `Compare images` first")
        size = len(wanted)
        one = np.frombuffer(wanted, np.uint8).astype(np.int16)
        differences = np.full(len(self), np.inf)
        start = 0
        for chunk in self.table["thumbnail"].chunks:
            rows = np.flatnonzero(pc.equal(pc.binary_length(chunk), size).to_numpy(zero_copy_only=False))
            data = b"".join(chunk.take(pa.array(rows)).to_pylist())
            others = np.frombuffer(data, np.uint8).reshape(-1, size)
            differences[start + rows] = np.abs(others - one).mean(axis=1)
            start += len(chunk)
        return differences

    def _equal_groups(self) -> Rows:
        encoded = pc.dictionary_encode(self.table["digest"].combine_chunks())
        codes = encoded.indices.to_numpy()
        first = np.full(len(encoded.dictionary) + 1, len(self), np.int64)
        np.minimum.at(first, codes, np.arange(len(self)))
        groups = first[codes]
        is_unknown = pc.equal(self.table["digest"], "").to_numpy()
        return np.where(is_unknown, np.arange(len(self)), groups)

    def _are_keys(self, keys: frozenset[str]) -> NDArray[np.bool_]:
        if not keys:
            return np.zeros(len(self), bool)
        return np.asarray(pc.is_in(self.table["key"], pa.array(sorted(keys), pa.string())).to_numpy(), bool)

    def _per_sample(self, values: NDArray[Any], combine: np.ufunc) -> NDArray[Any]:
        """Combine the values of each sample's captions; 0 without captions."""
        result = np.zeros(len(self), values.dtype)
        filled = np.diff(self._starts) > 0
        if filled.any():
            result[filled] = combine.reduceat(values, self._starts[:-1][filled])
        return result


def _read(path: Path) -> Any:
    try:
        require_regular(path)
        table = feather.read_table(path, memory_map=True)  # with `columns` it would copy them into memory
        table = table.select(_SCHEMA.names)
        table.validate(full=True)  # pyarrow would read outside the file where offsets are damaged
        table = table.cast(_SCHEMA)
        if any(table[name].null_count for name in _SCHEMA.names) or pc.list_flatten(table["captions"]).null_count:
            raise ValueError("values are missing")
        return table
    except (OSError, ValueError, pa.ArrowException, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}); list the images again") from error


_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("key", "image")),
        ("captions", pa.list_(pa.string())),
        ("width", pa.int32()),
        ("height", pa.int32()),
        *((name, pa.string()) for name in ("reason", "detail", "digest")),
        ("thumbnail", pa.binary()),
        ("frames", pa.int32()),
    ]
)
_EMPTY = _SCHEMA.empty_table()


def _quoted(text: str) -> str:
    """Return a pattern of RE2 that matches a text and nothing else."""
    return "\\Q" + text.replace("\\E", "\\E\\\\E\\Q") + "\\E"


def _counts(values: Any) -> dict[str, int]:
    pairs = pc.value_counts(values).to_pylist()
    return dict(sorted(((each["values"], each["counts"]) for each in pairs), key=lambda item: -item[1]))
