"""What people get wrong: one line that names the thing and the remedy, and nothing is lost."""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from sd3_light.checkpoint.store import write_part
from sd3_light.config.faults import Stopped, UserError
from sd3_light.runlog import read_log
from sd3_light.tasks import (
    DiffusionTrainingModule,
    FlowMatchSFTLoss,
    ModelLogger,
    PipelineUnit,
    ProcessedDataset,
    launch_data_process_task,
    launch_training_task,
    unit,
)
from sd3_light.tasks.train import leaving_on_fault
from tests.unit.tasks.toy import Encode, Pictures, Toy


def run(out: Path, model: Any = None, data: Any = None, **wishes: Any) -> list[Any]:
    given: dict[str, Any] = {"num_workers": 0, "save_steps": 100, "batch_size": 2, "max_steps": 3, "num_epochs": 9}
    logger = wishes.pop("logger", None) or ModelLogger(out)
    accelerator = Accelerator(cpu=True)
    data = Pictures() if data is None else data
    launch_training_task(accelerator, data, model or Toy(), logger, 1e-2, **{**given, **wishes})
    return list(read_log(out / "log.jsonl"))


def said(call: Any) -> str:
    with pytest.raises(UserError) as fault:
        call()
    text = str(fault.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"weight_decay": -1}, "weight_decay is -1; give a number from 0 on"),
        ({"num_workers": "2"}, "num_workers is '2'; give a whole number from 0 on"),
        ({"save_steps": 2.5}, "save_steps is 2.5; give a whole number from 1 on"),
        ({"batch_size": True}, "batch_size is True"),
        ({"betas": (1, 2)}, "betas is (1, 2); give two numbers"),
        ({"ema_decay": 1.5}, "ema_decay is 1.5"),
        ({"optimizer": "sgd"}, "give one of adamw, adamw8bit, muon"),
        ({"engine": "ddp"}, "give one of accelerate, torch, deepspeed"),
        ({"eval_dataset": [1]}, "eval_dataset needs eval_steps beside it"),
        ({"draw_steps": 2}, "draw_steps needs draw beside it"),
        ({"lr_step_size": 2}, "lr_step_size has no meaning without lr_scheduler='step'"),
        ({"args": {"seed": 1}}, "give argparse.Namespace(**args)"),
        ({"args": Namespace(seed="x")}, "seed is 'x'"),
        ({"data": []}, "the data set is empty"),
        ({"data": (n for n in "ab")}, "the data set is a generator; give a list"),
        ({"data": [torch.zeros(3)]}, "sample 0 is a Tensor; a data set gives dicts"),
        ({"bucket_of": lambda index: [index]}, "bucket_of(0) raised TypeError: unhashable"),
        ({"eval_dataset": [], "eval_steps": 1}, "the data set is empty"),
        ({"model": nn.Linear(2, 2)}, "the model is a Linear; derive it from DiffusionTrainingModule"),
        ({"logger": "out"}, "the logger is a str; give ModelLogger(output_path)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_calls(tmp_path: Path, wishes: dict[str, Any], words: str) -> None:
    assert words in said(lambda: run(tmp_path / "out", **wishes))
    assert not list((tmp_path / "out").glob("*.safetensors"))


class Without(DiffusionTrainingModule):
    def __init__(self, *units: Any, **keys: Any) -> None:
        super().__init__(nn.Conv2d(3, 3, 1), units, **keys)
        self.encoder = nn.Conv2d(3, 3, 1)


class Squeezed(Toy):
    def denoise(self, noisy: Any, t: Any, inputs: Any) -> Any:
        return self.transformer(noisy)[:, :1]


class Idle(Toy):
    def denoise(self, noisy: Any, t: Any, inputs: Any) -> Any:
        return noisy * 0


class Spare(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.transformer.spare = nn.Linear(2, 2)


class Lacking(Toy):
    reads = ("text",)


class Nothing(PipelineUnit):
    reads, writes = ("picture",), ("latents",)

    def run(self, module: Any, picture: Any) -> Any:
        return None


@unit("latents", uses="vea")
def misspelt(module: Any, picture: Any) -> Any:
    return picture


@unit("latents")
def broken(module: Any, picture: Any) -> Any:
    return picture["pixels"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Without(Encode()), "Without has no denoise(noisy, t, inputs)"),
        (lambda: Without(len), "unit 0 is a builtin_function_or_method; derive it from PipelineUnit"),
        (lambda: Without(Nothing()), "unit Nothing gave a NoneType; return a dict of ['latents']"),
        (lambda: Without(misspelt), "unit misspelt uses 'vea', which the module lacks; set self.vea"),
        (lambda: Without(broken), "unit broken raised"),
        (lambda: Without(Encode(), Nothing()), "units Encode and Nothing both write 'latents'"),
        (Squeezed, "denoise gave (2, 1, 4, 4) for latents of (2, 3, 4, 4)"),
        (Idle, "the loss depends on no weight that trains"),
        (Spare, "no gradient reached spare.weight of the denoiser"),
        (Lacking, "neither the data nor a unit gives 'text', which is read"),
        (lambda: Without(Encode(), loss=lambda *given: 0), "derive it from FlowMatchSFTLoss"),
    ],
)
def test_modules(tmp_path: Path, make: Any, words: str) -> None:
    assert words in said(lambda: run(tmp_path, make()))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rank": "8"}, "train_adapter: rank: wrong type"),
        ({"rnak": 8}, "train_adapter: rnak: unknown key; got 8; did you mean `rank`?"),
        ({"target_modules": ["9"]}, "9: no linear layer's name ends so"),
        ({"type": "lokr", "use_dora": True}, 'use_dora: has no effect with type = "lokr"'),
        ({"init_from_existing": "nowhere.safetensors"}, "nowhere.safetensors is no file"),
    ],
)
def test_adapters(keys: dict[str, Any], words: str) -> None:
    model = Toy()
    model.transformer = nn.Sequential(nn.Flatten(2), nn.Linear(16, 16))
    assert words in said(lambda: model.train_adapter(**{"target_modules": ["1"], **keys}))


