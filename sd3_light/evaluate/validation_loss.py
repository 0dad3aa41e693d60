"""The validation loss of a run's evaluation sets, on all processes, by any engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sd3_light.config import LoadedConfig, batch_size_for
from sd3_light.core.batch import Batch
from sd3_light.data.loader import PipelineDataLoader, PreparesInPlace
from sd3_light.data.shard_table import column
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.engines import Engine, Launch
from sd3_light.engines.feed import loader_options, open_cache, placeholder_batch
from sd3_light.evaluate.validation import EvalPreparer, QuantileBatches, eval_points, validate


@dataclass
class Evaluator:
    """Evaluates the weights in the engine's model; the same weights always give the same losses.

    With a pipeline of several ``stages`` a batch has as many micro-batches as the config says; the engine splits it.
    """

    loaded: LoadedConfig
    launch: Launch
    engine: Engine
    preparer: PreparesInPlace
    stages: int = 1
    _datasets: dict[str, CachedDataset] = field(default_factory=dict)

    def losses(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield (name, losses) of each evaluation set."""
        for name in self.loaded.eval_datasets:
            yield name, validate(self._loader(name), self.engine.evaluate, self.engine.sum_over_ranks, self.points)

    @property
    def points(self) -> tuple[float, ...]:
        """The quantiles of t, and the fixed times, at which every sample is evaluated."""
        return eval_points(self.loaded.train.eval_at_fixed_t)

    def _loader(self, name: str) -> Iterable[Batch]:
        """Return the micro-batches of a set, each sample once; placeholders if this process reads no data."""
        if name not in self._datasets:
            self._datasets[name] = open_cache(self.loaded.eval_datasets[name], self.loaded.train, self.launch)
        data, config = self._datasets[name], self.loaded.train
        once = dict.fromkeys(column(data.manifest.shards, "directory").tolist(), 1.0)
        order = data.order(0, once, self._global_batch, config.shuffle_window)
        share = self.launch.data_launch(self.stages)
        if not self.launch.reads_data(self.stages):
            sizes = (order.batch_size(step) // share.world for step in range(order.steps_per_epoch))
            return [placeholder_batch(size) for size in sizes for _ in self.points]
        batches = MicroBatches(data, order, share.rank, share.world, 1)
        items = QuantileBatches(batches, order.steps_per_epoch, self.points)
        preparer = EvalPreparer(self.preparer)
        return PipelineDataLoader(items, self.engine, 1, preparer, **loader_options(config, preparer))

    def _global_batch(self, resolution: tuple[int, int]) -> int:
        config = self.loaded.train
        pieces = config.eval_gradient_accumulation_steps if self.stages > 1 else 1
        micro = batch_size_for(config.eval_micro_batch_size_per_gpu, resolution)
        return micro * pieces * self.launch.data_launch(self.stages).world
