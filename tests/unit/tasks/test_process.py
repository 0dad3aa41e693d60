"""`launch_data_process_task`: what it stores and computes again; two stages equal one, also in memory."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.cost.gpu_memory import CONTEXT_BYTES
from sd3_light.data.manifest import Manifest
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
from tests.leftovers import leave
from tests.unit.tasks import toy
from tests.unit.tasks.test_custom_forward import Own
from tests.unit.tasks.toy import Encode, Images, Toy

CPU = torch.device("cpu")


def process(out: Path, data: Any = None, model: Toy | None = None, **settings: Any) -> int:
    """Run the task; return how many samples were encoded."""
    before = Encode.runs
    toy.process(out, data or Images(6, mixed=True), model, **settings)
    return Encode.runs - before


def losses(out: Path, data: Any, model: Toy | None = None, **settings: Any) -> list[float]:
    settings = {"save_steps": 100, "batch_size": 2, "num_epochs": 2, **settings}
    return [loss for (loss,) in toy.steps(toy.train(out, model, data, **settings), "loss")]


def test_two_stages_train_as_one_from_a_folder_or_a_url(tmp_path: Path) -> None:
    data = Images(6, mixed=True)
    assert process(tmp_path / "cache", data) == 6
    processed = ProcessedDataset(tmp_path / "cache")
    assert len(processed) == 6
    assert set(processed[0]) == {"latents"}, "neither the image nor its name is read later"
    assert [processed.bucket_of(index) for index in range(6)] == [data.bucket_of(index) for index in range(6)]
    before = Encode.runs
    two = losses(tmp_path / "two", processed)
    assert Encode.runs == before
    assert two == losses(tmp_path / "one", data)
    assert len(two) == 8
    there = ProcessedDataset((tmp_path / "cache").as_uri(), stream_cache_dir=tmp_path / "fetched")
    assert losses(tmp_path / "there", there) == losses(tmp_path / "here", ProcessedDataset(tmp_path / "cache"))
    assert len(list((tmp_path / "fetched").rglob("*.safetensors"))) == 2
    with pytest.raises(UserError, match="no cache at"):
        ProcessedDataset((tmp_path / "nothing").as_uri())


def test_workers_are_forks_whatever_the_default(tmp_path: Path) -> None:
    """A new interpreter would import from the working directory; a fork also needs no pickle of the dataset."""

    class Local(Images):
        pass

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert process(tmp_path, Local(6, mixed=True), num_workers=1) == 6
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_shards_have_the_format_of_caches(tmp_path: Path) -> None:
    """Fixed values are columns of samples, texts of unequal length are those of captions."""

    class Texts(Toy):
        reads, pads = ("text", "mask", "name"), ("text",)

    data = [
        {"image": torch.ones(3, 4, 4) * n, "text": torch.ones(1 + n, 2), "mask": torch.eye(4) * (n + 1), "name": f"{n}"}
        for n in range(3)
    ]
    process(tmp_path, data, Texts(), bucket_of=None)
    manifest = Manifest.load(tmp_path)
    assert manifest.recipe["units"][0]["unit"] == "Encode"
    assert manifest.recipe["kept"][0] == "latents"
    (entry,) = manifest.shards
    reader = ShardReader(tmp_path / "shards" / entry.file, entry)
    kinds = {"latents": ("sample", False), "text": ("caption", True), "own.mask": ("sample", False)}
    assert {column.name: (column.reads, column.ragged) for column in reader.columns} == kinds
    assert reader.index["sample_id"].tolist() == [0, 1, 2]
    processed = ProcessedDataset(tmp_path)
    for number, item in enumerate(data):
        stored = processed[number]
        assert set(stored) == {"latents", "text", "mask", "name"}
        assert all(torch.equal(stored[name], item[name]) for name in ("text", "mask"))
        assert stored["name"] == item["name"]
    one, two = (losses(tmp_path / name, each, Texts(), batch_size=3) for name, each in (("1", data), ("2", processed)))
    assert one == two


def test_samples_of_unequal_shapes_without_buckets_get_their_own_shards(tmp_path: Path) -> None:
    data = Images(6, mixed=True)
    assert process(tmp_path / "cache", data, bucket_of=lambda index: 0) == 6
    processed = ProcessedDataset(tmp_path / "cache")
    assert {processed.bucket_of(index) for index in range(6)} == {"0"}
    assert len({processed.segment_of(index) for index in range(6)}) == 2
    assert process(tmp_path / "cache", data, bucket_of=lambda index: 0) == 0
    for index in range(6):
        assert torch.equal(processed[index]["latents"], Toy().process(data[index])["latents"])


def test_a_window_keeps_steps_within_few_shards(tmp_path: Path) -> None:
    """All samples are still seen once per epoch."""
    process(tmp_path / "cache", Images(12), shard_size=4)
    seen: list[int] = []

    class Recorded(ProcessedDataset):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    losses(tmp_path / "out", Recorded(tmp_path / "cache"), shuffle_window=1, num_epochs=1)
    assert sorted(seen) == list(range(12))
    assert [len({index // 4 for index in seen[start : start + 4]}) for start in (0, 4, 8)] == [1, 1, 1]
    with pytest.raises(UserError, match="shuffle_window is a number of shards of a ProcessedDataset"):
        losses(tmp_path / "other", Images(4), shuffle_window=1)
    data = ProcessedDataset((tmp_path / "cache").as_uri(), stream_cache_dir=tmp_path / "fetched")
    assert data.shards is not None
    samples = SampleOrder(data, 0, 2, window=1)
    batches = TaskBatches(data, samples, Launch(), 1, item_of)
    files = [data.segment_of(samples.picks(step, 0, 1)[0][0]) for step in range(6)]
    assert len(set(files)) == 3
    batches[1]
    for thread in data.shards._prefetcher.threads:
        thread.join()
    fetched = {path.name for path in (tmp_path / "fetched").rglob("*.safetensors")}
    expected = {entry.sha256 for entry in data.shards.manifest.shards if entry.file in files[:3]}
    assert len(fetched) >= 2
    assert all(any(digest[:16] in name for name in fetched) for digest in expected)


def test_only_changed_samples_are_computed_again(tmp_path: Path) -> None:
    class Edited(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            item = super().__getitem__(index)
            return {**item, "image": item["image"] + (index == 2)}

    assert process(tmp_path) == 6
    assert process(tmp_path) == 0
    assert process(tmp_path, Edited(6, mixed=True)) == 1
    processed = ProcessedDataset(tmp_path)
    assert len(processed) == 6
    assert torch.equal(processed[2]["latents"], Toy().process(Edited(6, mixed=True)[2])["latents"])
    other = Toy()
    with torch.no_grad():
        other.encoder.weight += 1
    assert process(tmp_path, model=other) == 6, "another encoder makes all samples stale"
    assert process(tmp_path, Images(7, mixed=True), other) == 1


def test_an_interrupted_task_keeps_its_shards(tmp_path: Path) -> None:
    class Broken(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 4:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        process(tmp_path, Broken(6), shard_size=2)
    with pytest.raises(UserError, match="no processed data in"):
        ProcessedDataset(tmp_path)
    assert process(tmp_path, Images(6), shard_size=2) == 2


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    process(tmp_path)
    shard = next((tmp_path / "shards").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    processed = ProcessedDataset(tmp_path)
    with pytest.raises(UserError, match=rf"{shard} is missing or damaged"):
        [processed[index] for index in range(6)]
    assert process(tmp_path) == 3, "its samples are computed again"
    assert len([processed[index] for index in range(6)]) == 6


def test_files_of_another_number_of_processes_are_reused_or_replaced(tmp_path: Path) -> None:
    """No stale sample of a process that no longer exists is trained on."""

    toy.process(tmp_path, model=Own("data_process"))
    other = tmp_path / "1"
    other.mkdir()
    for number in (1, 3, 5):
        for suffix in (".json", ".pth"):
            (tmp_path / "0" / f"{number}{suffix}").rename(other / f"{number}{suffix}")
    before = (other / "3.pth").stat().st_mtime_ns
    toy.process(tmp_path, model=Own("data_process"))
    assert (other / "3.pth").stat().st_mtime_ns == before
    changed = Own("data_process")
    with torch.no_grad():
        changed.pipe.vae.weight += 1
    data = toy.process(tmp_path, model=changed)
    assert not (other / "3.pth").exists()
    assert torch.equal(data[3][0]["latents"], changed.pipe.vae(Images(6)[3]["image"][None]))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    names = ("manifest.json", "samples.arrow", "shards/samples-00000000.safetensors")
    leftovers = [leave(tmp_path / name) for name in names]
    process(tmp_path)
    leftovers += [leave(tmp_path / "files" / name) for name in ("manifest.json", "0/3.json", "1/4.pth")]
    toy.process(tmp_path / "files", Images(2), Own("data_process"))
    assert not [path for path in leftovers if path.exists()]


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
