"""Read rows of a shard directly into their destination.

A reader keeps a shard's small index tensors and reads everything else by its offset in the file. It uses no memory map,
so a row costs its own bytes and no pages of its neighbours. `data.shards` has the format.
"""

import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.columns import INDEX, MASK, Column, difference
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.shards import CaptionFeatures, stored_columns, stored_fingerprints
from sd3_light.data.sides import HeldOut, Side
from sd3_light.inputs import parse_json, regular_handle
from sd3_light.tensor_file import DTYPES, StoredTensor, read_tensor_file

REMEDY = "run `sd3-light cache CONFIG` to encode it again (or to fetch it again, if the cache is at a URL)"


class TensorSpan:
    """The position of a tensor in its file."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.shape = tensor.shape
        self.nbytes = tensor.nbytes
        self.offset = tensor.spans[0].start
        self.row_bytes = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize


class RowOffsets(NamedTuple):
    """Offsets of the values of one sample in its file, in the order of the reader's columns of each kind.

    ``ragged`` has (offset, rows).
    """

    fixed: list[int]
    ragged: list[tuple[int, int]]
    mask: int | None


class ShardReader:
    """One open shard.

    Opening compares offsets, shapes, dtypes and counts with the manifest's entry and with the columns that the shard
    declares, and raises a UserError if they differ. It does not hash the file: see `data.verify`. Raises
    FileNotFoundError if the file is missing. Forked processes may share a reader: it keeps no file position. ``index``
    holds the shard's index and the starts of ragged columns, ``columns`` all columns with the shapes in this shard,
    ``fixed`` and ``ragged`` those of each kind without the mask. ``fingerprints`` are those of columns by name,
    ``vae_dtype`` is the precision of the images. ``kept`` are the rows of a side (None: all).
    """

    def __init__(self, path: Path, entry: ShardEntry) -> None:
        self.path = path
        self.entry = entry
        self.kept: NDArray[np.int64] | None = None
        self._file = regular_handle(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)
        try:
            self.fields, stored = self._layout()
            starts = [column.tensors[1] for column in stored if column.ragged]
            self.index = {name: self._load(name) for name in (*INDEX, *starts)}
            self.columns = tuple(self._with_longest(column) for column in stored)
            self.fixed = tuple(column for column in self.columns if not column.ragged and column.reads != MASK)
            self.ragged = tuple(column for column in self.columns if column.ragged)
            self.mask = next((column for column in self.columns if column.reads == MASK), None)
            self._check_counts()
            self._check_index()
            self._prepare_offsets()
        except (ValueError, TypeError, LookupError) as error:
            self._reject(str(error))

    # --- opening ------------------------------------------------------------------------------

    def _reject(self, reason: str) -> NoReturn:
        self.close()
        raise UserError(f"shard {self.path} is damaged or belongs to another cache ({reason}); {REMEDY}")

    def _layout(self) -> tuple[dict[str, TensorSpan], list[Column]]:
        """Return where the tensors are, and the columns that they form."""
        size = os.fstat(self._file).st_size
        _expect(size == self.entry.bytes, f"it has {size} bytes, the manifest says {self.entry.bytes}")
        tensors, metadata = read_tensor_file(self.path)
        _expect("shard" in metadata, "its metadata has no entry 'shard'")
        about = parse_json(metadata["shard"])
        _expect(about["fingerprint"] == self.entry.fingerprint, "its fingerprint differs")
        _expect("columns" in about, "its metadata does not declare its columns")
        columns = stored_columns(tensors, about)
        self.fingerprints = stored_fingerprints(about)
        self.vae_dtype = str(about.get("vae_dtype", "float32"))
        return {name: TensorSpan(tensor) for name, tensor in tensors.items()}, columns

    def _with_longest(self, column: Column) -> Column:
        if not column.ragged:
            return column
        starts = self.index[column.tensors[1]]
        return replace(column, shape=(int((starts[1:] - starts[:-1]).max(initial=0)), *column.row_shape))

    def _check_counts(self) -> None:
        """Raise ValueError unless the numbers of rows agree with the entry and with each other."""
        samples = [column for column in self.columns if not column.per_caption]
        rows = {column.name: self.entry.count for column in samples}
        for name, count in {"sample_id": self.entry.count, **rows, "caption_start": self.entry.count + 1}.items():
            _expect(self.fields[name].shape[0] == count, f"{name} has {self.fields[name].shape[0]} rows, not {count}")
        images = [column for column in samples if column is not self.mask]
        variants = {self.fields[column.name].shape[1] for column in images}
        _expect(len(variants) == 1, "the numbers of variants of its columns differ")
        (self.num_variants,) = variants
        if self.mask is not None:
            fits = any(column.shape[-2:] == self.mask.shape for column in images)
            _expect(fits, "the sizes of masks and latents differ")
        distinct = {len(self.index[column.tensors[1]]) - 1 for column in self.ragged}
        distinct |= {self.fields[column.name].shape[0] for column in self.fixed if column.per_caption}
        _expect(len(distinct) <= 1, "the numbers of captions of its columns differ")
        self.num_distinct = distinct.pop() if distinct else int(self.index["caption"].max(initial=-1)) + 1

    def _check_index(self) -> None:
        starts = self.index["caption_start"]
        captions = self.index["caption"]
        _expect(_is_rising(starts, len(captions), 1), "its caption counts are inconsistent")
        for column in self.ragged:
            first_rows = self.index[column.tensors[1]]
            end = self.fields[column.tensors[0]].shape[0]
            _expect(_is_rising(first_rows, end, 0), f"{column.name}: its token counts are inconsistent")
        in_range = int(captions.min()) >= 0 and int(captions.max()) < self.num_distinct
        _expect(in_range, "a caption index is out of range")

    def _load(self, name: str) -> NDArray[np.int64]:
        field = self.fields[name]
        out = bytearray(field.nbytes)
        self.read(memoryview(out), field.offset)
        return np.frombuffer(out, dtype="<i8").astype(np.int64, copy=False)

    def _prepare_offsets(self) -> None:
        """Keep what `locate` needs; memory views return single numbers several times faster than arrays."""
        self._ids, self._caption_start, self._caption = (self.index[name].data for name in INDEX)
        # a value's number is that of its image or that of its caption
        self._fixed = [(self.fields[c.name].offset, int(c.per_caption), c.nbytes) for c in self.fixed]
        ragged = [(self.index[c.tensors[1]], self.fields[c.tensors[0]]) for c in self.ragged]
        self._ragged = [(starts.data, field.offset, field.row_bytes) for starts, field in ragged]
        self._mask = None if self.mask is None else (self.fields[self.mask.name].offset, self.mask.nbytes)

    def require(self, expected: Sequence[Column], same_bucket: bool = True) -> None:
        """Raise a UserError unless the shard has these columns; see `core.columns.difference`."""
        if problem := difference(self.columns, expected, same_bucket):
            self._reject(problem)

    def keep(self, held_out: HeldOut, side: Side) -> None:
        """Use only the rows of a side. Raises a UserError if the shard has other samples than the manifest says."""
        try:
            self.kept = held_out.rows(self.index["sample_id"], self.entry.file, side)
        except ValueError as error:
            self._reject(str(error))

    def row(self, index: int) -> int:
        """Return the row of the sample with this index on the side in use."""
        return index if self.kept is None else int(self.kept[index])

    # --- reading ------------------------------------------------------------------------------

    def status(self) -> os.stat_result:
        """Return the status of the open file, also after it was deleted or replaced."""
        return os.fstat(self._file)

    def read(self, out: memoryview, offset: int) -> None:
        """Fill ``out`` with the file's bytes from ``offset``."""
        try:
            done = os.preadv(self._file, (out,), offset)
            while done < len(out):  # interrupted by a signal, or the file was truncated
                more = os.preadv(self._file, (out[done:],), offset + done)
                if more == 0:
                    self._reject("it is truncated")
                done += more
        except OSError as error:
            raise UserError(f"cannot read shard {self.path}: {error.strerror}; fix the disk or {REMEDY}") from error

    def locate(self, row: int, caption: int, variant: int) -> RowOffsets:
        """Return the offsets of a sample: one variant of its image, its mask and the features of one caption."""
        distinct = self._caption[self._caption_start[row] + caption]
        numbers = row * self.num_variants + variant, distinct
        mask = self._mask
        return RowOffsets(
            [offset + numbers[per_caption] * nbytes for offset, per_caption, nbytes in self._fixed],
            [
                (offset + (first := starts[distinct]) * row_bytes, starts[distinct + 1] - first)
                for starts, offset, row_bytes in self._ragged
            ],
            None if mask is None else mask[0] + row * mask[1],
        )

    def identity(self, row: int) -> int:
        """Return the id of a sample."""
        return self._ids[row]

    def num_captions(self, row: int) -> int:
        """Return the number of captions of a sample."""
        return self._caption_start[row + 1] - self._caption_start[row]

    def images(self, row: int, variant: int) -> dict[str, Tensor]:
        """Read the values of a sample that are not those of captions; its mask only if the shard has masks."""
        offsets = self.locate(row, 0, variant)
        fixed = zip(self.fixed, offsets.fixed, strict=True)
        values = {column.name: self._value(column, offset) for column, offset in fixed if not column.per_caption}
        if self.mask is not None and offsets.mask is not None:
            mask = self._value(self.mask, offsets.mask)
            values[self.mask.name] = mask.flip(-1) if variant else mask
        return values

    def caption(self, row: int, number: int) -> CaptionFeatures:
        """Read the features of a sample's caption."""
        offsets = self.locate(row, number, 0)
        features: CaptionFeatures = {}
        for column, (offset, count) in zip(self.ragged, offsets.ragged, strict=True):
            features[column.name] = self._value(column, offset, (count,))
        for column, offset in zip(self.fixed, offsets.fixed, strict=True):
            if column.per_caption:
                features[column.name] = self._value(column, offset)
        return features

    def value(self, name: str, number: int) -> Tensor:
        """Read a value of a column: all variants of a sample's image, its mask, or that of a distinct caption."""
        column = next(column for column in self.columns if column.name == name)
        field = self.fields[column.tensors[0]]
        if column.ragged:
            first, end = self.index[column.tensors[1]][number : number + 2].tolist()
            return self._value(column, field.offset + first * field.row_bytes, (end - first,))
        variants = () if column.per_caption or column is self.mask else (self.num_variants,)
        return self._value(column, field.offset + number * field.row_bytes, variants)

    def _value(self, column: Column, offset: int, rows: tuple[int, ...] = ()) -> Tensor:
        tensor = torch.empty((*rows, *column.row_shape), dtype=getattr(torch, column.dtype))
        self.read(tensor.view(-1).view(torch.uint8).numpy().data, offset)
        return tensor


# --- checks: their ValueErrors become a UserError that names the file --------------------------


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_rising(starts: NDArray[np.int64], end: int, min_step: int) -> bool:
    return bool(len(starts) > 0 and starts[0] == 0 and starts[-1] == end and (np.diff(starts) >= min_step).all())
