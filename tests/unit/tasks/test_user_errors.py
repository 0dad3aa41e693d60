"""User errors: one line that names the setting and the remedy, and no training progress is lost."""

import math
import os
import re
import signal
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import get_worker_info

from sd3_light import tasks
from sd3_light.checkpoint.store import write_part
from sd3_light.config.faults import Stopped, UserError
from sd3_light.tasks import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger, PipelineUnit, unit
from sd3_light.tasks.train import aborting_on_error
from tests.unit.tasks.toy import Encode, Images, Toy, process, train

run = partial(train, save_steps=100, batch_size=2, max_steps=3, num_epochs=9)


def error_of(call: Any) -> str:
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_decay": -1}, "weight_decay is -1; give a number >= 0"),
        ({"num_workers": "2"}, "num_workers is '2'; give an integer >= 0"),
        ({"save_steps": 2.5}, "save_steps is 2.5; give an integer >= 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"betas": (1, 2)}, "betas is (1, 2); give two numbers"),
        ({"ema_decay": 1.5}, "ema_decay is 1.5"),
        ({"optimizer": "sgd"}, 'optimizer is \'sgd\'; give one of "adamw", "adamw8bit", "muon"'),
        ({"engine": "ddp"}, 'give one of "accelerate", "torch", "deepspeed"'),
        ({"engine": "deepspeed", "zero_stage": 3}, "zero_stage=3 is not supported for tasks: it shards the weights"),
        ({"engine": "deepspeed", "zero_stage": 4}, "zero_stage is 4; give"),
        ({"zero_stage": 1}, 'zero_stage has no effect without engine="deepspeed"'),
        ({"eval_dataset": [1]}, "eval_dataset needs eval_steps beside it"),
        ({"draw_steps": 2}, "draw_steps needs draw beside it"),
        ({"lr_step_size": 2}, "lr_step_size has no effect without lr_scheduler='step'"),
        ({"args": {"seed": 1}}, "give argparse.Namespace(**args)"),
        ({"args": Namespace(seed="x")}, "seed is 'x'"),
        ({"data": []}, "the dataset is empty"),
        ({"data": (n for n in "ab")}, "the dataset is a generator; give a list"),
        ({"data": [torch.zeros(3)]}, "sample 0 is a Tensor; a dataset returns dicts"),
        ({"bucket_of": lambda index: [index]}, "bucket_of(0) raised TypeError: unhashable"),
        ({"eval_dataset": [], "eval_steps": 1}, "the dataset is empty"),
        ({"model": nn.Linear(2, 2)}, "the model is a Linear; derive it from DiffusionTrainingModule"),
        ({"logger": "out"}, "the logger is a str; give ModelLogger(output_path)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    assert message in error_of(lambda: run(tmp_path / "out", **settings))
    assert not list((tmp_path / "out").glob("*.safetensors"))


class Bare(DiffusionTrainingModule):
    def __init__(self, *units: Any, **keys: Any) -> None:
        super().__init__(nn.Conv2d(3, 3, 1), units, **keys)
        self.encoder = nn.Conv2d(3, 3, 1)


def changed(**attributes: Any) -> Toy:
    """Return a toy with other attributes; `denoise` gets the module too."""
    return type("Changed", (Toy,), attributes)()


def one_channel(self: Any, noisy: Any, *_: Any) -> Any:
    return self.transformer(noisy)[:, :1]


def with_spare_weights() -> Toy:
    model = Toy()
    model.transformer.spare = nn.Linear(2, 2)
    return model


class ReturnsNone(PipelineUnit):
    reads, writes = ("image",), ("latents",)

    def run(self, module: Any, image: Any) -> Any:
        return None


@unit("latents", uses="vea")
def misspelt(module: Any, image: Any) -> Any:
    return image


@unit("latents")
def broken(module: Any, image: Any) -> Any:
    return image["pixels"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bare(Encode()), "Bare has no denoise(noisy, t, inputs)"),
        (lambda: Bare(len), "unit 0 is a builtin_function_or_method; derive it from PipelineUnit"),
        (lambda: Bare(ReturnsNone()), "unit ReturnsNone returned a NoneType; return a dict of ['latents']"),
        (lambda: Bare(misspelt), "unit misspelt uses 'vea', which the module does not have; set self.vea"),
        (lambda: Bare(broken), "unit broken raised"),
        (lambda: Bare(Encode(), ReturnsNone()), "units Encode and ReturnsNone both write 'latents'"),
        (lambda: changed(denoise=one_channel), "denoise returned (2, 1, 4, 4) for latents of (2, 3, 4, 4)"),
        (lambda: changed(denoise=lambda self, noisy, *_: 0 * noisy), "the loss depends on no weight that trains"),
        (with_spare_weights, "no gradient reached spare.weight of the denoiser"),
        (lambda: changed(reads=("text",)), "'text' is read, but it is neither in the data nor written by a unit"),
        (lambda: Bare(Encode(), loss=lambda *inputs: 0), "derive it from FlowMatchSFTLoss"),
    ],
)
def test_bad_modules(tmp_path: Path, make: Any, message: str) -> None:
    assert message in error_of(lambda: run(tmp_path, make()))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": "8"}, "train_adapter: rank: wrong type"),
        ({"rnak": 8}, "train_adapter: rnak: unknown key; got 8; did you mean `rank`?"),
        ({"target_modules": ["9"]}, "9: no linear layer matches"),
        ({"type": "lokr", "use_dora": True}, 'use_dora: has no effect with type = "lokr"'),
        ({"init_from_existing": "nowhere.safetensors"}, "nowhere.safetensors is not a file"),
    ],
)
def test_bad_adapters(keys: dict[str, Any], message: str) -> None:
    model = Toy()
    model.transformer = nn.Sequential(nn.Flatten(2), nn.Linear(16, 16))
    assert message in error_of(lambda: model.train_adapter(**{"target_modules": ["1"], **keys}))


