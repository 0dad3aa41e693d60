"""Bytes of samples: in the cache on disk, as prepared micro-batches, and in the loader's host memory (law 10).

Pure arithmetic; each number comes with its formula. Bytes follow from the columns that a family declares, of its cache
or of its prepared batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sd3_light.core.columns import MASK, Column
from sd3_light.cost.amount import MIB, Amount

MALLOC_CACHE_BYTES = 64 * MIB
"""Upper bound of the freed memory that the C library keeps in a process that builds batches: twice the 32 MiB above
which an allocation always goes to the kernel."""


def image_bytes(columns: Sequence[Column], variants: int = 1, mask: bool = False) -> Amount:
    """Return the bytes of one image, with ``mask`` also of its mask: all columns but those of captions."""
    images = _bytes_of([column for column in columns if not column.per_caption and column.reads != MASK])
    formula = f"{variants} variants·{images.formula}" if variants > 1 else images.formula
    masks = _bytes_of([column for column in columns if mask and column.reads == MASK])
    return Amount(variants * images.value + masks.value, f"{formula} + {masks.formula} mask" if mask else formula)


def caption_bytes(columns: Sequence[Column]) -> Amount:
    """Return the bytes of one caption, the longest in ragged columns."""
    return _bytes_of([column for column in columns if column.per_caption])


def _bytes_of(columns: Sequence[Column]) -> Amount:
    """Return the bytes of one value of each column: `(77·768 + 256·4096 + 768)·2 B`."""
    terms = []
    for size in dict.fromkeys(column.item_bytes for column in columns):
        shapes = ["·".join(map(str, column.shape)) for column in columns if column.item_bytes == size]
        terms.append(f"({' + '.join(shapes)})·{size} B" if len(shapes) > 1 else f"{shapes[0]}·{size} B")
    return Amount(sum(column.nbytes for column in columns), " + ".join(terms))


def sample_bytes(columns: Sequence[Column], mask: bool = False) -> int:
    """Return the cache bytes of one sample, without its fingerprint in the Arrow file (a few hundred bytes)."""
    return image_bytes(columns, mask=mask).value + caption_bytes(columns).value


def latent_bytes(prepared: Sequence[Column], batch: int, mask: bool = False) -> int:
    """Return the bytes of a prepared micro-batch's noisy latents, targets and masks."""
    return batch * image_bytes(prepared, mask=mask).value


def batch_bytes(prepared: Sequence[Column], batch: int, mask: bool = False) -> Amount:
    """Return the bytes of one prepared micro-batch, an upper bound for GPUs, which get cached values and add noise.

    Samples add their time and the lengths of ragged columns.
    """
    image = image_bytes(prepared, mask=mask)
    caption = caption_bytes(prepared)
    value = batch * (image.value + caption.value + 4 + 8 * sum(column.ragged for column in prepared))
    return Amount(value, f"{at_most(prepared)}B·({image.formula} + {caption.formula})")


def at_most(prepared: Sequence[Column]) -> str:
    """Return the prefix of numbers that hold for the longest caption."""
    return "at most " if any(column.ragged for column in prepared) else ""


def open_shard_bytes(shard_size: int) -> int:
    """Return the bytes that an open shard holds in memory: ids, and the offsets of captions and tokens,
    of one caption per image."""
    return 8 * 6 * shard_size


def resident_index_bytes(samples: int, captions: int) -> int:
    """Return the host memory of the index of a cache that is held in memory: ids, and offsets of images and text."""
    return 8 * (4 * samples + 5 * captions)


@dataclass(frozen=True)
class ReaderMemory:
    """What a process that prepares micro-batches holds beside them.

    These are the ``read`` bytes of a micro-batch's samples, three times its ``latents`` (noise, the posterior draw and
    intermediate values), malloc's cache, the indices of ``open_shards`` shards, and the ``downloads`` in progress from
    a URL.
    """

    shard_size: int
    open_shards: int
    latents: int = 0
    read: int = 0
    downloads: int = 0

    def amount(self) -> Amount:
        """Return the bytes and their formula."""
        index = open_shard_bytes(self.shard_size)
        downloads = f" + {self.downloads / MIB:.0f} MiB downloads" if self.downloads else ""
        formula = (
            f"3·{self.latents / MIB:.1f} MiB latents + {self.read / MIB:.1f} MiB read + 64 MiB malloc + "
            f"{self.open_shards} open shards·{index / 1024:.1f} KiB{downloads}"
        )
        value = 3 * self.latents + self.read + MALLOC_CACHE_BYTES + self.open_shards * index + self.downloads
        return Amount(value, formula)


def loader_bytes(prepared: Amount, workers: int, prefetch: int, reader: ReaderMemory, in_use: int = 1) -> Amount:
    """Return the host memory of one rank's loader, without interpreters.

    It holds the prefetched micro-batches, those of the step ``in_use`` and one being copied to a device; each process
    that prepares them adds that of a ``reader``.
    """
    preparers = max(1, workers)
    in_copy = int(workers > 0)
    own = reader.amount()
    batches = workers * prefetch + in_use + in_copy
    formula = (
        f"({workers} workers·{prefetch} prefetched + {in_use} in use + {in_copy} in copy)·micro-batch + "
        f"{preparers}·({own.formula})"
    )
    return Amount(batches * prepared.value + preparers * own.value, formula)
