"""A user's own data set as the loop's batches: the order is the pretraining's (law 2), a sample's id is its index."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.order import Order, Segment, make_order, rank_slice
from sd3_light.engines.protocol import StepStream
from sd3_light.training.errors import as_user_error

Batch = list[dict[str, Any]]


class Samples:
    """The indices of a data set by bucket, and the order in which they are seen."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, global_batch: int, bucket_of: Callable[[int], Hashable] | None = None
    ) -> None:
        bucket_of = bucket_of or getattr(dataset, "bucket_of", None)
        found: dict[Hashable, list[int]] = {}
        for index in range(length_of(dataset)):
            with as_user_error(f"bucket_of({index})", "let it give a name or number for every index"):
                found.setdefault(None if bucket_of is None else bucket_of(index), []).append(index)
        self.buckets = [found[key] for key in sorted(found, key=repr)]
        self.order: Order = make_order(seed, [([Segment(len(one))], global_batch) for one in self.buckets])

    def of_step(self, step: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(index, epoch, repeat) of the samples ``start`` to ``stop`` of a step's global batch."""
        picks = self.order.picks(step, start, stop)
        places, repeats = picks.index.tolist(), picks.repeat.tolist()
        bucket = self.buckets[picks.bucket]
        return [(bucket[at], picks.epoch, repeat) for at, repeat in zip(places, repeats, strict=True)]


def length_of(dataset: Any) -> int:
    """The number of samples; a fault where there is none, or no way to ask for one by its index."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise UserError(f"the data set is a {kind}; give a list, or a class with __len__ and __getitem__")
    if not len(dataset):
        raise UserError("the data set is empty; does its path hold what it reads?")
    return len(dataset)


def item_of(dataset: Any, index: int) -> Mapping[str, Any]:
    """One sample's values by name; what the data set raises names the sample."""
    with as_user_error(f"sample {index}: the data set", "mend the sample, or leave it out"):
        item = dataset[index]
    if not isinstance(item, Mapping):
        raise UserError(f"sample {index} is a {type(item).__name__}; a data set gives dicts of values by name")
    return item


class TaskBatches(Dataset[Any]):
    """A rank's micro-batches as a map: item ``step * micro_batches + micro``."""

    def __init__(self, dataset: Dataset[Any], samples: Samples, rank: int, world: int, micro_batches: int) -> None:
        self.dataset, self.samples = dataset, samples
        self.rank, self.world, self.micro_batches = rank, world, micro_batches

    def __getitem__(self, item: int) -> Batch:
        step, micro = divmod(item, self.micro_batches)
        size = self.samples.order.batch_size(step)
        place = rank_slice(size, self.rank, self.world, micro, self.micro_batches)
        return [
            {"data": item_of(self.dataset, index), "data_id": index, "epoch": epoch, "repeat": repeat}
            for index, epoch, repeat in self.samples.of_step(step, *place)
        ]


class _AsItIs:
    """What the loader asks of a model: here units run in the trainer, where the encoders are."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        """The batch."""
        return batch


def steps_of(batches: TaskBatches, num_workers: int) -> Callable[[int], StepStream]:
    """From a position on, the micro-batches of step after step, for ever; items are read by worker processes."""

    def steps(first: int) -> StepStream:
        micro = batches.micro_batches
        items = range(first * micro, 2**62)
        return PipelineDataLoader(batches, None, micro, _AsItIs(), num_workers, 2, items).steps()

    return steps
