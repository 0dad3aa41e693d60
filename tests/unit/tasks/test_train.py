"""`launch_training_task`: what it trains, logs, saves and resumes."""

import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from PIL import Image
from safetensors.torch import load_file

from sd3_light import __version__
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.config.faults import RESUMABLE, Stopped, UserError
from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objective, Prediction
from sd3_light.engines import Launch
from sd3_light.engines import accelerate as engine_file
from sd3_light.engines.torch import TorchEngine, micro_losses
from sd3_light.evaluate.validation import EvalPreparer
from sd3_light.export import convert
from sd3_light.export import verb as export_verb
from sd3_light.export.chosen import choose_model
from sd3_light.flow.objective import BAND_NAMES
from sd3_light.tasks import FlowMatchSFTLoss, ModelLogger, launch_training_task
from sd3_light.tasks.models import UnitModel
from sd3_light.tasks.prepare import rows_of
from sd3_light.tasks.settings import TaskSettings
from tests.leftovers import leave
from tests.unit.tasks.toy import Images, PackageLogger, Toy, steps, train

pytestmark = pytest.mark.usefixtures("one_thread")


run = partial(train, save_steps=100)


def saved(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.safetensors")}


def test_a_task_trains_and_logs_its_steps(tmp_path: Path) -> None:
    model = Toy()
    frozen = model.encoder.weight.clone()
    events = run(tmp_path, model, num_epochs=3, batch_size=2, max_steps=10)
    (start,) = (event for event in events if event["event"] == "start")
    assert (start["total"], start["version"]) == (10, __version__)
    assert steps(events, "samples", "lr") == [(2 * n, 1e-2) for n in range(1, 11)], "constant from the first step on"
    assert all(norm > 0 for (norm,) in steps(events, "grad_norm"))
    assert torch.equal(model.encoder.weight, frozen), "everything outside the denoiser is frozen"
    file = load_file(tmp_path / "step-10.safetensors")
    assert all(torch.equal(file[name], weight) for name, weight in model.transformer.state_dict().items())
    # their mean over samples is the loss, also with accumulation.
    events = run(tmp_path / "bands", batch_size=2, gradient_accumulation_steps=2, logging_steps=2)
    (first,) = [event for event in events if event["event"] == "step"]
    assert set(first["band"]) <= set(BAND_NAMES)
    assert len(first["band"]) > 1
    whole = Toy()
    samples = [{"data": Images()[n], "data_id": n, "epoch": 0, "repeat": 0} for n in range(8)]
    batch = whole.preparer().prepare_inputs(rows_of(samples))
    with torch.no_grad():
        bands = micro_losses(UnitModel(whole), batch, torch.device("cpu"))[1]
    assert bands[1].sum() == 8
    assert {name for name, count in zip(BAND_NAMES, bands[1], strict=True) if count} == set(first["band"])


def test_saves_by_epoch_by_step_and_by_a_custom_hook(tmp_path: Path) -> None:
    run(tmp_path / "epochs", save_steps=None, num_epochs=2, batch_size=4)
    assert saved(tmp_path / "epochs") == {"epoch-0", "epoch-1"}
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "step-3.safetensors").write_bytes(b"of another program")
    run(tmp_path / "steps", save_steps=3, batch_size=2)
    assert load_file(tmp_path / "steps" / "step-3.safetensors"), "a stale file is replaced"
    assert saved(tmp_path / "steps") == {"step-3", "step-4"}
    called: list[int] = []

    class Hook(ModelLogger):
        def on_step_end(self, accelerator: Any, model: Any, save_steps: int | None = None) -> None:
            called.append(self.num_steps)
            super().on_step_end(accelerator, model, save_steps)

    train(tmp_path / "hook", logger=Hook(tmp_path / "hook"), save_steps=2, batch_size=2)
    assert called == [0, 1, 2, 3]
    assert saved(tmp_path / "hook") == {"step-2", "step-4"}
    seen: list[int] = []

    class Recorded(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            seen.append(index)
            return super().__getitem__(index)

    run(tmp_path / "shuffled", data=Recorded(), num_epochs=2, batch_size=4)
    first, second = seen[:8], seen[8:]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


class OurLogger(ModelLogger):
    def __init__(self, output_path: Path) -> None:
        super().__init__(output_path)
        self.files: list[str] = []

    def save_model(self, accelerator: Any, model: Any, file_name: str) -> Path:
        self.files.append(Path(file_name).stem)
        return super().save_model(accelerator, model, file_name)


@pytest.mark.parametrize("kind", [OurLogger, PackageLogger])
def test_the_last_step_is_always_saved_and_once(tmp_path: Path, kind: Any) -> None:
    """Inside an epoch (of four steps) and at its end, after a resume, and when a finished task is resumed."""

    def files(name: str, **settings: Any) -> list[str]:
        logger, model = kind(tmp_path / name), Toy()
        train(tmp_path / name, model, logger=logger, **{"batch_size": 2, "num_epochs": 2, **settings})
        if settings.get("ema_decay") is None and logger.files:
            file = load_file(tmp_path / name / f"{logger.files[-1]}.safetensors")
            state = model.transformer.state_dict()
            assert all(
                torch.equal(file[name if name in file else f"transformer.{name}"], state[name]) for name in state
            )
        return list(logger.files)

    assert files("inside", max_steps=3) == ["step-3"]
    assert files("inside", max_steps=3, resume=True) == [], "nothing is missing"
    assert files("inside", max_steps=6, resume=True) == ["epoch-0", "step-6"]
    assert files("end", max_steps=4) == ["epoch-0"]
    assert files("steps", max_steps=3, save_steps=3) == ["step-3"]
    assert files("between", max_steps=3, save_steps=2) == ["step-2", "step-3"]
    for name, file, settings in (
        ("inside", "step-6", {"max_steps": 6}),
        ("inside", "step-6", {"max_steps": 5}),
        ("end", "epoch-0", {"max_steps": 4}),
        ("steps", "step-3", {"max_steps": 3, "save_steps": 3}),
        ("between", "step-3", {"max_steps": 3, "save_steps": 2}),
    ):
        path = tmp_path / name / f"{file}.safetensors"
        weights = path.read_bytes()
        path.unlink()
        assert files(name, resume=True, **settings) == [file], "a missing file is written again"
        assert path.read_bytes() == weights
    averaged: dict[str, Any] = {"max_steps": 3, "ema_decay": 0.5}
    assert files("ema", **averaged) == ["step-3"]
    assert not torch.equal(
        *(next(iter(load_file(tmp_path / name / "step-3.safetensors").values())) for name in ("ema", "steps"))
    )


def test_a_signal_ends_a_script_with_one_line_and_exit_code_75(tmp_path: Path) -> None:
    """The step after the signal is the last. A script that catches the exception continues."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    command = [sys.executable, str(root / "tests" / "unit" / "tasks" / "toy.py"), str(tmp_path), "stop"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == RESUMABLE, done.stderr
    line = "SIGTERM at step 3 of 72; resume=True continues from there"
    expected = ["wrote ['step-2']", "wrote ['step-2']", f"caught: {line}"]
    assert done.stdout.splitlines()[-3:] == expected, "accelerate imports DeepSpeed, which may print a warning first"
    assert done.stderr.splitlines()[-1] == f"stopped: {line}"
    assert "Traceback" not in done.stderr
    assert (tmp_path / "stopped" / "checkpoints" / "step-00000003").is_dir()


def test_the_file_save_quit_ends_a_script_with_exit_code_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.checkpoint.requests.FILE_CHECK_SECONDS", 0.0)
    (tmp_path / "save_quit").touch()
    leftover = leave(tmp_path / "step-5.safetensors")
    with pytest.raises(Stopped, match="save_quit at step 1 of 4; resume=True continues") as stopped:
        run(tmp_path, batch_size=2)
    assert isinstance(stopped.value, SystemExit)
    assert stopped.value.code == 0
    assert not leftover.exists(), "what a killed task left"


def test_accumulation_equals_the_larger_batch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_epochs": 2, "gradient_clipping": 0.5}
    whole = steps(run(tmp_path / "whole", batch_size=4, **settings), "loss", "grad_norm")
    parts = steps(run(tmp_path / "parts", batch_size=2, gradient_accumulation_steps=2, **settings), "loss", "grad_norm")
    workers = steps(run(tmp_path / "w", batch_size=4, num_workers=1, **settings), "loss", "grad_norm")
    assert len(whole) == 4
    assert np.array(parts) == pytest.approx(np.array(whole), rel=1e-5)
    assert workers == whole


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter with dropout"])
def test_an_interrupted_task_resumes_exactly(tmp_path: Path, adapter: bool) -> None:
    def model() -> Toy:
        return Toy(adapter, 0.3) if adapter else Toy()

    settings: dict[str, Any] = {"batch_size": 2, "num_epochs": 2, "ema_decay": 0.8, "lr_scheduler": "step"}
    settings |= {"lr_step_size": 2, "lr_step_gamma": 0.5, "warmup_steps": 2, "checkpoint_steps": 3}
    whole = run(tmp_path / "whole", model(), **settings)
    run(tmp_path / "broken", model(), max_steps=3, **settings)
    events = run(tmp_path / "broken", model(), resume=True, **settings)
    assert [event["event"] for event in events if event["event"] in ("start", "resume")] == ["start", "resume"]
    assert steps(events, "step", "loss", "lr", "grad_norm") == steps(whole, "step", "loss", "lr", "grad_norm")
    ends = [open_checkpoint(tmp_path / name / "checkpoints" / "step-00000008") for name in ("whole", "broken")]
    assert len(ends[0].shapes) == (4 if adapter else 2) * 5
    assert all(torch.equal(ends[0].tensor(name), ends[1].tensor(name)) for name in ends[0].shapes)
    with pytest.raises(UserError, match="in other batches or with another seed"):
        run(tmp_path / "broken", model(), resume=True, **{**settings, "batch_size": 4})


def test_evaluation_and_images_use_the_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "eval_dataset": Images(3), "eval_steps": 2, "ema_decay": 0.9}
    seen = []

    def draw(model: Any) -> Image.Image:
        seen.append(model.transformer.weight.clone())
        return Image.new("RGB", (4, 4))

    model = Toy()
    events = run(tmp_path, model, draw=draw, draw_steps=4, **settings)
    evals = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [2, 4]
    assert f"eval (ema) at step 2: flow loss {evals[0]['flow']:.4f}\n" in capsys.readouterr().err
    assert len([key for key in evals[0] if key.startswith("flow@")]) == 9
    assert (tmp_path / "samples" / "step-00000004.png").is_file()
    assert not torch.equal(seen[0], model.transformer.weight)
    assert torch.equal(seen[0], load_file(tmp_path / "step-4.safetensors")["weight"])
    frames = [Image.new("RGB", (16, 16), (40 * number, 0, 0)) for number in range(5)]
    run(tmp_path / "frames", Toy(), draw=lambda model: frames, draw_steps=4, max_steps=4)
    with Image.open(tmp_path / "frames" / "samples" / "step-00000004.gif") as video:
        assert video.n_frames == 5
    for number, drawn in enumerate(([], [1], 1)):
        with pytest.raises(UserError, match=r"returned a (list|int); return a PIL image, a list of them \(a video\)"):
            run(tmp_path / f"{number}", draw=lambda model, drawn=drawn: drawn, draw_steps=1, max_steps=1)


def test_validation_at_fixed_times_does_not_depend_on_the_distribution(tmp_path: Path) -> None:
    """Only the quantiles' losses change with the distribution of t."""
    settings: dict[str, Any] = {"eval_dataset": Images(3), "eval_steps": 1, "eval_at_fixed_t": True, "max_steps": 1}
    evals = []
    for loss in (FlowMatchSFTLoss(), FlowMatchSFTLoss(shift=3.0, logit_mean=0.5), FlowMatchSFTLoss(flux_shift=True)):
        model = Toy()
        model.loss = loss
        events = run(tmp_path / f"{len(evals)}", model, learning_rate=1e-12, **settings)
        evals.append(next(event for event in events if event["event"] == "eval"))
    for event in evals[1:]:
        fixed = {key: value for key, value in event.items() if key.startswith("fixed") and key != "fixed_se"}
        assert len(fixed) == 10
        assert fixed == pytest.approx({key: evals[0][key] for key in fixed}, rel=1e-5)
        assert event["flow@0.5"] != pytest.approx(evals[0]["flow@0.5"], rel=1e-3)
    uniform = Toy()
    uniform.loss = FlowMatchSFTLoss(timestep_sample_method="uniform")
    events = run(tmp_path / "uniform", uniform, learning_rate=1e-12, **settings)
    event = next(event for event in events if event["event"] == "eval")
    assert event["fixed@0.3"] == event["flow@0.3"]


class OtherLoss:
    """A loss without times."""

    reads, latents = ("latents",), "latents"

    def __call__(self, denoise: Any, inputs: Any, reference: Any) -> Any:
        return inputs["latents"].flatten(1).mean(1)


def test_args_override_and_unknown_settings_are_named(tmp_path: Path) -> None:
    args = Namespace(learning_rate=1e-3, num_epochs=2, lora_rank=None, batch_size=4)
    assert steps(run(tmp_path / "args", args=args), "lr") == [(1e-3,)] * 4
    with pytest.raises(UserError, match="does not know 'batchsize'"):
        run(tmp_path / "unknown", batchsize=4)
    with pytest.raises(UserError, match="batch_size is 0; give an integer >= 1"):
        run(tmp_path / "zero", batch_size=0)
    model: Any = Toy()
    model.loss = OtherLoss()
    settings: dict[str, Any] = {"eval_dataset": Images(3), "eval_steps": 1, "eval_at_fixed_t": True}
    with pytest.raises(UserError, match="eval_at_fixed_t needs a loss that draws times from quantiles"):
        run(tmp_path, model, **settings)


def test_unsupported_accelerators_are_rejected(tmp_path: Path) -> None:
    class Fake:
        mixed_precision, num_processes, process_index, local_process_index = "no", 1, 0, 0
        distributed_type = DistributedType.DEEPSPEED

    fake: Any = Fake()
    with pytest.raises(UserError, match='engine="deepspeed"'):
        engine_file.launch_from_accelerator(fake)
    with pytest.raises(UserError, match="does not use the Accelerator's DeepSpeed plugin; create it without"):
        launch_training_task(fake, Images(), Toy(), ModelLogger(tmp_path), engine="deepspeed")
    fake.distributed_type, fake.mixed_precision = DistributedType.NO, "fp16"
    with pytest.raises(UserError, match="needs loss scaling"):
        engine_file.launch_from_accelerator(fake)
    fake.mixed_precision, fake.num_processes = "no", 2
    with pytest.raises(UserError, match="reports 2 processes, torch 1"):
        engine_file.launch_from_accelerator(fake)
    with pytest.raises(UserError, match="gradient_accumulation_steps is 3 here and 2 in the Accelerator"):
        train(tmp_path, accelerator=Accelerator(gradient_accumulation_steps=2), gradient_accumulation_steps=3)
    model = Toy()
    model.transformer.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        run(tmp_path, model)
    with pytest.raises(UserError, match="trainable weights must be float32"):
        run(tmp_path, Toy().to(torch.bfloat16))


def test_an_engine_without_an_accelerator_trains_the_same(tmp_path: Path) -> None:
    expected = steps(run(tmp_path / "one", batch_size=4), "loss", "grad_norm")
    alone: dict[str, Any] = {"accelerator": None, "engine": "torch"}
    assert steps(run(tmp_path / "two", batch_size=4, **alone), "loss", "grad_norm") == expected
    # it uses one, also with an engine that needs none.
    model, logger = Toy(), PackageLogger(tmp_path / "package")
    train(tmp_path / "package", model, logger=logger, max_steps=2, **alone)
    assert logger.files == ["step-2"]
    file = load_file(tmp_path / "package" / "step-2.safetensors")
    assert all(
        torch.equal(file[f"transformer.{name}"], weight) for name, weight in model.transformer.state_dict().items()
    )


def test_bf16_narrows_frozen_weights_but_not_the_adapter(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The losses equal those of float32 weights, which autocast narrows for each product."""

    x, seen = torch.zeros(1, 3, 4, 4), []  # float32, as a pipeline feeds it

    class CustomLogger(ModelLogger):
        def on_step_end(self, accelerator: Any, model: Any, save_steps: int | None = None) -> None:
            seen.append(model.transformer(x).isfinite().all())

    def train(out: str, **more: Any) -> tuple[Toy, list[Any]]:
        model = Toy(adapter=True)
        settings: dict[str, Any] = {"accelerator": Accelerator(cpu=True, mixed_precision="bf16"), "batch_size": 4}
        settings |= {"draw": lambda model: seen.append(model.transformer(x).isfinite().all()), "draw_steps": 4}
        events = run(tmp_path / out, model, logger=CustomLogger(tmp_path / out), num_epochs=2, **settings, **more)
        return model, steps(events, "loss", "grad_norm")

    AcceleratorState._reset_state(reset_partial_state=True)
    model, losses = train("narrow")
    kinds = {(weight.requires_grad, weight.dtype) for weight in model.transformer.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert len(seen) == 5, "draw and the logger's hooks compute as in steps"
    assert {weight.dtype for weight in train("torch", engine="torch")[0].transformer.parameters()} == {torch.float32}
    assert 'engine="torch" does not use the Accelerator\'s mixed_precision' in capsys.readouterr().err
    monkeypatch.setattr("sd3_light.tasks.train.cast_frozen_linears", lambda *args: None)
    assert train("wide")[1] == losses
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_task_starts_from_the_adapter_of_another(tmp_path: Path) -> None:
    """Of a class other than SD3: training continues from it, and a wrong rank is named."""
    first = Toy(adapter=True)
    run(tmp_path / "first", first, save_steps=4, batch_size=2)
    file, second = tmp_path / "first" / "step-4.safetensors", Toy()
    second.transformer = Toy(adapter=True).transformer.eval()
    for name in "12":
        second.transformer[int(name)] = second.transformer[int(name)].get_base_layer()
    second.train_adapter(rank=2, alpha=1.0, target_modules=["1", "2"], init_from_existing=str(file))
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(second.transformer(x), first.transformer(x), atol=1e-6)
    assert str(tmp_path) not in str(run(tmp_path / "second", second, max_steps=1)), "no path gets into the log"
    third = Toy()
    third.transformer = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    with pytest.raises(UserError, match=r"has rank 2 .* write the rank and target_modules that it has"):
        third.train_adapter(rank=3, target_modules=["1", "2"], init_from_existing=str(file))


def sample(index: int, epoch: int = 0, repeat: int = 0) -> dict[str, Any]:
    return {"data": Images()[index], "data_id": index, "epoch": epoch, "repeat": repeat}


def test_padding_is_not_counted_in_validation() -> None:
    model, batch = Toy(), [sample(0), sample(1), sample(0, repeat=1)]
    config = TaskSettings().train_config(Path("out"), 1, None, False)
    engine = TorchEngine(UnitModel(model), config, Launch(), torch.device("cpu"))
    prepared = EvalPreparer(model.preparer()).prepare_inputs((rows_of(batch), 0.5))
    with torch.no_grad():
        total, count, squares = engine.evaluate(prepared).tolist()
        each = model.each(batch[:2], 0.5)
        assert total == pytest.approx(each.sum().item())
        assert squares == pytest.approx(each.square().sum().item())
    assert count == 2


def test_several_averages_are_validated_saved_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the keys of [ema]; a resumed task ends with the same files, and an average may begin later."""
    tracks = {"decay": 0.5, "update_every": 1, "track": [{"name": "long", "decay": 0.9}]}
    settings: dict[str, Any] = {"ema": tracks, "batch_size": 2, "eval_dataset": Images(2), "eval_steps": 4}
    settings |= {"save_steps": None}
    events = run(tmp_path / "whole", **settings)
    assert [event["weights"] for event in events if event["event"] == "eval"] == ["raw", "ema", "long"]
    assert saved(tmp_path / "whole") == {"epoch-0", "epoch-0.long"}
    run(tmp_path / "broken", max_steps=2, **settings)
    run(tmp_path / "broken", resume=True, **settings)
    for name in ("epoch-0", "epoch-0.long"):
        files = [load_file(tmp_path / out / f"{name}.safetensors") for out in ("whole", "broken")]
        assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    assert saved(tmp_path / "broken") == {"step-2", "step-2.long", "epoch-0", "epoch-0.long"}
    with pytest.raises(UserError, match="ema and ema_decay both set the decay"):
        run(tmp_path / "both", ema=tracks, ema_decay=0.5)
    with pytest.raises(UserError, match=r"ema is .*; give the keys of \[ema\]"):
        run(tmp_path / "wrong", ema={"dekay": 0.5})
    run(tmp_path / "later", max_steps=2, ema_decay=0.5)
    tracks = {"decay": 0.5, "track": [{"name": "late", "decay": 0.999}]}
    run(tmp_path / "later", max_steps=3, ema=tracks, resume=True)
    assert "has no average 'late': it starts from the current weights" in capsys.readouterr().err
    names = [load_file(tmp_path / "later" / f"{name}.safetensors").keys() for name in ("step-2", "step-3.late")]
    assert names[0] == names[1]


class Energy(Objective):
    """The velocity's error, and the mean square of the tokens after the first block."""

    taps = (1,)

    def __init__(self) -> None:
        self.weights = {"flow": 1.0, "energy": 0.5}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, torch.Tensor]:
        flow = (out.velocity - batch["target"]).square().flatten(1).mean(1)
        return {"flow": flow, "energy": out.features[1].square().flatten(1).mean(1)}


def test_an_objective_of_the_core_trains_a_task(tmp_path: Path) -> None:
    """Its parts are logged, by times too; without its second part it is the loss of flow matching."""

    def model(objective: Objective | None, weight: float = 0.0) -> Toy:
        toy = Toy()
        blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))])
        toy.transformer = torch.nn.ModuleDict({"blocks": blocks})  # type: ignore[assignment]
        net: Any = toy.transformer
        toy.denoise = lambda noisy, t, inputs: net["blocks"][0](noisy.flatten(2)).view_as(noisy)  # type: ignore[method-assign]
        if objective is not None:
            objective.weights = {"flow": 1.0, "energy": weight}
        toy.objective = objective
        return toy

    torch.manual_seed(0)
    with_parts = run(tmp_path / "parts", model(Energy(), 0.5), batch_size=2)
    (first, *_) = [event for event in with_parts if event["event"] == "step"]
    assert first["loss"] == pytest.approx(first["flow"] + 0.5 * first["energy"], rel=1e-6)
    assert first["band"]
    torch.manual_seed(0)
    plain = np.array(steps(run(tmp_path / "plain", model(None), batch_size=2), "loss"))
    torch.manual_seed(0)
    assert np.array(steps(run(tmp_path / "alone", model(Energy()), batch_size=2), "loss")) == pytest.approx(plain)


@pytest.mark.parametrize("best", [False, True])
def test_other_verbs_name_the_newest_file_of_a_script(tmp_path: Path, best: bool) -> None:
    folder = tmp_path / "run"
    run(folder, max_steps=1)
    for number, name in enumerate(("step-9", "step-10", "step-10.long")):  # in the order in which they are written
        (folder / f"{name}.safetensors").write_bytes(b"")
        os.utime(folder / f"{name}.safetensors", (2e9 + number, 2e9 + number))
    message = r"saved step-10.safetensors there; use that file: a LoRA with `sd3-light sample MODEL PROMPT --lora .*run"
    with pytest.raises(UserError, match=message):
        choose_model(folder, best)
    with pytest.raises(UserError, match=message):
        convert.run(folder, tmp_path / "out.safetensors")
    with pytest.raises(UserError, match=r"is the run of a script, whose logger saved step-10.safetensors there"):
        export_verb.run(folder, tmp_path / "export")
