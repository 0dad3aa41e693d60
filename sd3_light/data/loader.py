"""The loader: micro-batches prepared by worker processes, at most ``workers x prefetch`` of them alive."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from sd3_light.data.stream import Batch

Prepared = tuple[tuple[Any, ...], tuple[Any, ...]]
"""(features, label): what the model takes, and what the loss compares it with."""


class PreparesInputs(Protocol):
    """What the loader asks of a model."""

    def prepare_inputs(self, batch: Batch, timestep_quantile: float | None = None) -> Prepared:
        """Cached features in, (features, label) out; runs in a worker process."""


class _PreparedItems(Dataset[Prepared]):
    """A data set whose items come prepared; a plain class, so that worker processes can take it along."""

    def __init__(self, dataset: Dataset[Batch], prepare: Callable[[Batch], Prepared]) -> None:
        self.dataset, self.prepare = dataset, prepare

    def __getitem__(self, item: int) -> Prepared:
        return self.prepare(self.dataset[item])


class PipelineDataLoader:
    """Yields (features, label) micro-batches of a rank, ``gradient_accumulation_steps`` to an optimizer step.

    Items of ``dataset`` are micro-batches. Each worker holds at most ``prefetch_batches_per_worker`` prepared ones, so
    host memory is bounded by ``workers x prefetch`` micro-batches (law 10). Without workers they are made on demand.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        engine: object,
        gradient_accumulation_steps: int,
        model: PreparesInputs,
        num_dataloader_workers: int = 0,
        prefetch_batches_per_worker: int = 1,
        items: range | None = None,
    ) -> None:
        self.engine = engine
        self.gradient_accumulation_steps = gradient_accumulation_steps
        count = len(dataset) if items is None else 0  # type: ignore[arg-type]
        self.dataloader: DataLoader[Prepared] = DataLoader(
            _PreparedItems(dataset, model.prepare_inputs),
            batch_size=None,
            sampler=items if items is not None else range(count),
            num_workers=num_dataloader_workers,
            prefetch_factor=prefetch_batches_per_worker if num_dataloader_workers else None,
        )

    def __iter__(self) -> Iterator[Prepared]:
        return iter(self.dataloader)

    def steps(self) -> Iterator[list[Prepared]]:
        """The micro-batches of one optimizer step after another."""
        batches: list[Prepared] = []
        for prepared in self.dataloader:
            batches.append(prepared)
            if len(batches) == self.gradient_accumulation_steps:
                yield batches
                batches = []
        assert not batches, "the last optimizer step lacks micro-batches"
