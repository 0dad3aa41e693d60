"""Batches of a user's dataset for the loop, ordered as in pretraining (law 2); a sample's id is its index."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.order import Order, Segment, build_order, rank_slice
from sd3_light.engines.errors import as_user_error
from sd3_light.engines.prefetch import pin_host_memory, prefetch_steps
from sd3_light.engines.protocol import StepStream
from sd3_light.tasks.stacking import SampleStacker

TaskBatch = list[dict[str, Any]]


class SampleOrder:
    """The indices of a dataset by bucket, and the order in which they are seen."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, global_batch: int, bucket_of: Callable[[int], Hashable] | None = None
    ) -> None:
        bucket_of = bucket_of or getattr(dataset, "bucket_of", None)
        buckets: dict[Hashable, list[int]] = {}
        for index in range(length_of(dataset)):
            with as_user_error(f"bucket_of({index})", "return a name or number for every index"):
                buckets.setdefault(None if bucket_of is None else bucket_of(index), []).append(index)
        self.buckets = [buckets[key] for key in sorted(buckets, key=repr)]
        self.order: Order = build_order(seed, [([Segment(len(bucket))], global_batch) for bucket in self.buckets])

    def picks(self, step: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (index, epoch, repeat) of the samples ``start`` to ``stop`` of a step's global batch."""
        picks = self.order.picks(step, start, stop)
        positions, repeats = picks.index.tolist(), picks.repeat.tolist()
        bucket = self.buckets[picks.bucket]
        return [(bucket[at], picks.epoch, repeat) for at, repeat in zip(positions, repeats, strict=True)]


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
    """A rank's micro-batches by number: ``step * micro_batches + micro``."""

    def __init__(
        self, dataset: Dataset[Any], samples: SampleOrder, rank: int, world: int, micro_batches: int, read: ReadItem
    ) -> None:
        self.dataset, self.samples, self.read = dataset, samples, read
        self.rank, self.world, self.micro_batches = rank, world, micro_batches
        self.load_from_cache = bool(getattr(dataset, "load_from_cache", False))

    def __getitem__(self, number: int) -> TaskBatch:
        step, micro = divmod(number, self.micro_batches)
        size = self.samples.order.batch_size(step)
        start, stop = rank_slice(size, self.rank, self.world, micro, self.micro_batches)
        return [
            {
                "data": self.read(self.dataset, index),
                "data_id": index,
                "epoch": epoch,
                "repeat": repeat,
                "load_from_cache": self.load_from_cache,
            }
            for index, epoch, repeat in self.samples.picks(step, start, stop)
        ]


class Unprepared:
    """Passes batches through the loader unchanged, for modules with a custom forward."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        """Return the batch."""
        return batch


def task_steps(
    batches: TaskBatches,
    preparer: SampleStacker | Unprepared,
    num_workers: int,
    prefetch: int,
    device: torch.device,
) -> Callable[[int], StepStream]:
    """Return a function that yields the micro-batches of endless steps, starting at a position.

    Workers read and prepare them. Stacked ones are copied to a GPU while it computes earlier ones.
    """
    micro, into = batches.micro_batches, getattr(preparer, "prepare_into", None)
    to_gpu = device.type == "cuda" and into is not None

    def steps(first: int) -> StepStream:
        items = range(first * micro, 2**62)
        pin = pin_host_memory if to_gpu else None
        loader = PipelineDataLoader(batches, None, micro, preparer, num_workers, prefetch, items, pin, into)
        return prefetch_steps(iter(loader), micro, device) if to_gpu else loader.steps()

    return steps


def evaluation_batches(
    dataset: Dataset[Any],
    batch_size: int,
    bucket_of: Callable[[int], Hashable] | None,
    rank: int,
    world: int,
    read: ReadItem,
    points: Sequence[float],
) -> Iterator[tuple[TaskBatch, float]]:
    """Yield (micro-batch, point) so that every sample is evaluated once at every point, a quantile or fixed time."""
    samples = SampleOrder(dataset, 0, batch_size * world, bucket_of)
    batches = TaskBatches(dataset, samples, rank, world, 1, read)
    return ((batches[step], point) for step in range(samples.order.steps_per_epoch) for point in points)
