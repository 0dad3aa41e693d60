"""The columns of a cache: the kinds of values that it stores per sample and per caption. Imports no torch.

A shard is a table of declared columns. With n samples, v variants per image (2 if flips are cached) and d distinct
captions, a column is stored as one tensor under its name, by what it ``reads``:

    "caption"   [d, *shape]          a ragged one as NAME.tokens [rows, *shape[1:]] and NAME.start int64 [d + 1]
    "mask"      uint8 [n, h, w]      named `mask`; absent where no sample has one; 255 for samples without
    others      [n, v, *shape]       "image", "video", ...

A column that reads several entries, such as "caption+image" of a model whose text encoder sees the image, is stored
like the one of them that varies most: a caption. Equal captions of two images are then two distinct ones, in all
columns of captions. Builders know captions and images; other entries need a source that has them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

CAPTION = "caption"
IMAGE = "image"
MASK = "mask"
REJECTED = "rejected"
OPTIONAL = (MASK, REJECTED)
"""What some shards of a cache may lack."""
TEACHER = "teacher"
"""The features of a vision model, made of the image: a column of this name, copied and encoded apart from others."""
REFERENCE = "reference."
"""Begins the names of entries that are reference images: ``reference.0`` is the first."""
MOST_REFERENCES = 8
"""As in the config."""
MASK_FACTOR = 8
"""The side in pixels of what a value of a mask stands for, unless its column says otherwise: a VAE's usual factor."""
ROWS = ".tokens"
START = ".start"
"""Suffixes of a ragged column's tensors: the rows of all captions, and the first row of each."""
INDEX = ("sample_id", "caption_start", "caption")
"""The tensors of a shard that are not columns, int64: ids [n], each sample's first caption [n + 1], and which distinct
caption each caption is [k]."""

_DTYPES = {
    8: ("int64", "float64"),
    4: ("int32", "float32"),
    2: ("int16", "float16", "bfloat16"),
    1: ("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"),
}
_ITEM_BYTES = {name: size for size, names in _DTYPES.items() for name in names}


@dataclass(frozen=True, order=True)
class Bucket:
    """An image size in pixels that images are resized to, as text ``64x48`` (width x height); clips have frames.

    A clip is ``64x48x17``, an image has one frame.
    """

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")

    @property
    def area(self) -> int:
        """Number of pixels of a frame."""
        return self.width * self.height


EMPTY = "empty"
"""The bucket of the shard that holds the empty caption, with a blank image of `SMALLEST`."""
SMALLEST = Bucket(1, 1)
"""A bucket whose columns have the fewest rows: one latent pixel."""


def named_bucket(name: str) -> Bucket:
    """Return the bucket of a shard's entry."""
    if name == EMPTY:
        return SMALLEST
    return Bucket(*map(int, name.split("x")))


@dataclass(frozen=True)
class Column:
    """One kind of value that the cache stores, for the images of one bucket.

    ``reads`` is the entry of a sample that it is made of, or several joined by "+". ``dtype`` is torch's name.
    ``shape`` is that of one value; values of a ``ragged`` column differ in the first dimension, which is the largest.
    ``parts`` are the subfolders of the model folder whose bytes decide the values, ``settings`` whatever else decides
    them.
    """

    name: str
    reads: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    ragged: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        is_named = self.name not in INDEX and (self.name == MASK) == (self.reads == MASK)
        if not is_named or (self.ragged and not self.per_caption) or self.dtype not in _ITEM_BYTES:
            raise ValueError(f"{self.layout()} is not a column that a shard can have")

    @property
    def per_caption(self) -> bool:
        """Whether there is a value per distinct caption instead of per sample."""
        return reads_caption(self.reads)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one stored row: a ragged value has several of them."""
        return self.shape[1:] if self.ragged else self.shape

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return _ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of one value; of a ragged column the longest."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the column's tensors in a shard: its values, and where those of a ragged column start."""
        return (self.name + ROWS, self.name + START) if self.ragged else (self.name,)

    def described(self) -> dict[str, Any]:
        """Return what the metadata of a shard says about the column; dtype and shape are those of its tensors."""
        return {"reads": self.reads, "ragged": True} if self.ragged else {"reads": self.reads}

    def fingerprint(self, parts: Mapping[str, str], more_settings: Mapping[str, Any]) -> str:
        """Return a hash of everything that decides the column's values.

        ``parts`` has a hash of each subfolder, ``more_settings`` those that a family does not declare. Caches store
        the fingerprints of the columns of `SMALLEST`, which are the same for all buckets.
        """
        used = {name: parts[name] for name in self.parts}
        settings = {**self.settings, **more_settings}
        facts = [self.name, self.reads, self.dtype, self.shape, self.ragged, used, settings]
        return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def layout(self, with_shape: bool = True) -> str:
        """Return what must be equal in all shards of a cache, as text; ``with_shape``: of one bucket."""
        text = f"{self.name} of the {self.reads}, {'ragged ' if self.ragged else ''}{self.dtype}"
        return f"{text} {list(self.row_shape)}" if with_shape or self.per_caption else text


