"""The validation loss of a run's evaluation sets, on all processes, by any engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sd3_light.config import VALIDATION, LoadedConfig, batch_size_for
from sd3_light.core.batch import Batch
from sd3_light.data.loader import OnLostWorker, PipelineDataLoader, PreparesInPlace
from sd3_light.data.shard_table import column
from sd3_light.data.sides import Side
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.engines import Engine, Launch
from sd3_light.engines.feed import loader_options, open_cache
from sd3_light.evaluate.validation import EvalPreparer, QuantileBatches, eval_points, validate


@dataclass
class Evaluator:
    """Evaluates the weights in the engine's model; the same weights always give the same losses.

    With a pipeline of several ``stages`` a batch has as many micro-batches as the config says; the engine splits it.
    ``on_lost_worker``: see `PipelineDataLoader`.
    """

    loaded: LoadedConfig
    launch: Launch
    engine: Engine
    preparer: PreparesInPlace
    stages: int = 1
    on_lost_worker: OnLostWorker | None = None
    _datasets: dict[str, CachedDataset] = field(default_factory=dict)

    def losses(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield (name, losses) of each evaluation set, that of the held-out part of the dataset first."""
        for name in self._names():
            yield name, validate(self._loader(name), self.engine.evaluate, self.engine.sum_over_ranks, self.points)

    @property
    def points(self) -> tuple[float, ...]:
        """The quantiles of t, and the fixed times, at which every sample is evaluated."""
        return eval_points(self.loaded.train.eval_at_fixed_t)

    def _names(self) -> Iterator[str]:
        """Yield the names of the sets that have samples."""
        if self.loaded.dataset.is_divided and self._open(VALIDATION).buckets:
            yield VALIDATION
        yield from self.loaded.eval_datasets

    def _open(self, name: str) -> CachedDataset:
        if name not in self._datasets:
            is_part = name not in self.loaded.eval_datasets
            dataset = self.loaded.dataset if is_part else self.loaded.eval_datasets[name]
            side: Side = "validation" if is_part else "all"
            self._datasets[name] = open_cache(dataset, self.loaded.train, self.launch, side)
        return self._datasets[name]

    def _loader(self, name: str) -> Iterable[Batch]:
        """Return the micro-batches of a set, each sample once; placeholders if this process reads no data."""
        data = self._open(name)
        config = self.loaded.train
        once = dict.fromkeys(column(data.manifest.shards, "directory").tolist(), 1.0)
        order = data.order(0, once, self._global_batch, config.shuffle_window)
        share = self.launch.data_launch(self.stages)
        if not self.launch.reads_data(self.stages):
            sizes = (order.batch_size(step) // share.world_size for step in range(order.steps_per_epoch))
            return [Batch(size) for size in sizes for _ in self.points]
        batches = MicroBatches(data, order, share.rank, share.world_size, 1)
        items = QuantileBatches(batches, order.steps_per_epoch, self.points)
        preparer = EvalPreparer(self.preparer)
        options = loader_options(config, preparer)
        return PipelineDataLoader(items, self.engine, 1, preparer, on_lost_worker=self.on_lost_worker, **options)

    def _global_batch(self, resolution: tuple[int, int]) -> int:
        config = self.loaded.train
        pieces = config.eval_gradient_accumulation_steps if self.stages > 1 else 1
        micro = batch_size_for(config.eval_micro_batch_size_per_gpu, resolution)
        return micro * pieces * self.launch.data_launch(self.stages).world_size
