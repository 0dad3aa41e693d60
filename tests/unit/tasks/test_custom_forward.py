"""Modules with a custom forward, as DiffSynth's: what trains, what is stored, and what loggers get."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.tasks import DiffusionTrainingModule, ModelLogger, ProcessedDataset
from sd3_light.tasks.models import CustomForward, task_model
from sd3_light.tasks.prepare import rows_of
from tests.unit.tasks import toy
from tests.unit.tasks.toy import Images, Toy, steps, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Pipe(nn.Module):
    """An encoder that is frozen and a denoiser that trains; it notes its device as DiffSynth's pipelines do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vae = nn.Conv2d(3, 3, 1).requires_grad_(False)
        self.dit = nn.Conv2d(3, 3, 3, padding=1)
        self.device: Any = None

    def to(self, *args: Any, **kwargs: Any) -> "Pipe":
        self.device = args[0]
        return super().to(*args, **kwargs)


class Own(DiffusionTrainingModule):
    """The first stage returns nested values as DiffSynth's do, the second gets them as ``inputs``."""

    def __init__(self, task: str = "sft") -> None:
        super().__init__()
        self.pipe, self.task = Pipe(), task

    def forward(self, data: Any, inputs: Any = None) -> Any:
        if inputs is None:
            inputs = ({"latents": self.pipe.vae(data["image"][None]), "size": (4, 4)}, {"prompt": data["name"]})
        if self.task == "data_process":
            return (*inputs, [Image.new("RGB", (2, 3), "red"), self.pipe.device, None])
        clean = inputs[0]["latents"]
        noise, t = torch.randn(clean.shape).to(clean), torch.rand(())  # the same draws in every dtype
        return (self.pipe.dit((1 - t) * clean + t * noise) - noise + clean).square().mean()


