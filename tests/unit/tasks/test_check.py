"""`check` of a script, and tasks in less memory: blocks in host memory and frozen weights of 8 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.config import TrainConfig, UserError
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Compute
from sd3_light.core.registry import family_of_folder
from sd3_light.export.trainable import load_what_trains, swap_loaded
from sd3_light.model.block_swap import is_swapped
from sd3_light.tasks import DiffusionTrainingModule, ModelLogger, check, unit
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.cost import TaskCost, cost_of
from sd3_light.tasks.settings import TaskSettings
from tests.families import make_pipeline
from tests.unit.tasks.test_custom_forward import Own
from tests.unit.tasks.test_stacking import CASES, Items
from tests.unit.tasks.toy import Encode, Images, Toy, process, steps, train

CPU = torch.device("cpu")


class Blocks(DiffusionTrainingModule):
    """Three equal blocks between two other layers."""

    def __init__(self, *units: Any, reads_values: bool = False, teaches: bool = False) -> None:
        net = nn.Module()
        net.first, net.last = nn.Linear(3, 32), nn.Linear(32, 3)
        net.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        super().__init__(net, units)
        self.reads_values, self.teaches = reads_values, teaches

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        net: Any = self.transformer
        tokens = net.first(noisy.flatten(2).mT)
        if self.teaches:
            with torch.no_grad():
                teaching = net.first(net.last(tokens))
            tokens = tokens + teaching
        for block in net.blocks:
            tokens = tokens + block(tokens)
        if self.reads_values and float(tokens.sum()) > 1e9:
            raise ValueError
        velocity: Tensor = net.last(tokens).mT.reshape(noisy.shape)
        return velocity


def latents(*sides: int) -> list[dict[str, Any]]:
    return [{"latents": torch.zeros(3, side, side)} for side in sides]


def cost(model: Any, data: Any, **settings: Any) -> TaskCost:
    return cost_of(TaskCall.of(None, data, model, ModelLogger("out"), TaskSettings(engine="torch", **settings)))


def run(out: Path, model: Any, data: Any, **settings: Any) -> list[str]:
    return check(None, data, model, ModelLogger(out), **{"engine": "torch", "num_workers": 0, **settings})


def test_flops_and_weights_are_those_of_a_pass() -> None:
    model = Blocks()
    counted = cost(model, latents(4, 8), bucket_of=lambda index: index)
    assert counted.why_not_counted is None
    assert counted.parameters == sum(weight.numel() for weight in model.transformer.parameters())
    assert counted.num_blocks == 3
    for side, sampled in zip((4, 8), counted.buckets, strict=True):
        sample = {"latents": torch.zeros(3, side, side)}
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as meter:
            model(sample)
        assert counted.forward_flops(sampled.tokens) == meter.get_total_flops() > 0
        assert str(sampled.bucket) == f"{side}x{side}"
    small, large = (counted.sample_bytes(sampled.tokens, Compute("stock", "float32")) for sampled in counted.buckets)
    assert large.blocks[0].saved == 4 * small.blocks[0].saved == 4 * 4 * 16 * (32 + 64 + 64)
    assert counted.tokens(counted.buckets[0].bucket) == counted.buckets[1].tokens, "a cache is placed by the largest"
    assert all(weight.device.type == "cpu" for weight in model.parameters())
    model(sample).backward()  # type: ignore[no-untyped-call]


def test_products_without_gradients_have_no_backward_pass() -> None:
    plain, taught = (cost(Blocks(teaches=teaches), latents(4)) for teaches in (False, True))
    tokens = plain.buckets[0].tokens
    forward = taught.forward_flops(tokens) - plain.forward_flops(tokens)
    assert taught.input_flops(tokens) - plain.input_flops(tokens) == 2 * forward > 0


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_unit_is_counted(case: str) -> None:
    make, new_model = CASES[case]
    counted = cost(new_model(), Items(make))
    assert counted.why_not_counted is None
    assert counted.forward_flops(counted.buckets[0].tokens) > 0


def test_the_table_is_that_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = latents(4, 4, 4)
    assert run(tmp_path, Blocks(), data, num_epochs=4, batch_size=2, ema_decay=0.9) == []
    shown = " ".join(capsys.readouterr().out.split())
    assert "no faults and the run fits" in shown
    assert "trains Module (12,803 parameters)" in shown
    assert "8 of 2 samples: 4.0 epochs of 3 images in 1 bucket" in shown
    assert "a GPU needs 768 MiB, estimated" in shown
    assert "1 checkpoint of 200 KiB, 4 exports of 50 KiB" in shown
    assert "4x4 4x4 3 2 2 1" in shown
    assert "cache" not in shown, "there is none"
    assert not list(tmp_path.iterdir()), "nothing is written"
    assert run(tmp_path, Blocks(), latents(4), gpu_memory=0.5) == ["GPU memory"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit: 768 MiB, the GPU has 512 MiB; lower batch_size" in shown
    assert run(tmp_path, Blocks(), latents(4), gpu_memory=8) == []


def test_processed_data_have_a_residence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = process(tmp_path / "cache", Images(4))
    assert run(tmp_path / "out", Toy(), data, cache_residence="host") == []
    shown = capsys.readouterr().out
    assert "the cache exists" in shown
    assert 'host; "host" takes' in " ".join(shown.split())


def test_adapters_are_counted_and_custom_forwards_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Toy(adapter=True)
    counted = cost(model, Images(2))
    assert sum(counted.trained) == sum(weight.numel() for weight in model.trainable_modules())
    run(tmp_path, model, Images(2))
    assert "an adapter of 128 parameters on Sequential (544 parameters)" in capsys.readouterr().out
    model = Own()
    assert run(tmp_path, model, Images(2)) == []
    shown = " ".join(capsys.readouterr().out.split())
    assert "time unknown: activations of a custom forward are not known" in shown
    assert "GPU memory is that of weights and optimizer alone" in shown
    assert "an adapter of 84 parameters on Own (12 parameters)" in shown, "what trainable_modules() yields"


def test_code_that_reads_values_is_not_counted() -> None:
    counted = cost(Blocks(reads_values=True), latents(4))
    assert counted.why_not_counted is not None
    assert "cannot be counted (denoise of Blocks raised" in counted.why_not_counted
    assert counted.forward_flops(counted.buckets[0].tokens) == 0
    calls: list[int] = []

    @unit("latents")
    def encode(module: Any, image: Tensor) -> Tensor:
        calls.append(1)
        return image

    data = [{"image": value["latents"]} for value in latents(4, 8, 4, 8)]
    cost(Blocks(encode), data, bucket_of=lambda index: index % 2)
    assert len(calls) == 2


class Task(Blocks):
    def __init__(self, adapter: bool = True) -> None:
        torch.manual_seed(0)
        super().__init__(Encode())
        self.encoder = nn.Conv2d(3, 3, 1)
        if adapter:
            self.train_adapter(rank=2, target_modules=["blocks.*.0", "blocks.*.2"])


def losses(folder: Path, model: Task, **settings: Any) -> list[Any]:
    return steps(train(folder, model, batch_size=2, max_steps=4, **settings), "loss", "grad_norm")


@pytest.mark.parametrize("engine", ["torch", "accelerate"])
def test_blocks_in_host_memory_train_alike(tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = losses(tmp_path / "plain", Task(), engine=engine)
    assert expected
    for setting, count in ((2, 2), ("all", 3)):
        model = Task()
        assert losses(tmp_path / str(setting), model, engine=engine, swap_blocks=setting) == expected
        assert is_swapped(model.transformer)
        assert f"blocks in host memory: {count} (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapter", "settings", "message"),
    [
        (False, {"swap_blocks": 2}, "only frozen weights under an adapter are swapped; call train_adapter"),
        (True, {"swap_blocks": 2, "engine": "torch", "parallel": "fsdp2"}, "swap_blocks needs whole weights"),
        (True, {"swap_blocks": -1}, "swap_blocks"),
    ],
)
def test_what_cannot_be_swapped(tmp_path: Path, adapter: bool, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, Task(adapter), **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "flux"
    make_pipeline("flux").save_pretrained(path)
    return path


@pytest.mark.parametrize(("bits", "swapped"), [(8, 0), (16, "all"), (8, "all")])
def test_a_task_has_the_loss_of_a_config(folder: Path, bits: int, swapped: Any) -> None:
    family: Any = family_of_folder(folder)
    adapter = {"type": "lora", "rank": 2, "base_bits": bits}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "swap_blocks": swapped, "adapter": adapter}
    table["model"] = {"diffusers_path": str(folder), "dtype": "float32"}
    config = family.completed(TrainConfig.model_validate(table, context={"base": Path()}))
    start = family.weights.start(config.model)
    of_config = load_what_trains(config, start, CPU)
    task = DiffusionTrainingModule(family.weights.load(start, 0), seed=config.seed)
    task.train_adapter(rank=2, base_bits=bits, target_modules=list(family.adapter_targets))
    swap_loaded(task.transformer, swapped, CPU)
    torch.manual_seed(0)
    values = {"noisy": torch.randn(2, 4, 8, 8), "t": torch.rand(2), "text": torch.randn(2, 6, 32)}
    batch = Batch(2, {**values, "pooled": torch.randn(2, 32)})
    target = torch.randn(2, 4, 8, 8)
    results = []
    for denoiser in (of_config, task.transformer):
        value = (family.denoise(denoiser, batch, 1.0) - target).square().mean()
        value.backward()
        grads = {name: weight.grad for name, weight in denoiser.named_parameters() if weight.grad is not None}
        results.append((value, grads))
    (one, one_grads), (other, other_grads) = results
    assert torch.equal(one, other)
    assert one_grads.keys() == other_grads.keys()
    assert all(torch.equal(grad, other_grads[name]) for name, grad in one_grads.items())
