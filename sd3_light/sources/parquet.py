"""Parquet files with image bytes: a binary column, or ``struct{bytes, path}`` as Hugging Face datasets write it.

A scan reads only the captions. Images are read by one cursor per thread, which advances in small batches, so memory
does not grow with the number of rows. It holds one page, which Arrow needs whole (2 GiB at most, usually 1 MB), and a
batch: one row, or `_BATCH_BYTES` if the sizes in the footer are true. An image above `max_image_mb` is not copied.
Reading in the order of the keys is fast, going back is slow.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sd3_light.config.base import is_url
from sd3_light.inputs import require_regular
from sd3_light.sources.access import open_container, open_file
from sd3_light.sources.captions import TEXT_NAMES, Columns, decode_text, texts
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import ScanItem
from sd3_light.sources.scan_context import ScanContext

IMAGE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "img", "image_bytes", "bytes")
"""Column names of the image in order of precedence, compared in lower case."""

_CAPTION_ROWS = 1024
_IMAGE_ROWS = 16
_BATCH_BYTES = 1 << 30
_ERRORS = (pa.ArrowException, OSError)


@dataclass(frozen=True, slots=True)
class ParquetCell:
    """The image in one row of a row group, of at most ``limit`` bytes; 0 if no cell of the group can have more."""

    path: str
    column: str
    group: int
    row: int
    limit: int = 0

    def num_bytes(self) -> int:
        """Return 0: the size is known only after reading."""
        return 0

    def read(self) -> bytes:
        """Read the bytes of the cell; empty for a null, which `decode` rejects as an empty file."""
        try:
            data = _cursor(self.path, self.column).value(self.group, self.row)
        except _ERRORS as error:
            _close_cursor()
            raise Reject("unreadable", f"{self.path!r}: {error}") from error
        except IndexError as error:  # the file has lost its column
            _close_cursor()
            raise Reject("changed_meanwhile", f"{self.path!r}: {error}") from error
        if data is None:
            return b""
        if self.limit and data.size > self.limit:
            raise Reject("file_too_large", f"{data.size / 1e6:,.1f} MB, max_image_mb = {self.limit / 1e6:g}")
        content: bytes = data.to_pybytes()
        return content


class HasImages(Reject):
    """A Parquet file is not a caption table: it has images."""


def scan_parquet(context: ScanContext, path: str, name: str) -> Iterator[ScanItem]:
    """Yield the samples of a Parquet file in order; their names are their row numbers."""
    try:
        with pq.ParquetFile(open_container(path) if is_url(path) else _regular(path)) as file:
            try:
                image, captions = _columns(file.schema_arrow, context.columns)
                selected = _selected_columns(file.schema_arrow, context)
            except Reject as reject:
                yield context.reject_container(name, reject.reason, reject.detail)
                return
            yield from _rows(context, file, path, name, image, captions, selected)
    except _ERRORS as error:
        yield context.reject_container(name, "broken_parquet", f"{type(error).__name__}: {error}")


def table_rows(path: str, columns: Columns, file_names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file without images: file names, captions and columns of simple types.

    Raises Reject("broken_table") if there is no column of file names or of captions, `HasImages` if it has images.
    """
    try:
        with open_container(path) as source, pq.ParquetFile(source) as file:
            schema = file.schema_arrow
            if _column(schema, columns.image_names(IMAGE_NAMES), _holds_bytes) is not None:
                raise HasImages("broken_table", "it has images")
            for names in (columns.image_names(file_names), columns.caption_names()):
                if _column(schema, names, _holds_text) is None:
                    detail = f"none of the columns {schema.names!a:.200} is one of {', '.join(names)}"
                    raise Reject("broken_table", detail)
            chosen = [field.name for field in schema if _holds_text(field.type) or _is_simple(field.type)]
            for group in range(file.num_row_groups):
                size = _batch_rows(file, chosen, group, _CAPTION_ROWS)
                threads = not is_url(path)
                for batch in file.iter_batches(size, row_groups=[group], columns=chosen, use_threads=threads):
                    yield from batch.to_pylist()
    except _ERRORS as error:
        raise Reject("broken_table", f"{type(error).__name__}: {error}") from error


def _columns(schema: Any, columns: Columns) -> tuple[str, list[str]]:
    """Return the columns of images and captions. Raises Reject if one is missing or has the wrong type."""
    image = _column(schema, columns.image_names(IMAGE_NAMES), _holds_bytes)
    choices: list[tuple[str, ...]] = [(name,) for name in columns.captions] or [TEXT_NAMES]
    captions = [column for names in choices if (column := _column(schema, names, _holds_text)) is not None]
    if image is not None and len(captions) == len(choices):
        return image, captions
    key, column = ("image_column", columns.image) if image is None else ("caption_column", columns.caption)
    detail = f"the columns are {', '.join(schema.names)}"
    if column:
        types = ", ".join(f"{field.name}: {field.type}" for field in schema)
        detail = f"no {column!r} ({key}) of the right type; the columns are {types}"
    raise Reject("no_image_column" if image is None else "no_caption_column", detail)