def test_losses_and_loggers() -> None:
    assert "shift is -1; give a number above 0" in said(lambda: FlowMatchSFTLoss(shift=-1))
    assert "give one of logit_normal, uniform" in said(lambda: FlowMatchSFTLoss(timestep_sample_method="cosine"))  # type: ignore[arg-type]
    assert "save_dtype is torch.int8" in said(lambda: ModelLogger("out", save_dtype=torch.int8))
    assert "output_path is None" in said(lambda: ModelLogger(None))  # type: ignore[arg-type]


class Damaged(Pictures):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("cannot decode")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_loses_no_step(tmp_path: Path, workers: int) -> None:
    """The task stops, names it, has saved what it did, and goes on when the sample is mended."""
    whole = run(tmp_path / "whole", max_steps=6)
    text = said(lambda: run(tmp_path / "broken", data=Damaged(), max_steps=6, num_workers=workers))
    assert text.startswith("sample 5: the data set raised ValueError: cannot decode; mend the sample, or leave it out")
    assert "is saved: resume=True goes on" in text
    events = run(tmp_path / "broken", max_steps=6, resume=True)
    losses = [[event["loss"] for event in log if event["event"] == "step"] for log in (whole, events)]
    assert losses[0] == losses[1]
    assert [event["event"] for event in events].count("resume") == 1


