"""`check` of a script: memory, time and disk of its module, counted without training it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.core.cost import Compute
from sd3_light.tasks import DiffusionTrainingModule, ModelLogger, check, unit
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.cost import TaskCost, cost_of
from sd3_light.tasks.settings import TaskSettings
from tests.unit.tasks.test_custom_forward import Own
from tests.unit.tasks.test_stacking import CASES, Items
from tests.unit.tasks.toy import Images, Toy, process


class Blocks(DiffusionTrainingModule):
    """Three equal blocks between two other layers."""

    def __init__(self, *units: Any, reads_values: bool = False) -> None:
        net = nn.Module()
        net.first, net.last = nn.Linear(3, 32), nn.Linear(32, 3)
        net.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        super().__init__(net, units)
        self.reads_values = reads_values

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        net: Any = self.transformer
        tokens = net.first(noisy.flatten(2).mT)
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