def test_bad_losses_and_loggers() -> None:
    assert "shift is -1; give a number >= 0.001" in error_of(lambda: FlowMatchSFTLoss(shift=-1))
    line = error_of(lambda: FlowMatchSFTLoss(timestep_sample_method="cosine"))
    assert 'give one of "logit_normal", "uniform"' in line
    assert "beta is 0; give a number > 0" in error_of(lambda: tasks.FlowMatchDPOLoss(beta=0))
    assert "save_dtype is torch.int8" in error_of(lambda: ModelLogger("out", save_dtype=torch.int8))
    assert "output_path is None" in error_of(lambda: ModelLogger(None))  # type: ignore[arg-type]


class Damaged(Images):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("cannot decode")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_sample_loses_no_step(tmp_path: Path, workers: int) -> None:
    """The task stops, names the sample and saves a checkpoint; it resumes when the sample is fixed."""
    whole = run(tmp_path / "whole", max_steps=6)
    message = error_of(lambda: run(tmp_path / "broken", data=Damaged(), max_steps=6, num_workers=workers))
    assert message.startswith("sample 5: the dataset raised ValueError: cannot decode; fix the sample, or leave it out")
    assert "is saved: resume=True continues" in message
    events = run(tmp_path / "broken", max_steps=6, resume=True)
    losses = [[event["loss"] for event in log if event["event"] == "step"] for log in (whole, events)]
    assert losses[0] == losses[1]
    assert [event["event"] for event in events].count("resume") == 1