class Foreign(nn.Module):
    """Not derived from our class, and without an export."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own()

    def trainable_modules(self) -> Any:
        return self.inner.pipe.dit.parameters()

    def forward(self, data: Any) -> Tensor:
        loss: Tensor = self.inner(data)
        return loss


def run(out: Path, model: Any = None, data: Any = None, **settings: Any) -> list[float]:
    data = Images(4) if data is None else data
    events = train(out, model or Own(), data, **{"num_epochs": 2, **settings})
    return [value for pair in steps(events, "loss", "grad_norm") for value in pair]


def process(out: Path, model: Any = None, **settings: Any) -> Any:
    return toy.process(out, Images(4), model or Own("data_process"), **settings)


def test_a_sample_has_its_own_random_numbers(tmp_path: Path) -> None:
    """Losses do not depend on accumulation, workers, a resume or what happened before."""
    model = Own()

    whole = run(tmp_path / "whole", model, batch_size=2, num_epochs=3)

    assert len(whole) == 12
    assert len(set(whole)) == 12
    assert model.pipe.device == torch.device("cpu"), "a pipeline is moved by its own method"
    torch.manual_seed(5)
    parts = run(tmp_path / "parts", gradient_accumulation_steps=2, num_epochs=3, num_workers=1)
    assert parts == pytest.approx(whole, rel=1e-5)
    run(tmp_path / "broken", batch_size=2, max_steps=3, num_epochs=3)
    assert run(tmp_path / "broken", batch_size=2, num_epochs=3, resume=True) == whole
    file = load_file(tmp_path / "whole" / "epoch-2.safetensors")
    assert set(file) == {"pipe.dit.weight", "pipe.dit.bias"}
    assert torch.equal(file["pipe.dit.weight"], model.pipe.dit.weight)


def test_a_class_of_another_library_trains_too(tmp_path: Path) -> None:
    model = Foreign()
    assert run(tmp_path / "foreign", model) == run(tmp_path / "own")
    file = load_file(tmp_path / "foreign" / "epoch-1.safetensors")
    assert set(file) == {"inner.pipe.dit.weight", "inner.pipe.dit.bias"}
    model = Foreign()
    model.inner.pipe.vae.requires_grad_(True)
    frozen = model.inner.pipe.vae.weight.clone()
    run(tmp_path / "part", model)
    assert torch.equal(model.inner.pipe.vae.weight, frozen), "only what trainable_modules yields trains"


def test_two_stages_train_as_one(tmp_path: Path) -> None:
    data = process(tmp_path / "cache")
    assert data.load_from_cache
    shared, positive, (image, device, nothing) = data[1]
    assert torch.equal(shared["latents"], Own().pipe.vae(Images(4)[1]["image"][None]))
    assert (shared["size"], positive["prompt"], image.getpixel((1, 2))) == ((4, 4), "1", (255, 0, 0))
    assert (device.type, nothing) == ("cpu", None)
    assert run(tmp_path / "two", data=data) == run(tmp_path / "one")
    file = tmp_path / "cache" / "0" / "2.pth"
    stored = file.stat().st_mtime_ns
    process(tmp_path / "cache")
    assert file.stat().st_mtime_ns == stored, "unchanged samples are not computed again"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file} is missing or damaged"):
        ProcessedDataset(tmp_path / "cache")[2]


def returning(name: str, forward: Callable[[Any, Any], Any]) -> type[Own]:
    """Return a class of this name with another ``forward(self, data)``."""
    return type(name, (Own,), {"forward": forward})


Empty = returning("Empty", lambda self, data: ({}, {"prompt": data["name"]}, {}))
Opaque = returning("Opaque", lambda self, data: {"latents": data["image"], "hook": [len]})


class Declared(Toy):
    """It reads a value that the data process neither gets nor computes."""

    reads = ("text",)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Own, "forward of Own returned a loss in the data process; return there what the second stage needs"),
        (Empty, "sample 0: forward of Empty returned no tensor to store"),
        (Opaque, "sample 0: what forward of Opaque returned['hook'][0] is a builtin_function_or_method"),
        (Declared, "sample 0: training will read 'text', which is neither in the data nor written by a unit"),
    ],
)
def test_a_data_process_that_stores_too_little_is_refused(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        process(tmp_path, model())
    assert message in str(error.value)
    assert not (tmp_path / "manifest.json").exists()


class Modules(Own):
    def trainable_modules(self) -> Any:
        return [self.pipe.dit]


NoForward = type("NoForward", (DiffusionTrainingModule,), {})
NoLoss = returning("NoLoss", lambda self, data: {"loss": 1.0})
Detached = returning("Detached", lambda self, data: Own.forward(self, data).detach())
Raises = returning("Raises", lambda self, data: data["pixels"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (NoForward, "NoForward has no transformer; pass one to super().__init__(transformer, ...), or override"),
        (NoLoss, "forward of NoLoss returned a dict; return the loss, a tensor of one number"),
        (Detached, "the loss of Detached depends on no weight that trains"),
        (Raises, "forward of Raises raised KeyError: 'pixels'"),
        (Modules, "trainable_modules() of Modules yields a Conv2d that is not one of its parameters"),
        (lambda: Own().requires_grad_(False), "nothing to train"),
    ],
)
def test_wrong_modules_are_one_line(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        run(tmp_path, model())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_loggers_are_called_after_every_step_with_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``save_steps`` is; a logger need not be ours, and an older signature works."""
    calls: list[Any] = []

    class Plain:
        output_path = str(tmp_path / "plain")

        def on_step_end(self, accelerator: Any, model: Any, save_steps: Any = None, **kwargs: Any) -> None:
            calls.append(float(kwargs["loss"]))

        def on_epoch_end(self, accelerator: Any, model: Any, epoch_id: int) -> None:
            calls.append((type(model).__name__, epoch_id))

        def on_training_end(self, accelerator: Any, model: Any, save_steps: Any = None) -> None:
            calls.append("end")

    numbers = run(tmp_path / "plain", logger=Plain(), batch_size=2)
    losses = numbers[::2]
    assert calls == [*losses[:2], ("Own", 0), *losses[2:], ("Own", 1), "end"]

    class Older(ModelLogger):
        def on_step_end(self, accelerator: Any, model: Any, save_steps: int | None = None) -> None:  # type: ignore[override]
            calls.append(self.num_steps)

    calls.clear()
    run(tmp_path / "older", logger=Older(tmp_path / "older"), batch_size=2, save_steps=None)
    assert calls == [0, 1, 2, 3]
    open_trackers = Mock(return_value=[])
    monkeypatch.setattr("sd3_light.tasks.train.open_trackers", open_trackers)
    off: dict[str, Any] = {"enable_swanlab_log": False, "swanlab_project": "p", "enable_csv_log": True}
    logger = ModelLogger(tmp_path, enable_tensorboard_log=True, enable_wandb_log=True, wandb_project="p", **off)
    run(tmp_path, logger=logger, max_steps=1)
    ((monitoring, _, shown), _) = open_trackers.call_args
    assert (monitoring.enable_wandb, monitoring.wandb_tracker_name, shown["learning_rate"]) == (True, "p", 1e-2)
    with pytest.raises(UserError, match="enable_swanlab_log is not supported; use enable_wandb_log"):
        ModelLogger(tmp_path, enable_swanlab_log=True)


def test_weights_are_renamed_by_prefix_and_converter(tmp_path: Path) -> None:
    """Those of a custom forward and those of an adapter."""

    def shout(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.upper(): 2 * tensor for name, tensor in state.items()}

    model = Own()
    run(tmp_path / "own", model, logger=ModelLogger(tmp_path / "own", "pipe.dit.", shout))
    file = load_file(tmp_path / "own" / "epoch-1.safetensors")
    assert set(file) == {"WEIGHT", "BIAS"}
    assert torch.equal(file["BIAS"], 2 * model.pipe.dit.bias)
    plain, renamed = Toy(adapter=True), Toy(adapter=True)
    run(tmp_path / "plain", plain)
    run(tmp_path / "renamed", renamed, logger=ModelLogger(tmp_path / "renamed", "transformer.", shout))
    before, after = (load_file(tmp_path / name / "epoch-1.safetensors") for name in ("plain", "renamed"))
    assert "1.LORA_A.WEIGHT" in after
    assert all(torch.equal(after[name.removeprefix("transformer.").upper()], 2 * before[name]) for name in before)


