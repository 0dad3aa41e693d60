"""The data of a run: a cache, the order of its samples, and the loader that follows it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

import torch
from torch.utils.data import Dataset

from sd3_light.config import DatasetConfig, LoadedConfig, TrainConfig, UserError, batch_size_for
from sd3_light.config.schema_objective import ObjectiveConfig
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Cost
from sd3_light.core.registry import family_of
from sd3_light.core.training import Preparer
from sd3_light.cost.training_flops import step_flops
from sd3_light.data.loader import LoadTimes, OnLostWorker, PipelineDataLoader, PreparesInPlace
from sd3_light.data.order import Order
from sd3_light.data.prepare import CleanPreparer, GatheringPreparer, IndexPreparer
from sd3_light.data.resident import ResidentCache, ResidentPicks
from sd3_light.data.shard_table import ShardEntry, group_shards
from sd3_light.data.sides import Side
from sd3_light.data.slot_size import largest_batch_bytes
from sd3_light.data.slots import Pin
from sd3_light.data.store import open_store
from sd3_light.data.stream import CachedDataset, MicroBatches, order_of_shards
from sd3_light.engines import Launch
from sd3_light.engines.prefetch import Finish, pin_host_memory, prefetch_steps
from sd3_light.engines.protocol import StepStream
from sd3_light.model.vision import cached_columns
from sd3_light.sources.catalogue import make_sources


def open_cache(dataset: DatasetConfig, config: TrainConfig, launch: Launch, side: Side = "all") -> CachedDataset:
    """Open a dataset's cache, or a ``side`` of it; only its manifest is read."""
    limit = int(config.stream_cache_gb * 1e9)
    store = open_store(dataset.cache_dir, config.stream_cache_dir, limit, config.shuffle_window)
    weights = {source.label: source.directory.caption_weights for source in make_sources(dataset.directories)}
    columns = partial(cached_columns, config.model)
    if side != "all" and store.manifest.held_out is None:
        raise UserError(
            f"no part of the cache at {dataset.cache_dir} is held out, and {dataset.path} says validation = true; run "
            "`sd3-light cache CONFIG`, or remove the key"
        )
    return CachedDataset(store, launch.world_size > 1, weights, columns, side)


def load_cache(data: CachedDataset, config: TrainConfig, launch: Launch, device: torch.device) -> ResidentCache | None:
    """Read a whole cache into the memory of host or device, as the config says; None if it is streamed."""
    assert config.residence != "auto", "`place_cache` chooses"
    if config.residence == "stream":
        return None
    # the first process of a machine checks the memory for all: the others may start when it is already in use
    processes = launch.local_world_size if launch.local_rank == 0 else 1
    return ResidentCache(data, device if config.residence == "device" else torch.device("cpu"), processes)


def make_order(data: CachedDataset, loaded: LoadedConfig, launch: Launch) -> Order:
    """Return the order of samples in training."""
    return data.order(*_order_settings(loaded, launch))


def planned_order(shards: Sequence[ShardEntry], loaded: LoadedConfig, launch: Launch) -> Order:
    """Return the order of samples in training on a cache with these shards."""
    return order_of_shards(group_shards(shards), *_order_settings(loaded, launch))


def _order_settings(
    loaded: LoadedConfig, launch: Launch
) -> tuple[int, dict[str, float], Callable[[tuple[int, int]], int], int, str]:
    """Return the settings that determine the order: the arguments of `CachedDataset.order`."""
    config = loaded.train
    repeats = {source.label: source.directory.num_repeats for source in make_sources(loaded.dataset.directories)}
    batch_of = partial(_global_batch, config, world_size=launch.world_size)
    return config.seed, repeats, batch_of, config.shuffle_window, config.small_buckets


def _global_batch(config: TrainConfig, resolution: tuple[int, int], world_size: int) -> int:
    """Return the samples per optimizer step at a resolution."""
    return batch_size_for(config.micro_batch_size_per_gpu, resolution) * config.gradient_accumulation_steps * world_size


def order_facts(order: Order) -> dict[str, Any]:
    """Return the facts that two orders must share for a position to mean the same samples in both."""
    buckets = []
    for bucket in order.buckets:
        shards = blake2b(digest_size=8)
        shards.update(repr([(shard.size, shard.repeats) for shard in bucket.segments]).encode())
        buckets.append([bucket.batch, bucket.window, bucket.length, bucket.num_batches, shards.hexdigest()])
    return {"seed": order.seed, "buckets": buckets}


