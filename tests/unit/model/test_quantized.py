"""Frozen weights in 8 and 4 bits below an adapter: their bytes, outputs, training, and a missing library."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.core.cost import Tokens
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.model import quantized
from sd3_light.model.adapter_layers import add_adapter, is_adapter_name
from sd3_light.model.quantized import quantize_base
from sd3_light.tasks import ModelLogger, launch_training_task
from tests.unit.model.test_adapter_layers import adapter, output, stock
from tests.unit.tasks.toy import Images, Toy

NEEDS_LIBRARY = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
BITS = [8, pytest.param(4, marks=NEEDS_LIBRARY)]
ERROR = {8: 0.03, 4: 0.25}


def held_bytes(model: nn.Module) -> int:
    """The bytes of the parameters, and of the scales of 4-bit ones."""
    states = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]
    scales = [scale for state in states for scale in (state.absmax, state.state2.absmax)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *scales))


@pytest.mark.parametrize("bits", BITS)
def test_the_base_shrinks_to_the_estimated_bytes_and_follows_autocast(bits: int) -> None:
    holder = nn.ModuleList([nn.Linear(64, 64)])
    quantize_base(holder, bits)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert holder[0](x).dtype == torch.bfloat16
    assert holder[0](x).dtype == torch.float32
    model = stock()
    assert quantize_base(model, bits) == 25
    full = TrainingSetup(SD3Cost(SIZES["tiny2"]), Tokens(16, 5), 1, compute_dtype="float32", adapter=(0, 1, 1, 0))
    setup = replace(full, base_bits=bits)
    assert held_bytes(model) == pytest.approx(setup.frozen_bytes, rel=1e-3)
    assert setup.frozen_bytes < 0.6 * full.frozen_bytes


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("bits", BITS)
def test_an_adapter_trains_on_quantized_weights(bits: int, use_dora: bool) -> None:
    """The output is close to the unquantized one. A new adapter, evaluation mode or moving does not change it;
    only the adapter gets gradients, in float32."""
    plain, model = output(stock()).detach(), stock()
    quantize_base(model, bits)
    before = output(model).detach()
    error = ((before - plain).norm() / plain.norm()).item()
    assert 1e-4 < error < ERROR[bits]
    add_adapter(model, adapter(use_dora=use_dora), seed=0)
    first = output(model)
    assert torch.allclose(first, before, atol=1e-5)
    first.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    assert all(is_adapter_name(name) and gradient.dtype == torch.float32 for name, gradient in gradients.items())
    with torch.no_grad():
        assert torch.allclose(output(model.eval().to("cpu")), before, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_gradients_pass_through_quantized_layers(bits: int) -> None:
    """Compared with the chain rule on the dequantized weight."""
    layer = nn.Linear(64, 96)
    holder: Any = nn.ModuleList([layer])
    bias = layer.bias.detach()
    quantize_base(holder, bits)
    with torch.no_grad():
        weight = (holder[0](torch.eye(64)) - bias).T
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    holder[0](x).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    nn.functional.linear(y, weight, layer.bias).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_biases_of_weights_that_are_read_in_half_are_float32() -> None:
    """The weight keeps the dtype of the file, because it is rounded next."""
    holder = nn.ModuleList([nn.Linear(64, 32)])
    values = {name: value.detach().to(torch.bfloat16) for name, value in holder.named_parameters()}
    quantize_base(holder, 8, read=values.__getitem__)
    assert holder[0].bias.dtype == torch.float32
    assert torch.equal(holder[0].bias, values["0.bias"].float())


def test_16_bits_change_nothing_and_a_model_without_blocks_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock()
    assert quantize_base(model, 16) == 0
    assert torch.equal(output(model), output(stock()))
    quantize_base(model, 8)
    with pytest.raises(UserError, match="has no block with a linear layer; write 16"):
        quantize_base(nn.Linear(4, 4), 8)
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"base_bits = 4 needs bitsandbytes.* run `pip install 'sd3-light\[bnb\]'`"):
        quantize_base(stock(), 4)
    model = Toy()
    model.transformer = nn.Sequential(nn.Flatten(2), nn.Linear(16, 16))
    with pytest.raises(UserError, match="base_bits = 4 needs bitsandbytes"):
        model.train_adapter(base_bits=4, target_modules=["1"])
    model.train_adapter(base_bits=8, target_modules=["1"])


@pytest.mark.parametrize("bits", BITS)
def test_a_task_trains_on_quantized_weights_and_saves_only_the_adapter(tmp_path: Path, bits: int) -> None:
    def run(out: str, **options: Any) -> Any:
        model = Toy()
        model.transformer = nn.Sequential(nn.Flatten(2), nn.Linear(16, 64), nn.Linear(64, 16))
        with torch.no_grad():
            [p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p)) for p in model.transformer.parameters()]
        model.train_adapter(rank=2, target_modules=["1", "2"], base_bits=bits)
        options = {"num_workers": 0, "save_steps": 4, "batch_size": 2, "engine": "torch", **options}
        launch_training_task(None, Images(), model, ModelLogger(tmp_path / out), 1e-2, **options)
        return load_file(tmp_path / out / "step-4.safetensors")

    whole = run("whole", checkpoint_steps=2)
    assert set(whole) == {f"transformer.{n}.lora_{part}.weight" for n in "12" for part in "AB"}
    with pytest.raises(FileNotFoundError):
        run("broken", max_steps=2)
    again = run("broken", resume=True)
    assert all(torch.equal(whole[name], again[name]) for name in whole), "resumed exactly"
