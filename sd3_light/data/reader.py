"""Read rows of a shard directly into their destination.

A reader keeps a shard's small index tensors and reads everything else by its offset in the file. It uses no memory map,
so a row costs its own bytes and no pages of its neighbours. `data.shards` has the format.
"""

import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.budget.data_bytes import LATENT_STEP
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.shards import POOLED, TOKENS, CaptionFeatures
from sd3_light.inputs import parse_json, regular_handle
from sd3_light.tensor_file import DTYPES, StoredTensor, read_tensor_file

REMEDY = "run `sd3-light cache CONFIG` to encode it again (or to fetch it again, if the cache is at a URL)"
_FIELDS = {
    "sample_id": ("I64", 1),
    "moments": ("F16", 5),
    "mask": ("U8", 3),
    "caption_start": ("I64", 1),
    "caption": ("I64", 1),
    **{f"{name}.tokens": ("BF16", 2) for name in TOKENS},
    **{f"{name}.start": ("I64", 1) for name in TOKENS},
    **{f"{name}.pooled": ("BF16", 2) for name in POOLED},
}
"""Name in the file -> (dtype, number of dimensions)."""


class TensorSpan:
    """The position of a tensor in its file."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.shape, self.nbytes, self.offset = tensor.shape, tensor.nbytes, tensor.spans[0].start
        self.row_bytes = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize


class RowOffsets(NamedTuple):
    """Offsets of the parts of one sample in its file; (offset, count) of tokens. In the order of `TOKENS`, `POOLED`."""

    moments: int
    mask: int | None
    tokens: list[tuple[int, int]]
    pooled: list[int]


class ShardReader:
    """One open shard.

    Opening compares offsets, shapes, dtypes and counts with the manifest's entry and raises a UserError if they differ.
    It does not hash the file: see `data.verify`. Raises FileNotFoundError if the file is missing. Forked processes may
    share a reader: it keeps no file position. ``index`` holds the shard's int64 tensors.
    """

    def __init__(self, path: Path, entry: ShardEntry) -> None:
        self.path, self.entry = path, entry
        self._file = regular_handle(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)
        try:
            self.fields = self._layout()
            self.index = {name: self._load(name) for name in self.fields if _FIELDS[name][0] == "I64"}
            self._check_index()
            # memory views return single numbers several times faster than arrays
            self._ids, self._caption_start, self._caption = (
                self.index[name].data for name in ("sample_id", "caption_start", "caption")
            )
            self._text = self._text_fields()
        except (ValueError, TypeError, LookupError) as error:
            self._reject(str(error))

    # --- opening ------------------------------------------------------------------------------

    def _reject(self, reason: str) -> NoReturn:
        self.close()
        raise UserError(f"shard {self.path} is damaged or belongs to another cache ({reason}); {REMEDY}")

    def _layout(self) -> dict[str, TensorSpan]:
        size = os.fstat(self._file).st_size
        _expect(size == self.entry.bytes, f"it has {size} bytes, the manifest says {self.entry.bytes}")
        tensors, metadata = read_tensor_file(self.path)
        _expect("shard" in metadata, "its metadata has no entry 'shard'")
        _expect(parse_json(metadata["shard"])["fingerprint"] == self.entry.fingerprint, "its fingerprint differs")
        _check_fields(tensors)
        _check_shapes(tensors, self.entry)
        return {name: TensorSpan(tensor) for name, tensor in tensors.items()}

    def _check_index(self) -> None:
        starts, captions = self.index["caption_start"], self.index["caption"]
        _expect(_is_rising(starts, len(captions), 1), "its caption counts are inconsistent")
        for name in TOKENS:
            first_rows, end = self.index[f"{name}.start"], self.fields[f"{name}.tokens"].shape[0]
            _expect(_is_rising(first_rows, end, 0), f"{name}: its token counts are inconsistent")
            in_range = int(captions.min()) >= 0 and int(captions.max()) < len(first_rows) - 1
            _expect(in_range, f"{name}: a caption index is out of range")

    def _load(self, name: str) -> NDArray[np.int64]:
        field = self.fields[name]
        out = bytearray(field.nbytes)
        self.read(memoryview(out), field.offset)
        return np.frombuffer(out, dtype="<i8").astype(np.int64, copy=False)

    def _text_fields(self) -> tuple[list[tuple[memoryview, int, int]], list[tuple[int, int]]]:
        """Return (first rows, offset, bytes per row) of tokens and (offset, bytes per row) of pooled vectors."""
        tokens = [(self.index[f"{name}.start"], self.fields[f"{name}.tokens"]) for name in TOKENS]
        pooled = [self.fields[f"{name}.pooled"] for name in POOLED]
        return (
            [(starts.data, field.offset, field.row_bytes) for starts, field in tokens],
            [(field.offset, field.row_bytes) for field in pooled],
        )

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
        moments, mask = self.fields["moments"], self.fields.get("mask")
        distinct = self._caption[self._caption_start[row] + caption]
        tokens, pooled = self._text
        return RowOffsets(
            moments.offset + (row * moments.shape[1] + variant) * (moments.row_bytes // moments.shape[1]),
            None if mask is None else mask.offset + row * mask.row_bytes,
            [
                (offset + (first := starts[distinct]) * row_bytes, starts[distinct + 1] - first)
                for starts, offset, row_bytes in tokens
            ],
            [offset + distinct * row_bytes for offset, row_bytes in pooled],
        )

    @property
    def num_variants(self) -> int:
        """Encodings per image: original, then flipped."""
        return self.fields["moments"].shape[1]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape [2C, h, w] of an image's moments."""
        return self.fields["moments"].shape[2:]

    def identity(self, row: int) -> int:
        """Return the id of a sample."""
        return self._ids[row]

    def num_captions(self, row: int) -> int:
        """Return the number of captions of a sample."""
        return self._caption_start[row + 1] - self._caption_start[row]

    def width(self, field: str) -> int:
        """Return the width of an encoder's ``.tokens`` or ``.pooled``."""
        return self.fields[field].shape[1]

    def longest_text(self) -> int:
        """Return the rows of the longest caption: CLIP's, then T5's."""
        clip_l, clip_g, t5 = (np.diff(self.index[f"{name}.start"]) for name in TOKENS)
        return int((np.maximum(clip_l, clip_g) + t5).max())

    def image(self, row: int, variant: int) -> tuple[Tensor, Tensor | None]:
        """Read a sample's moments [2C, h, w] and its mask [h, w], None if the shard has no masks."""
        offsets = self.locate(row, 0, variant)
        moments = self._tensor(offsets.moments, torch.float16, self.latent_shape)
        if offsets.mask is None:
            return moments, None
        mask = self._tensor(offsets.mask, torch.uint8, self.latent_shape[1:])
        return moments, mask.flip(-1) if variant else mask

    def caption(self, row: int, number: int) -> CaptionFeatures:
        """Read the features of a sample's caption."""
        offsets = self.locate(row, number, 0)
        features: CaptionFeatures = {}
        for name, (offset, count) in zip(TOKENS, offsets.tokens, strict=True):
            features[name] = self._tensor(offset, torch.bfloat16, (count, self.width(f"{name}.tokens")))
        for name, offset in zip(POOLED, offsets.pooled, strict=True):
            features[f"{name}.pooled"] = self._tensor(offset, torch.bfloat16, (self.width(f"{name}.pooled"),))
        return features

    def _tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.read(tensor.view(-1).view(torch.uint8).numpy().data, offset)
        return tensor