class Fails(Toy):
    """Its denoiser fails at a call; none: when it is validated."""

    def __init__(self, at: int | None, error: Exception) -> None:
        super().__init__()
        self.at, self.error, self.calls = at, error, 0

    def denoise(self, noisy: Any, t: Any, inputs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at or (self.at is None and not torch.is_grad_enabled()):
            raise self.error
        return super().denoise(noisy, t, inputs)


@pytest.mark.parametrize(
    ("at", "error", "words"),
    [
        (3, RuntimeError("odd shapes"), "denoise of Fails raised RuntimeError: odd shapes; mend it"),
        (None, AssertionError("odd"), "denoise of Fails raised AssertionError: odd; mend it"),
        (3, torch.OutOfMemoryError("CUDA out of memory."), "denoise of Fails: CUDA out of memory; lower batch_size"),
        (3, RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "DataLoader worker (pid 7) is"),
    ],
)
def test_a_denoiser_that_fails_loses_no_step(tmp_path: Path, at: int | None, error: Exception, words: str) -> None:
    wishes: dict[str, Any] = {"eval_dataset": Pictures(2), "eval_steps": 2}
    text = said(lambda: run(tmp_path, Fails(at, error), **(wishes if at is None else {})))
    assert text.startswith(words)
    assert "(step 2 is saved: resume=True goes on" in text
    assert run(tmp_path, resume=True)[-1]["step"] == 3


def test_a_worker_s_death_and_a_device_s_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells of a worker wherever the trainer is. A device that failed cannot be saved from: the fault stays."""

    def die(*given: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    with monkeypatch.context() as patch:
        patch.setattr("sd3_light.engines.accelerate.TaskEngine.train_step", die)
        assert said(lambda: run(tmp_path / "a")).startswith("DataLoader worker (pid 7) is killed")
    monkeypatch.setattr("sd3_light.checkpoint.background.HostBuffers.take", die)
    with pytest.raises(UserError, match=r"odd; mend it$") as told:
        run(tmp_path / "b", Fails(3, ValueError("odd")))
    assert isinstance(told.value.__cause__, ValueError), "a fault is not its own cause"


def test_after_a_fault_the_other_processes_are_left_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr("sd3_light.tasks.train.abort_process_group", lambda: left.append("left"))
    said(lambda: run(tmp_path, batch_size=0))
    assert not left, "nobody is there"
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(Stopped), leaving_on_fault():
        raise Stopped("all of them stop")
    assert not left
    said(lambda: launch_training_task(None, Pictures(), Toy(), ModelLogger(tmp_path), batch_size=0))
    assert left == ["left"]


def test_a_save_that_fails_is_told_at_once_and_the_next_one_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"step-00000001"}

    def write(folder: Path, *given: Any) -> int:
        if any(name in str(folder) for name in full):
            raise OSError(28, "No space left on device")
        return write_part(folder, *given)

    monkeypatch.setattr("sd3_light.checkpoint.background.write_part", write)
    events = run(tmp_path / "whole", max_steps=4, checkpoint_steps=1)
    assert (tmp_path / "whole" / "step-4.safetensors").is_file()
    failed = next(at for at, event in enumerate(events) if event["event"] == "checkpoint_failed")
    assert failed < next(at for at, event in enumerate(events) if event["event"] == "step" and event["step"] == 4)
    assert "the checkpoint at step 1 failed: No space left on device" in capsys.readouterr().err
    wishes: dict[str, Any] = {"draw": lambda model: 1 // 0, "draw_steps": 3, "checkpoint_steps": 1}
    assert "(step 3 is saved: resume=True" in said(lambda: run(tmp_path / "broken", **wishes))
    full.add("step-00000004")
    assert "the checkpoint at step 4 failed" in said(lambda: run(tmp_path / "last", max_steps=4, checkpoint_steps=1))


def test_what_is_never_finite_is_no_success(tmp_path: Path) -> None:
    data = [{"picture": torch.full((3, 4, 4), math.nan)}] * 4
    assert "none of 3 steps was taken" in said(lambda: run(tmp_path / "short", data=data))
    assert "not finite in 3 steps in a row" in said(
        lambda: run(tmp_path / "long", data=data, max_steps=9, max_nonfinite_steps=2)
    )


def test_a_folder_is_one_task_s(tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*"))
    assert "holds a task (step-00000003); go on with resume=True" in said(lambda: run(tmp_path / "out"))
    other = said(lambda: run(tmp_path / "out", Toy(adapter=True), resume=True))
    assert "it is of another model" in other
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*")) == before
    (tmp_path / "file").write_text("taken")
    assert "cannot be written to (Not a directory); choose another output_path" in said(
        lambda: run(tmp_path / "file" / "out")
    )


def process(out: Path, model: Any = None, data: Any = None) -> ProcessedDataset:
    given: Any = Pictures(6) if data is None else data
    launch_data_process_task(Accelerator(cpu=True), given, model or Toy(), ModelLogger(out), num_workers=0)
    return ProcessedDataset(out)


def test_processed_data_of_other_units_are_not_trained_on(tmp_path: Path) -> None:
    """Weights that changed are a fault; parts that stage two does not load are not asked for."""
    data, model = process(tmp_path / "data"), Toy()
    with torch.no_grad():
        model.encoder.weight += 1
    assert "was made by unit Encode with another 'encoder' than it has now" in said(
        lambda: run(tmp_path / "out", model, data)
    )
    del model.encoder
    run(tmp_path / "light", model, data)


class Scaled(PipelineUnit):
    def __init__(self, read: str, write: str, scale: float) -> None:
        self.reads, self.writes, self.scale = (read,), (write,), scale

    def run(self, module: Any, **values: Any) -> Any:
        return {self.writes[0]: values[self.reads[0]] * self.scale}


def test_units_of_one_class_are_told_apart(tmp_path: Path) -> None:
    def model(hint: float) -> Toy:
        made = Toy()
        made.units, made.reads = (Scaled("picture", "latents", 1.0), Scaled("control", "hint", hint)), ("hint",)
        return made

    raw = [{"picture": torch.ones(3, 4, 4) * n, "control": torch.ones(3)} for n in range(4)]
    data = process(tmp_path / "data", model(2.0), raw)
    run(tmp_path / "same", model(2.0), data)
    assert "by unit Scaled with another 'settings'" in said(lambda: run(tmp_path / "other", model(3.0), data))


def test_data_that_cannot_be_processed(tmp_path: Path) -> None:
    assert "sample 5: the data set raised" in said(lambda: process(tmp_path / "a", data=Damaged()))
    assert "the data set is empty" in said(lambda: process(tmp_path / "b", data=[]))
    process(tmp_path / "c")
    (tmp_path / "c" / "0" / "3.json").write_text("{")
    assert len(process(tmp_path / "c")) == 6, "a damaged view is computed again"
    (tmp_path / "c" / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in said(lambda: ProcessedDataset(tmp_path / "c"))
