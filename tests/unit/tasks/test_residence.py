"""`cache_residence` of a task: processed data in memory train as their shards do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.cost.gpu_memory import CONTEXT_BYTES
from sd3_light.data.reader import ShardReader
from sd3_light.data.resident import ResidentCache
from sd3_light.engines import Launch
from sd3_light.tasks import ModelLogger, ProcessedDataset
from sd3_light.tasks.batches import SampleOrder, TaskBatches, item_of
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.cost import cost_of
from sd3_light.tasks.residence import add_resident, cost_beside_shards
from sd3_light.tasks.settings import TaskSettings
from sd3_light.train.residence import TrainingProcess, room_for_cache
from tests.unit.tasks import toy
from tests.unit.tasks.test_custom_forward import Own
from tests.unit.tasks.test_process import losses, process
from tests.unit.tasks.toy import Images, Toy

CPU = torch.device("cpu")


class Texts(Toy):
    """Reads texts of unequal length, a tensor with a name of the shard's index, and a text."""

    reads, pads = ("text", "caption", "name"), ("text",)


def texts(count: int = 7, mixed: bool = False) -> list[dict[str, Any]]:
    """Return samples; if ``mixed``, of two layouts in one bucket."""
    items = [Images()[number] for number in range(count)]
    values = [
        {"text": torch.ones(1 + n % 3, 2 + (mixed and n % 2)) * n, "caption": torch.eye(2) * n} for n in range(count)
    ]
    return [{**item, **value} for item, value in zip(items, values, strict=True)]


def processed(out: Path, mixed: bool = False) -> ProcessedDataset:
    return toy.process(out, texts(mixed=mixed), Texts(), shard_size=3)


@pytest.mark.parametrize("residence", ["host", "device"])
def test_shards_in_memory_train_as_streamed(tmp_path: Path, residence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU its own memory is that of the device. Without a setting a CPU streams."""
    data = processed(tmp_path / "cache")
    expected = losses(tmp_path / "stream", data, Texts(), shuffle_window=1)
    reads: list[int] = []
    caption = ShardReader.caption
    monkeypatch.setattr(ShardReader, "caption", lambda *args: reads.append(1) or caption(*args))
    assert losses(tmp_path / "out", data, Texts(), shuffle_window=1, cache_residence=residence) == expected
    assert not reads, "no sample is read from its shard"
    assert data.resident is None, "the memory is free after the task"
    losses(tmp_path / "auto", data, Texts(), num_epochs=1)
    assert len(reads) >= 7
    data = toy.process(tmp_path / "sizes", Images(6, mixed=True))
    expected = losses(tmp_path / "one", data, num_workers=1)
    assert losses(tmp_path / "two", data, num_workers=1, cache_residence=residence) == expected


@pytest.mark.parametrize("mixed", [False, True])
def test_a_device_makes_the_batches_of_workers(tmp_path: Path, mixed: bool) -> None:
    """Workers send only what is drawn; noise has the same bits. Samples of two layouts stay apart."""
    data = processed(tmp_path, mixed)
    model = Texts()
    preparer = model.preparer()
    samples = SampleOrder(data, 3, 4)

    def rows(read: Any) -> Any:
        return TaskBatches(data, samples, Launch(), 1, read)[0]

    expected = preparer.prepare_inputs(rows(item_of))
    assert data.shards is not None
    data.resident = ResidentCache(data.shards, CPU)
    sent = preparer.prepare_inputs(rows(None))
    assert not sent.values
    batch = add_resident(preparer, data, CPU)(sent)
    assert list(batch.values) == list(expected.values)
    assert ("text" in batch.values) is not mixed
    for name, value in expected.values.items():
        assert torch.equal(batch[name], value), name
    assert batch.host["name"] == expected.host["name"]
    for name in () if mixed else ("text.length",):
        assert torch.equal(batch.host[name], expected.host[name])
    for own, other in zip(batch.host.get("text", ()), expected.host.get("text", ()), strict=True):
        assert torch.equal(own, other)


def test_auto_counts_what_training_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the largest sample, whatever the names of layouts are; the memory of a GPU is set here."""
    data = processed(tmp_path / "cache")
    settings = TaskSettings(engine="torch", batch_size=2)
    task = TaskCall.of(None, data, Texts(), ModelLogger(tmp_path / "out"), settings)
    assert cost_beside_shards(task) is None, "a CPU streams"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33, 2**34))
    assert data.shards is not None
    process = TrainingProcess(Launch(), torch.device("cuda", 0), None)  # type: ignore[arg-type]
    room = room_for_cache(data.shards, task.config, cost_of(task), process)
    assert room.gpu == 2**33 + CONTEXT_BYTES
    assert CONTEXT_BYTES < room.training < CONTEXT_BYTES + 2**20


def test_other_data_are_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match='cache_residence="host" is about the shards of a ProcessedDataset; leave it'):
        losses(tmp_path / "a", Images(2), cache_residence="host")
    with pytest.raises(UserError, match="cache_residence is 'disk'; give one of"):
        losses(tmp_path / "a", Images(2), cache_residence="disk")
    process(tmp_path / "cache", Images(2))
    own: Any = Own()
    with pytest.raises(UserError, match='cache_residence="device" needs a module with denoise; use "host"'):
        losses(tmp_path / "b", ProcessedDataset(tmp_path / "cache"), own, cache_residence="device")
    monkeypatch.setattr("sd3_light.data.manifest.available_memory", lambda: 10)
    with pytest.raises(UserError, match=r"the cache takes .* of memory are free"):
        losses(tmp_path / "a", ProcessedDataset(tmp_path / "cache"), cache_residence="host")