def test_workers_of_args_are_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both stages, and 0 means 0; tasks prefetch one batch per worker, data processes two items."""
    loader = Mock(wraps=torch.utils.data.DataLoader)
    monkeypatch.setattr("sd3_light.data.loader.DataLoader", loader)
    for workers in (0, 1):
        args = Namespace(dataset_num_workers=workers)
        process(tmp_path / f"cache{workers}", num_workers=8, args=args)
        run(tmp_path / f"run{workers}", num_workers=3, args=args)
    seen = [(call.kwargs["num_workers"], call.kwargs.get("prefetch_factor")) for call in loader.call_args_list]
    assert seen == [(0, None), (0, None), (1, 2), (1, 1)]


def test_any_torch_optimizer_by_its_path(tmp_path: Path) -> None:
    """It steps as torch's own, and a resumed task continues with its state."""
    settings: dict[str, Any] = {"customized_optimizer": "torch.optim.NAdam", "gradient_clipping": 0, "batch_size": 2}
    settings |= {"weight_decay": 0.0}
    model = Own()
    whole = run(tmp_path / "whole", model, **settings)
    expected = Own()

    class Twin(ModelLogger):
        def on_step_end(self, accelerator: Any, model: Any, save_steps: int | None = None, **fields: Any) -> None:
            for parameter, source in zip(expected.trainable_modules(), model.trainable_modules(), strict=True):
                parameter.grad = source.grad
            optimizer.step()
            assert all(torch.equal(*pair) for pair in zip(expected.parameters(), model.parameters(), strict=True))

    optimizer = torch.optim.NAdam(expected.trainable_modules(), lr=1e-2)
    assert run(tmp_path / "twin", logger=Twin(tmp_path / "twin"), **settings) == whole
    run(tmp_path / "broken", max_steps=2, **settings)
    assert run(tmp_path / "broken", resume=True, **settings) == whole
    for path, message in (
        ("torch.optim.Nadam", "cannot be imported"),
        ("Adam", "cannot be imported"),
        ("torch.nn.Linear", "is not a torch optimizer"),
        ("torch.optim.LBFGS", "does not take lr and weight_decay"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path / path, customized_optimizer=path)
    with pytest.raises(UserError, match="enable_model_cpu_offload is not supported"):
        run(tmp_path / "offload", args=Namespace(enable_model_cpu_offload=True))


def test_bfloat16_weights_are_trained_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide, narrow = Own(), Own()
    narrow.pipe.to(torch.bfloat16)
    data = [{"image": item["image"].bfloat16(), "name": ""} for item in (Images(4)[n] for n in range(4))]
    losses = run(tmp_path / "narrow", narrow, data, learning_rate=1e-4)
    assert losses[::2] == pytest.approx(run(tmp_path / "wide", wide, learning_rate=1e-4)[::2], rel=0.05)
    assert {weight.dtype for weight in narrow.pipe.dit.parameters()} == {torch.float32}
    assert {weight.dtype for weight in narrow.pipe.vae.parameters()} == {torch.bfloat16}
    assert "the trained weights of Own are stored in float32 and computed in bfloat16" in capsys.readouterr().err
    # both compute in bfloat16 in a run; of two dtypes that of the caller counts.
    seen: list[torch.dtype | bool] = []

    class Narrow(Own):
        def forward(self, data: Any, inputs: Any = None) -> Any:
            seen.append(torch.get_autocast_dtype("cpu"))
            seen.append(torch.is_autocast_enabled("cpu"))
            return self.pipe.dit.weight.sum()

    model = Narrow()
    model.pipe.to(torch.bfloat16)
    module = task_model(model)
    assert isinstance(module, CustomForward)
    module.freeze_the_rest()
    batch = module.preparer().prepare_inputs(rows_of({"data": Images(1)[0], "data_id": 0, "epoch": 0, "repeat": 0}))
    module(batch)
    with torch.autocast("cpu", torch.float16):
        module(batch)
    assert seen == [torch.bfloat16, True, torch.float16, True]


@torch.no_grad()
def test_a_validation_does_not_depend_on_the_epoch_of_its_samples() -> None:
    module = task_model(Own())
    assert isinstance(module, CustomForward)
    samples = [{"data": Images(1)[0], "data_id": 3, "epoch": epoch, "repeat": epoch} for epoch in (0, 5)]

    def loss(sample: dict[str, Any], quantile: float | None = None) -> float:
        return module(module.preparer().prepare_inputs(rows_of(sample), quantile))["each"].item()

    first, second = (loss(sample, 0.5) for sample in samples)
    assert first == second
    assert loss(samples[0], 0.6) != first, "every quantile is another draw"
    assert loss(samples[0]) != loss(samples[1])
