"""`launch_data_process_task`: what it stores, when it computes again, and that two stages equal one."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from sd3_light.config.faults import UserError
from sd3_light.runlog import read_log
from sd3_light.tasks import ModelLogger, ProcessedDataset, launch_data_process_task, launch_training_task
from tests.leftovers import leave
from tests.unit.tasks.toy import Encode, Images, Toy


def process(out: Path, data: Any = None, model: Toy | None = None, **settings: Any) -> int:
    """Run the task; return how many samples were encoded."""
    before = Encode.runs
    data = data or Images(6, mixed=True)
    settings = {"num_workers": 0, "bucket_of": data.bucket_of, **settings}
    launch_data_process_task(Accelerator(cpu=True), data, model or Toy(), ModelLogger(out), **settings)
    return Encode.runs - before


def losses(out: Path, data: Any) -> list[float]:
    settings: dict[str, Any] = {"num_workers": 0, "save_steps": 100, "batch_size": 2, "num_epochs": 2}
    launch_training_task(Accelerator(cpu=True), data, Toy(), ModelLogger(out), 1e-2, **settings)
    return [event["loss"] for event in read_log(out / "log.jsonl") if event["event"] == "step"]


def test_two_stages_train_as_one(tmp_path: Path) -> None:
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


def test_views_show_where_a_sample_is_stored(tmp_path: Path) -> None:
    process(tmp_path)
    view = json.loads((tmp_path / "0" / "3.json").read_text())
    assert view["tensors"] == {"latents": ["float32", [3, 6, 6]]}
    assert (tmp_path / view["shard"]).is_file()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["recipe"]["units"][0]["unit"] == "Encode"
    assert manifest["recipe"]["kept"][0] == "latents"


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


def test_samples_of_another_number_of_processes_are_reused_or_replaced(tmp_path: Path) -> None:
    """No stale sample of a process that no longer exists is trained on."""
    process(tmp_path)
    other = tmp_path / "1"
    other.mkdir()
    for number in (1, 3, 5):
        (tmp_path / "0" / f"{number}.json").rename(other / f"{number}.json")
    assert process(tmp_path) == 0
    changed = Toy()
    with torch.no_grad():
        changed.encoder.weight += 1
    assert process(tmp_path, model=changed) == 6
    expected = changed.process(Images(6, mixed=True)[3])["latents"]
    assert torch.equal(ProcessedDataset(tmp_path)[3]["latents"], expected)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    names = ("manifest.json", "shards/00000-00000.safetensors", "0/3.json", "1/4.pth")
    leftovers = [leave(tmp_path / name) for name in names]
    process(tmp_path)
    assert not [path for path in leftovers if path.exists()]
