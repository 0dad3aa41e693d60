"""Encode shards with the encoders of this process, which are loaded when they are needed and freed at the end."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from sd3_light.cache.copies import OldShards
from sd3_light.cache.shard_builder import BuildJob, Built, ShardBuilder
from sd3_light.config import TrainConfig
from sd3_light.config.base import DataLocation
from sd3_light.core.encoding import Encoders
from sd3_light.core.registry import family_of
from sd3_light.data.cache_plan import PlannedShard
from sd3_light.engines import Launch
from sd3_light.runlog import Bar
from sd3_light.sources.decode import (
    CRASHED_DECODE,
    Decoded,
    DecodeTask,
    decode_images,
)
from sd3_light.sources.workers import WorkerPool

if TYPE_CHECKING:  # Ray is optional
    from sd3_light.cache.ray_builder import RayBuilder

_Result = TypeVar("_Result")
Builder: TypeAlias = "LocalBuilder | RayBuilder"
"""What encodes shards."""


class LocalBuilder:
    """Encodes in this process, together with the other processes of the launch."""

    def __init__(self, train: TrainConfig, launch: Launch) -> None:
        self._train = train
        self._launch = launch
        self._resources = ExitStack()
        self._encoders: Encoders | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()
        self._encoders = None
        gc.collect()

    @property
    def device_type(self) -> str:
        """The kind of device that encodes."""
        return self._launch.device(self._train.caching_device).type

    @property
    def encoders(self) -> Encoders:
        """The encoders on this process's device."""
        if self._encoders is None:
            model = self._train.model
            device = self._launch.device(self._train.caching_device)
            encoders = family_of(model).encoding.encoders(model, device, self._train.caching_batch_size)
            self._encoders = self._resources.enter_context(encoders)
        return self._encoders

    def probe_pool(self, roots: Sequence[DataLocation]) -> None:
        """Probe with processes of this machine."""

    def decode_pool(self, roots: Sequence[DataLocation]) -> WorkerPool[DecodeTask, Decoded]:
        """Decode with one process of this machine, or in this one if it has no worker processes."""
        return WorkerPool(min(1, self._train.caching_num_workers), decode_images, CRASHED_DECODE)

    def build(self, job: BuildJob, planned: Sequence[PlannedShard], bar: Bar) -> Built:
        """Build the shards together with other processes. Return what this process built."""
        old = OldShards(job.place.location, self._train.stream_cache_dir, int(self._train.stream_cache_gb * 1e9))
        builder = ShardBuilder(job, self.encoders, old, bar, self._train)
        builder.build(planned, (self._launch.rank, self._launch.world_size))
        return builder.built

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Return the result of a function of the encoders, which must be complete when it returns."""
        return function(self.encoders, *args)
