"""Batches of a user's dataset for the loop, ordered as in pretraining (law 2); a sample's id is its index."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.data.order import WINDOW, Order, Segment, WindowRange, build_order, rank_slice
from sd3_light.data.stream import CachedBatch
from sd3_light.engines import Launch
from sd3_light.engines.errors import as_user_error
from sd3_light.tasks.prepare import SAMPLES, STORED
from sd3_light.tasks.processed import ProcessedDataset


class SampleOrder:
    """The indices of a dataset by bucket, and the order in which they are seen.

    ``window``: samples are shuffled within that many shards of processed data, so that a step reads few of them.
    ``indices``: only these samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        global_batch: int,
        bucket_of: Callable[[int], Hashable] | None = None,
        window: int | None = None,
        indices: Sequence[int] | None = None,
    ) -> None:
        bucket_of = bucket_of or getattr(dataset, "bucket_of", None)
        segment_of: Callable[[int], Hashable] = (lambda index: None) if window is None else dataset.segment_of  # type: ignore[attr-defined]
        buckets: dict[Hashable, dict[Hashable, list[int]]] = {}
        for index in range(length_of(dataset)) if indices is None else indices:
            with as_user_error(f"bucket_of({index})", "return a name or number for every index"):
                bucket = buckets.setdefault(None if bucket_of is None else bucket_of(index), {})
            bucket.setdefault(segment_of(index), []).append(index)
        self.buckets = [list(buckets[key].values()) for key in sorted(buckets, key=repr)]
        segments = [([Segment(len(segment)) for segment in bucket], global_batch) for bucket in self.buckets]
        self.order: Order = build_order(seed, segments, window or WINDOW)
        self.has_windows = window is not None

    def picks(self, step: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (index, epoch, repeat) of the samples ``start`` to ``stop`` of a step's global batch."""
        picks = self.order.picks(step, start, stop)
        bucket = self.buckets[picks.bucket]
        rows = zip(picks.segment.tolist(), picks.index.tolist(), picks.repeat.tolist(), strict=True)
        return [(bucket[segment][at], picks.epoch, repeat) for segment, at, repeat in rows]


def length_of(dataset: Any) -> int:
    """Return the number of samples; an empty dataset, or one without an index, is an error."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise UserError(f"the dataset is a {kind}; give a list, or a class with __len__ and __getitem__")
    if not len(dataset):
        raise UserError("the dataset is empty; check the path that it reads")
    return len(dataset)


def any_item_of(dataset: Any, index: int) -> Any:
    """Return a sample; errors of the dataset name the sample."""
    with as_user_error(f"sample {index}: the dataset", "fix the sample, or leave it out"):
        return dataset[index]


def item_of(dataset: Any, index: int) -> Mapping[str, Any]:
    """Return a sample's values by name."""
    item = any_item_of(dataset, index)
    if not isinstance(item, Mapping):
        raise UserError(f"sample {index} is a {type(item).__name__}; a dataset returns dicts of values by name")
    return item


ReadItem = Callable[[Any, int], Any]
"""`item_of`, or `any_item_of` for modules with a custom forward."""


class TaskBatches(Dataset[Any]):
    """A rank's micro-batches by number: ``step * micro_batches + micro``; ``prepare.SAMPLES`` are the items.

    Without ``read`` there are none: the trainer has them.
    """

    def __init__(
        self, dataset: Dataset[Any], samples: SampleOrder, launch: Launch, micro_batches: int, read: ReadItem | None
    ) -> None:
        self.dataset = dataset
        self.samples = samples
        self.read = read
        self.launch = launch
        self.micro_batches = micro_batches
        self.load_from_cache = bool(getattr(dataset, "load_from_cache", False))
        self._prefetched: WindowRange | None = None

    def __getitem__(self, number: int) -> CachedBatch:
        step, micro = divmod(number, self.micro_batches)
        size = self.samples.order.batch_size(step)
        start, stop = rank_slice(size, self.launch.rank, self.launch.world_size, micro, self.micro_batches)
        index, epoch, repeat = map(torch.tensor, zip(*self.samples.picks(step, start, stop), strict=True))
        if self.samples.has_windows and isinstance(self.dataset, ProcessedDataset):
            self._prefetch(self.dataset, self.samples.order.next_windows(step, start, stop))
        items = None if self.read is None else [self.read(self.dataset, number) for number in index.tolist()]
        return {SAMPLES: items, STORED: self.load_from_cache, "sample_id": index, "epoch": epoch, "repeat": repeat}

    def _prefetch(self, dataset: ProcessedDataset, windows: WindowRange) -> None:
        """Fetch the shards of the next windows in the background; neighbouring steps have the same."""
        if windows != self._prefetched:
            self._prefetched = windows
            segments = self.samples.buckets[windows.bucket]
            for number in self.samples.order.segments_in(windows).tolist():
                dataset.prefetch(segments[number][0])