def loader_options(config: TrainConfig, preparer: PreparesInPlace) -> dict[str, Any]:
    """Return the arguments of a loader with the config's workers, which prepare in place."""
    return {
        "num_dataloader_workers": config.num_dataloader_workers,
        "prefetch_batches_per_worker": config.dataloader_prefetch_per_worker,
        "prepare_into": preparer.prepare_into,
    }


@dataclass(frozen=True)
class TrainingData:
    """The samples of a run in their ``order``, and the share of a process.

    They come from the shards of ``data``, or from ``resident``. ``by_segment``, equal on all ranks, assigns them to
    ranks by their shards.
    """

    config: TrainConfig
    data: CachedDataset
    order: Order
    launch: Launch
    resident: ResidentCache | None = None
    by_segment: bool = False

    def micro_batches(self) -> Dataset[Any]:
        """Return the micro-batches of this process, by number."""
        rank = self.launch.rank
        world_size = self.launch.world_size
        micro = self.config.gradient_accumulation_steps
        if self.resident is None:
            return MicroBatches(self.data, self.order, rank, world_size, micro, self.by_segment)
        return ResidentPicks(self.order, rank, world_size, micro, self.by_segment)

    def largest_batch_bytes(self, only_indices: bool) -> int:
        """Return the bytes of the largest prepared batch, or of its indices in a cache that is held in memory."""
        config = self.config
        sizes = [batch_size_for(config.micro_batch_size_per_gpu, bucket.resolution) for bucket in self.data.buckets]
        prepared = partial(family_of(config.model).prepared_columns, config.model)
        return largest_batch_bytes(self.data, sizes, prepared, only_indices)


def training_steps(
    source: TrainingData,
    engine: object,
    preparer: Preparer,
    prefetch_to: torch.device | None = None,
    times: LoadTimes | None = None,
    on_lost_worker: OnLostWorker | None = None,
) -> Callable[[int], StepStream]:
    """Return a function that yields the micro-batches of endless steps, starting at a position in the order.

    They are copied to the device ``prefetch_to`` while it computes earlier ones, and get their noise there. ``times``
    get the loader's times; ``on_lost_worker``: see `PipelineDataLoader`.
    """
    micro = source.config.gradient_accumulation_steps
    dataset = source.micro_batches()
    in_workers, finish = _divide_work(preparer, source.resident, source.order.seed, prefetch_to)
    options = {**loader_options(source.config, in_workers), "times": times, "on_lost_worker": on_lost_worker}

    def steps(first: int) -> StepStream:
        items = range(first * micro, 2**62)
        if prefetch_to is None:
            return PipelineDataLoader(dataset, engine, micro, in_workers, items=items, **options).steps()
        largest = source.largest_batch_bytes(isinstance(in_workers, IndexPreparer)) if finish else 0
        memory = {**options, "pin": _pin_for(prefetch_to), "slot_bytes": largest}
        loader = PipelineDataLoader(dataset, engine, micro, in_workers, items=items, **memory)
        return prefetch_steps(iter(loader), micro, prefetch_to, finish, largest)

    return steps


def _pin_for(device: torch.device) -> Pin | None:
    """Return the function that pins memory from which the device copies."""
    return partial(pin_host_memory, device=device) if device.type == "cuda" else None


def _divide_work(
    preparer: Preparer, resident: ResidentCache | None, seed: int, device: torch.device | None
) -> tuple[PreparesInPlace, Finish | None]:
    """Return what workers do, and what the device does with the result; None: nothing."""
    add_noise = None if device is None else preparer.noise_adder(device)
    if resident is None:
        return preparer if add_noise is None else CleanPreparer(preparer), add_noise
    inputs = preparer.resident(resident, seed)
    if resident.device.type == "cpu":
        return GatheringPreparer(inputs, adds_noise=add_noise is None), add_noise
    assert add_noise is not None, "a cache on a device that prepares nothing"
    return IndexPreparer(inputs), lambda batch: add_noise(inputs.gather(batch))


def placeholder_steps(samples_in: Callable[[int], int], world_size: int, micro: int, first: int) -> StepStream:
    """Yield the micro-batches of endless steps without data, for a process that reads none; see `training_steps`."""
    for step in count(first):
        yield [Batch(samples_in(step) // world_size // micro)] * micro


def flops_counter(
    cost: Cost, world_size: int, adapter: bool = False, terms: ObjectiveConfig | None = None
) -> Callable[[Sequence[Batch]], int]:
    """Return a function that counts the FLOPs of a step over all processes, from the tokens in its micro-batches.

    It returns 0 for placeholder batches.
    """

    def flops(batches: Sequence[Batch]) -> int:
        if not all(batch.values for batch in batches):
            return 0
        return world_size * sum(step_flops(cost, cost.batch_tokens(batch), adapter, terms) for batch in batches)

    return flops
