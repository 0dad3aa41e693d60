"""`launch_data_process_task`: what it keeps, when it computes again, and that stage two is stage one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from sd3_light.config.faults import UserError
from sd3_light.runlog import read_log
from sd3_light.tasks import ModelLogger, ProcessedDataset, launch_data_process_task, launch_training_task
from tests.unit.tasks.toy import Encode, Pictures, Toy


def process(out: Path, data: Any = None, model: Toy | None = None, **wishes: Any) -> int:
    """Run the task; how many samples were encoded."""
    before = Encode.runs
    data = data or Pictures(6, mixed=True)
    wishes = {"num_workers": 0, "bucket_of": data.bucket_of, **wishes}
    launch_data_process_task(Accelerator(cpu=True), data, model or Toy(), ModelLogger(out), **wishes)
    return Encode.runs - before


def losses(out: Path, data: Any) -> list[float]:
    wishes: dict[str, Any] = {"num_workers": 0, "save_steps": 100, "batch_size": 2, "num_epochs": 2}
    launch_training_task(Accelerator(cpu=True), data, Toy(), ModelLogger(out), 1e-2, **wishes)
    return [event["loss"] for event in read_log(out / "log.jsonl") if event["event"] == "step"]


def test_stage_two_is_stage_one(tmp_path: Path) -> None:
    data = Pictures(6, mixed=True)
    assert process(tmp_path / "cache", data) == 6
    kept = ProcessedDataset(tmp_path / "cache")
    assert len(kept) == 6
    assert set(kept[0]) == {"latents"}, "neither the picture nor its name is read later"
    assert [kept.bucket_of(index) for index in range(6)] == [data.bucket_of(index) for index in range(6)]
    before = Encode.runs
    two = losses(tmp_path / "two", kept)
    assert Encode.runs == before
    assert two == losses(tmp_path / "one", data)
    assert len(two) == 8


def test_people_can_read_where_a_sample_is(tmp_path: Path) -> None:
    process(tmp_path)
    view = json.loads((tmp_path / "0" / "3.json").read_text())
    assert view["tensors"] == {"latents": ["float32", [3, 6, 6]]}
    assert (tmp_path / view["shard"]).is_file()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["recipe"]["units"][0]["unit"] == "Encode"
    assert manifest["recipe"]["kept"][0] == "latents"


def test_only_what_changed_is_computed_again(tmp_path: Path) -> None:
    class Edited(Pictures):
        def __getitem__(self, index: int) -> dict[str, Any]:
            item = super().__getitem__(index)
            return {**item, "picture": item["picture"] + (index == 2)}

    assert process(tmp_path) == 6
    assert process(tmp_path) == 0
    assert process(tmp_path, Edited(6, mixed=True)) == 1
    kept = ProcessedDataset(tmp_path)
    assert len(kept) == 6
    assert torch.equal(kept[2]["latents"], Toy().process(Edited(6, mixed=True)[2])["latents"])
    other = Toy()
    with torch.no_grad():
        other.encoder.weight += 1
    assert process(tmp_path, model=other) == 6, "an encoder with other weights makes all stale"
    assert process(tmp_path, Pictures(7, mixed=True), other) == 1


def test_an_interrupted_process_keeps_its_shards(tmp_path: Path) -> None:
    class Broken(Pictures):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 4:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        process(tmp_path, Broken(6), shard_size=2)
    with pytest.raises(UserError, match="no processed data in"):
        ProcessedDataset(tmp_path)
    assert process(tmp_path, Pictures(6), shard_size=2) == 2


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    process(tmp_path)
    shard = next((tmp_path / "shards").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    kept = ProcessedDataset(tmp_path)
    with pytest.raises(UserError, match=rf"{shard} is missing or damaged"):
        [kept[index] for index in range(6)]