def mask_column(latent: tuple[int, int], factor: int) -> Column:
    """Return the masks of images whose latents have this height and width, one of ``factor`` pixels' side each."""
    # caches of the usual factor do not state it
    return Column(MASK, MASK, "uint8", latent, (), settings={} if factor == MASK_FACTOR else {"factor": factor})


def mask_factor(columns: Sequence[Column]) -> int:
    """Return the side in pixels of what a value of a mask stands for."""
    factors = (int(column.settings.get("factor", MASK_FACTOR)) for column in columns if column.reads == MASK)
    return next(factors, MASK_FACTOR)


def prepared_columns(moments: Column, channels: int) -> tuple[Column, ...]:
    """Return noisy latents, targets and weights of the loss in a prepared batch, for a column of a VAE's moments."""
    latent = (channels, *moments.shape[1:])
    images = (Column(name, IMAGE, "float32", latent, ()) for name in ("noisy", "target"))
    return (*images, Column(MASK, MASK, "float32", latent[-2:], ()))


def entry_of(column: Column) -> str:
    """Return which entry of a sample a column is made of that is not one of captions: `IMAGE`, `MASK` and so on.

    Columns of one entry are copied and encoded together.
    """
    is_other = column.reads in (*OPTIONAL, TEACHER) or column.reads.startswith(REFERENCE)
    return column.reads if is_other else IMAGE


def stored_entry(entry: str) -> str:
    """Return which entry of a sample, as it is stored, `entry_of` a column is: a teacher sees the image."""
    return IMAGE if entry == TEACHER else entry


def entries_of(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the entries that samples may have besides their captions."""
    own = (stored_entry(entry_of(column)) for column in columns if not column.per_caption)
    return tuple(dict.fromkeys((IMAGE, *OPTIONAL, *own)))


def reference_entry(number: int) -> str:
    """Return the entry of the reference with this number."""
    return f"{REFERENCE}{number}"


def with_references(columns: Sequence[Column], count: int, like: Sequence[Column] | None = None) -> tuple[Column, ...]:
    """Return columns with those of references: one for each of an image, named ``NAME.reference.0`` and so on.

    ``like`` are the columns of an image with the size of references, None: they have that of their image.
    """
    images = [column for column in (like or columns) if column.reads == IMAGE]
    added = [
        replace(column, name=f"{column.name}.{reference_entry(number)}", reads=reference_entry(number))
        for number in range(count)
        for column in images
    ]
    return (*columns, *added)


def with_prepared_references(columns: Sequence[Column], count: int) -> tuple[Column, ...]:
    """Return `prepared_columns` with the latents of references."""
    entries = map(reference_entry, range(count))
    return (*columns, *(replace(columns[0], name=entry, reads=entry) for entry in entries))


def with_pairs(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return columns with those of rejected images: one for each of an image."""
    images = [column for column in columns if column.reads == IMAGE]
    return (*columns, *(replace(column, name=f"{column.name}.{REJECTED}", reads=REJECTED) for column in images))


def reads_caption(reads: str) -> bool:
    """Return whether a column is made of captions, alone or with other entries of their samples."""
    return CAPTION in reads.split("+")


def beside_captions(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the entries that columns read beside captions; without any, samples with equal captions share values."""
    entries = (entry for column in columns if column.per_caption for entry in column.reads.split("+"))
    return tuple(dict.fromkeys(entry for entry in entries if entry != CAPTION))


def difference(columns: Sequence[Column], expected: Sequence[Column], same_bucket: bool = True) -> str | None:
    """Return how the columns of a shard differ from those of another, or from declared ones; None if they agree.

    Shards with and without masks or rejected images agree.
    """
    sides = columns, expected
    absent = [reads for reads in OPTIONAL if not all(any(column.reads == reads for column in side) for side in sides)]
    layouts = [[column.layout(same_bucket) for column in side if column.reads not in absent] for side in sides]
    for own, other in zip_longest(*layouts, fillvalue="no other column"):
        if own != other:
            return f"it has {own}, expected {other}"
    return None