def _selected_columns(schema: Any, context: ScanContext) -> dict[str, str]:
    """Return the columns that ``where`` uses, by their names in it. Raises Reject if one is not of a simple type."""
    if context.selection is None:
        return {}
    context.selection.note_names(schema.names)
    columns = {name: _column(schema, (name,), lambda _: True) for name in context.selection.kinds}
    selected = {name: column for name, column in columns.items() if column is not None}
    for column in selected.values():
        if not _is_simple(kind := schema.field(column).type):
            raise Reject("bad_column", f"{column!r} is of type {kind}; where needs numbers, texts or booleans")
    return selected


def _rows(
    context: ScanContext,
    file: Any,
    path: str,
    name: str,
    image: str,
    captions: Sequence[str],
    selected: dict[str, str],
) -> Iterator[ScanItem]:
    number = 0
    masks = name.removesuffix(".parquet")
    columns = dict.fromkeys((*captions, *selected.values()))
    for group in range(file.num_row_groups):
        row = 0
        limit = _limit(file, image, group, context.max_image_bytes)
        batch_rows = _batch_rows(file, columns, group, _CAPTION_ROWS)
        # a file at a URL is not for several threads
        threads = not is_url(path)
        names = list(columns)
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=threads):
            values = {column: batch.column(column).to_pylist() for column in columns}
            for at in range(len(batch)):
                cell = ParquetCell(path, image, group, row, limit)
                row_name = f"{number:09d}"
                fetch = partial(_texts, [values[column][at] for column in captions], context.columns)
                cells = partial(_cells, values, selected, at)
                yield from context.sample(f"{name}/{row_name}", cell, fetch, f"{masks}/{row_name}", cells)
                row = row + 1
                number = number + 1


def _limit(file: Any, image: str, group: int, most: float) -> int:
    """Return ``most`` if an image of the row group may have more bytes, else 0."""
    return int(most) if _chunk_bytes(file, image, group) > most else 0


def _chunk_bytes(file: Any, column: str, group: int) -> int:
    """Return the bytes of a column in a row group before compression: no value has more, in any encoding."""
    rows = file.metadata.row_group(group)
    chunks = (rows.column(number) for number in range(rows.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}."))


def _batch_rows(file: Any, columns: Iterable[str], group: int, most: int) -> int:
    """Return how many rows to read at once. Equal values are stored once: each may be as large as the column chunk."""
    size = sum(_chunk_bytes(file, column, group) for column in columns)
    return max(1, min(most, _BATCH_BYTES // max(1, size)))


def _cells(values: dict[str, list[Any]], selected: dict[str, str], at: int) -> dict[str, Any]:
    return {name: values[column][at] for name, column in selected.items()}


def _texts(values: Sequence[Any], columns: Columns) -> tuple[str, ...]:
    decoded = [decode_text(value) if isinstance(value, bytes) else value for value in values]
    if len(decoded) == 1:
        return texts(decoded[0], columns.caption)
    return texts(columns.caption_value(dict(zip(columns.captions, decoded, strict=True))), columns.caption)


def _column(schema: Any, names: Sequence[str], fits: Any) -> str | None:
    fitting = [field.name for field in schema if fits(field.type)]
    lowered = {name.lower(): name for name in fitting}
    matches = (name if name in fitting else lowered.get(name.lower()) for name in names)
    return next(filter(None, matches), None)


def _holds_bytes(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_text(kind: Any) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _is_simple(kind: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return _is_simple(kind.value_type)
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    return any(test(kind) for test in (*tests, types.is_string, types.is_large_string, types.is_null))


def _regular(path: str) -> str:
    """Return the path of a regular file, which the library maps into memory; an OSError for others."""
    require_regular(path)
    return path


class _Cursor:
    """Reads one column of one file forward, a few rows at a time."""

    def __init__(self, path: str, column: str) -> None:
        # a buffered stream of pages instead of whole column chunks
        self._source = open_file(path) if is_url(path) else None
        self._file = pq.ParquetFile(self._source or _regular(path), buffer_size=1 << 20, pre_buffer=False)
        self._column = column
        self._threads = self._source is None
        self._start(0)

    def _start(self, group: int) -> None:
        self._group = group
        self._first = 0
        self._values: Any = ()
        rows = _batch_rows(self._file, [self._column], group, _IMAGE_ROWS)
        self._batches = self._file.iter_batches(
            rows, row_groups=[group], columns=[self._column], use_threads=self._threads
        )

    def value(self, group: int, row: int) -> Any:
        """Return a buffer with the bytes of a row, None for a null."""
        if group != self._group or row < self._first:
            self._start(group)
        while row >= self._first + len(self._values):
            self._first += len(self._values)
            batch = next(self._batches, None)
            if batch is None:
                raise Reject("changed_meanwhile", "the file has fewer rows than before")
            column = batch.column(0)
            self._values = pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
        return self._values[row - self._first].as_buffer()

    def close(self) -> None:
        self._file.close()
        if self._source is not None:
            self._source.close()


_current = threading.local()


def _cursor(path: str, column: str) -> _Cursor:
    """Return the thread's cursor; it replaces the cursor of another file."""
    if getattr(_current, "source", None) != (path, column):
        _close_cursor()
        _current.cursor = _Cursor(path, column)
        _current.source = (path, column)
    cursor: _Cursor = _current.cursor
    return cursor


def _close_cursor() -> None:
    if getattr(_current, "source", None) is not None:
        _current.cursor.close()
        _current.cursor = _current.source = None