class Fails(Toy):
    """Its denoiser fails at call number ``at``, or when it is validated if that is None."""

    def __init__(self, at: int | None, error: Exception) -> None:
        super().__init__()
        self.at, self.error, self.calls = at, error, 0

    def denoise(self, noisy: Any, t: Any, inputs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at or (self.at is None and not torch.is_grad_enabled()):
            raise self.error
        return super().denoise(noisy, t, inputs)


@pytest.mark.parametrize(
    ("at", "error", "message"),
    [
        (3, RuntimeError("odd shapes"), "denoise of Fails raised RuntimeError: odd shapes; fix it"),
        (None, AssertionError("odd"), "denoise of Fails raised AssertionError: odd; fix it"),
        (3, torch.OutOfMemoryError("CUDA out of memory."), "denoise of Fails: CUDA out of memory; lower batch_size"),
    ],
)
def test_a_denoiser_that_fails_loses_no_step(tmp_path: Path, at: int | None, error: Exception, message: str) -> None:
    settings: dict[str, Any] = {"eval_dataset": Images(2), "eval_steps": 2}
    line = error_of(lambda: run(tmp_path, Fails(at, error), **(settings if at is None else {})))
    assert line.startswith(message)
    assert "(step 2 is saved: resume=True continues" in line
    assert run(tmp_path, resume=True)[-1]["step"] == 3


class Killed(Images):
    """Its worker is killed after four samples, as the kernel does when memory is short."""

    used = 0

    def __getitem__(self, index: int) -> Any:
        self.used += 1
        if get_worker_info() is not None and self.used > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    line = error_of(lambda: run(tmp_path, data=Killed(8), num_workers=1, max_steps=20))
    assert re.match(r"DataLoader worker \(pid \d+\) was killed by SIGKILL: out of memory", line)
    assert "dataset_num_workers in scripts" in line
    saved = re.search(r"\(step (\d+) is saved: resume=True continues", line)
    assert run(tmp_path, data=Images(8), resume=True, max_steps=int(saved[1]) + 1)[-1]["step"] == int(saved[1]) + 1


def test_an_error_stays_as_it_is_when_the_device_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Mock(side_effect=RuntimeError("the device is gone"))
    monkeypatch.setattr("sd3_light.checkpoint.background.HostBuffers.copy", gone)
    with pytest.raises(UserError, match=r"odd; fix it$") as error:
        run(tmp_path, Fails(3, ValueError("odd")))
    assert isinstance(error.value.__cause__, ValueError), "an error is not its own cause"


def test_an_error_aborts_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    monkeypatch.setattr("sd3_light.tasks.train.abort_process_group", lambda: aborted.append("aborted"))
    error_of(lambda: run(tmp_path, batch_size=0))
    assert not aborted, "there is one process"
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(Stopped), aborting_on_error():
        raise Stopped("all of them stop")
    assert not aborted
    error_of(lambda: tasks.launch_training_task(None, Images(), Toy(), ModelLogger(tmp_path), batch_size=0))
    assert aborted == ["aborted"]


def test_a_failed_save_is_reported_and_the_next_one_may_succeed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    full = {"step-00000002"}

    def write(folder: Path, *args: Any) -> int:
        if any(name in str(folder) for name in full):
            time.sleep(0.3)  # longer than a step
            raise OSError(28, "No space left on device")
        return write_part(folder, *args)

    monkeypatch.setattr("sd3_light.checkpoint.background.write_part", write)
    events = run(tmp_path / "whole", max_steps=4, checkpoint_steps=1)
    assert (tmp_path / "whole" / "step-4.safetensors").is_file()
    failed = next(at for at, event in enumerate(events) if event["event"] == "checkpoint_failed")
    assert failed < next(at for at, event in enumerate(events) if event["event"] == "step" and event["step"] == 4)
    assert "the checkpoint at step 2 failed: No space left on device" in capsys.readouterr().err
    settings: dict[str, Any] = {"draw": lambda model: 1 // 0, "draw_steps": 3, "checkpoint_steps": 1}
    assert "(step 3 is saved: resume=True" in error_of(lambda: run(tmp_path / "broken", **settings))
    full.add("step-00000004")
    line = error_of(lambda: run(tmp_path / "last", max_steps=4, checkpoint_steps=1))
    assert "the checkpoint at step 4 failed" in line


def test_a_folder_holds_one_task(tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*"))
    assert "holds a task (step-00000003); continue it with resume=True" in error_of(lambda: run(tmp_path / "out"))
    other = error_of(lambda: run(tmp_path / "out", Toy(adapter=True), resume=True))
    assert "it belongs to another model" in other
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*")) == before
    (tmp_path / "out" / "checkpoints" / "step-00000003" / "index.json").unlink()
    for resume in (False, True):
        damaged = error_of(lambda: run(tmp_path / "out", resume=resume))  # noqa: B023
        assert "is damaged: step-00000003 (index.json cannot be read); restore one from a copy, or choose" in damaged
    (tmp_path / "file").write_text("taken")
    line = error_of(lambda: run(tmp_path / "file" / "out"))
    assert "is not writable (Not a directory); choose another output_path" in line


def test_processed_data_of_other_units_are_rejected(tmp_path: Path) -> None:
    """Changed weights are an error; parts that the second stage does not load are not checked."""
    data, model = process(tmp_path / "data"), Toy()
    with torch.no_grad():
        model.encoder.weight += 1
    line = error_of(lambda: run(tmp_path / "out", model, data))
    assert "was made by unit Encode with another 'encoder' than it has now" in line
    del model.encoder
    run(tmp_path / "light", model, data)


class Scaled(PipelineUnit):
    def __init__(self, read: str, write: str, scale: float) -> None:
        self.reads, self.writes, self.scale = (read,), (write,), scale

    def run(self, module: Any, **values: Any) -> Any:
        return {self.writes[0]: values[self.reads[0]] * self.scale}


def test_units_of_one_class_are_distinguished(tmp_path: Path) -> None:
    def model(hint: float) -> Toy:
        toy = Toy()
        toy.units, toy.reads = (Scaled("image", "latents", 1.0), Scaled("control", "hint", hint)), ("hint",)
        return toy

    raw = [{"image": torch.ones(3, 4, 4) * n, "control": torch.ones(3)} for n in range(4)]
    data = process(tmp_path / "data", raw, model(2.0))
    run(tmp_path / "same", model(2.0), data)
    assert "by unit Scaled with another 'settings'" in error_of(lambda: run(tmp_path / "other", model(3.0), data))
    data = [{"image": torch.full((3, 4, 4), math.nan)}] * 4
    assert "none of 3 steps was taken" in error_of(lambda: run(tmp_path / "short", data=data))
    line = error_of(lambda: run(tmp_path / "long", data=data, max_steps=9, max_nonfinite_steps=2))
    assert "not finite in 3 steps in a row" in line


def test_bad_data_for_processing(tmp_path: Path) -> None:
    assert "sample 5: the dataset raised" in error_of(lambda: process(tmp_path / "a", data=Damaged()))
    assert "the dataset is empty" in error_of(lambda: process(tmp_path / "b", data=[]))
    process(tmp_path / "c")
    (note,) = (tmp_path / "c" / "shards").glob("*.json")
    note.write_text("{")
    runs = Encode.runs
    assert len(process(tmp_path / "c")) == 6
    assert Encode.runs - runs == 6, "samples of a shard with a damaged entry are computed again"
    (table,) = (tmp_path / "c" / "shards").glob("*.arrow")
    table.write_bytes(b"ARROW1")
    assert len(process(tmp_path / "c")) == 6
    assert Encode.runs - runs == 12
    (tmp_path / "c" / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in error_of(lambda: tasks.ProcessedDataset(tmp_path / "c"))
