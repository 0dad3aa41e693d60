"""The loader: the same batches for any number of workers, and no more of them ahead than asked for."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.stream import CachedDataset, MicroBatches

MakeCache = Callable[..., CachedDataset]


class Plain:
    """A model that hands the batch on."""

    def prepare_inputs(self, batch: dict[str, Any], timestep_quantile: float | None = None) -> Any:
        return (batch["sample_id"], batch["moments"], batch["t5"]), (batch["repeat"], batch["mask"])


def loader_of(data: CachedDataset, micro: int = 1, first: int = 0, steps: int = 6, **keys: int) -> PipelineDataLoader:
    order = data.order(0, [1.0], lambda resolution: 4)
    items = range(first * micro, steps * micro)
    return PipelineDataLoader(MicroBatches(data, order, 0, 1, micro), object(), micro, Plain(), items=items, **keys)


def flat(steps: list[list[Any]]) -> list[torch.Tensor]:
    return [tensor for step in steps for features, label in step for tensor in (*features, label[0])]


def test_any_number_of_workers_makes_the_same_batches(make_cache: MakeCache) -> None:
    data = make_cache(captions=2, variants=2)
    alone = flat(list(loader_of(data).steps()))
    assert len(alone) == 24
    for workers in (1, 4):
        helped = flat(list(loader_of(data, num_dataloader_workers=workers).steps()))
        assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True)), workers


def test_consecutive_steps_differ_and_an_epoch_covers_all(make_cache: MakeCache) -> None:
    data = make_cache()
    ids = [step[0][0][0].tolist() for step in loader_of(data, num_dataloader_workers=2).steps()]
    assert len({tuple(batch) for batch in ids}) == 6
    for epoch in (ids[:3], ids[3:]):
        assert sorted(number for batch in epoch for number in batch) == list(range(1, 13))


def test_a_resumed_loader_goes_on_where_the_other_stopped(make_cache: MakeCache) -> None:
    data = make_cache()
    whole = flat(list(loader_of(data).steps()))
    for first in (1, 3, 5):
        rest = flat(list(loader_of(data, first=first).steps()))
        assert all(torch.equal(a, b) for a, b in zip(whole[4 * first :], rest, strict=True))


def test_a_step_has_all_its_micro_batches(make_cache: MakeCache) -> None:
    data = make_cache()
    whole, halves = list(loader_of(data).steps()), list(loader_of(data, micro=2).steps())
    assert [len(step) for step in halves] == [2] * 6
    for step, parts in zip(whole, halves, strict=True):
        joined = torch.cat([features[0] for features, _ in parts])
        assert torch.equal(joined, step[0][0][0])


def test_a_last_step_without_all_its_micro_batches_is_no_step(make_cache: MakeCache) -> None:
    data = make_cache()
    order = data.order(0, [1.0], lambda resolution: 4)
    loader = PipelineDataLoader(MicroBatches(data, order, 0, 1, 2), object(), 2, Plain(), items=range(3))
    with pytest.raises(AssertionError, match="lacks micro-batches"):
        list(loader.steps())


class Counting(Dataset[Any]):
    """Counts, across processes, how many items were asked for."""

    def __init__(self) -> None:
        self.made = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, item: int) -> dict[str, Any]:
        with self.made.get_lock():
            self.made.value += 1
        return {"sample_id": torch.tensor([item]), "moments": 0, "t5": 0, "repeat": 0, "mask": None}


def settled(dataset: Counting, at_least: int) -> int:
    """How many items were made, once the workers have nothing left to do."""
    deadline = time.monotonic() + 30
    while dataset.made.value < at_least and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # one that was made too many would come now
    return int(dataset.made.value)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 1), (2, 3)])
def test_workers_prepare_no_more_than_asked(workers: int, prefetch: int) -> None:
    """Host memory is bounded by workers x prefetch micro-batches (law 10)."""
    dataset = Counting()
    loader = PipelineDataLoader(
        dataset, object(), 1, Plain(), num_dataloader_workers=workers, prefetch_batches_per_worker=prefetch
    )
    assert loader.dataloader.prefetch_factor == prefetch
    batches = loader.steps()
    for taken in (1, 2):
        next(batches)
        assert settled(dataset, taken + workers * prefetch) == taken + workers * prefetch
    batches.close()


def test_without_workers_a_batch_is_made_when_it_is_taken() -> None:
    dataset = Counting()
    batches = PipelineDataLoader(dataset, object(), 1, Plain()).steps()
    for taken in (1, 2, 3):
        next(batches)
        assert dataset.made.value == taken


def test_the_program_of_the_memory_note_runs() -> None:
    """Items are dicts of tensors, `mask` may be None, and the model is its own engine."""

    class TinyDataset(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, idx: int) -> dict[str, Any]:
            return {"x": torch.zeros((4, 3, 256, 256), dtype=torch.float16), "mask": None}

    class DummyModel:
        name = "dummy"

        def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
            return (batch, (torch.zeros(1), None))

    model, dataset = DummyModel(), TinyDataset()
    for prefetch in (2, 1):
        loader = PipelineDataLoader(
            dataset, model, 1, model, num_dataloader_workers=2, prefetch_batches_per_worker=prefetch
        )
        assert loader.dataloader.prefetch_factor == prefetch
    features, label = next(iter(loader))
    assert features["x"].shape == (4, 3, 256, 256)
    assert features["mask"] is None
    assert label[1] is None