# --- checks: their ValueErrors become a UserError that names the file --------------------------


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_fields(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError unless the names, dtypes and numbers of dimensions are those of a shard."""
    for name, tensor in tensors.items():
        _expect(name in _FIELDS, f"it contains an unknown tensor {name!r}")
        fits = (tensor.dtype, len(tensor.shape)) == _FIELDS[name] and all(side >= 0 for side in tensor.shape)
        _expect(fits, f"{name} is {tensor.dtype} {list(tensor.shape)}")
    missing = sorted(_FIELDS.keys() - tensors.keys() - {"mask"})
    _expect(not missing, f"it has no {', '.join(missing)}")


def _check_shapes(fields: Mapping[str, StoredTensor], entry: ShardEntry) -> None:
    """Raise ValueError unless shapes agree with the entry and with each other."""
    count = entry.count
    for name, rows in {"sample_id": count, "moments": count, "mask": count, "caption_start": count + 1}.items():
        if name in fields:
            _expect(fields[name].shape[0] == rows, f"{name} has {fields[name].shape[0]} rows, not {rows}")
    _, variants, channels, *latent = fields["moments"].shape
    _expect(variants in (1, 2) and channels > 0 and channels % 2 == 0, f"moments are {fields['moments'].shape}")
    width, cross, height = entry.bucket.partition("x")
    if cross:
        expected = [int(height) // LATENT_STEP, int(width) // LATENT_STEP]
        _expect(latent == expected, f"its latents are {latent}, those of bucket {entry.bucket} {expected}")
    _expect("mask" not in fields or list(fields["mask"].shape[1:]) == latent, "the sizes of masks and latents differ")
    distinct = {fields[f"{name}.start"].shape[0] - 1 for name in TOKENS}
    distinct |= {fields[f"{name}.pooled"].shape[0] for name in POOLED}
    _expect(len(distinct) == 1, "the numbers of captions of its encoders differ")


def _is_rising(starts: NDArray[np.int64], end: int, min_step: int) -> bool:
    return bool(len(starts) > 0 and starts[0] == 0 and starts[-1] == end and (np.diff(starts) >= min_step).all())
