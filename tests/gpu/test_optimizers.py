"""Optimizers on a GPU never synchronize with the host, and a skipped step changes nothing."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config import EmaConfig, OptimizerConfig
from sd3_light.optim.build import Optimizer, make_optimizer
from sd3_light.optim.ema import Averages

EIGHT_BIT = pytest.param(
    "adamw8bit",
    marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
)


def toy(kind: str) -> tuple[dict[str, nn.Parameter], Optimizer]:
    torch.manual_seed(0)
    block = nn.ModuleDict({"to_q": nn.Linear(128, 192), "to_out": nn.Linear(192, 128)})
    model = nn.ModuleDict({"transformer_blocks": nn.ModuleList([block]), "proj_out": nn.Linear(128, 64)}).cuda()
    named = dict(model.named_parameters())
    return named, make_optimizer(model, named, OptimizerConfig(type=kind, lr=1e-2), torch.device("cuda"))  # type: ignore[arg-type]


def run_steps(named: dict[str, nn.Parameter], optimizer: Optimizer, skips: list[float]) -> dict[str, Tensor]:
    """Run steps with different gradients; skipped ones have non-finite gradients."""
    generator = torch.Generator().manual_seed(1)
    for skip in skips:
        for parameter in named.values():
            gradient = torch.full(parameter.shape, float("nan"))
            parameter.grad = (gradient if skip else torch.randn(parameter.shape, generator=generator)).cuda()
        optimizer.step(skip=torch.tensor(skip, device="cuda"))
    tensors = {name: parameter.detach().clone() for name, parameter in named.items()}
    return tensors | {f"{k}/{n}": value.clone() for n in named for k, value in optimizer.state(n).items()}


@pytest.mark.parametrize("kind", ["adamw", "muon", EIGHT_BIT])
def test_a_skipped_step_changes_nothing(kind: str) -> None:
    with_skips, clean = run_steps(*toy(kind), [1.0, 0.0, 0.0, 1.0, 0.0]), run_steps(*toy(kind), [0.0, 0.0, 0.0])
    assert with_skips.keys() == clean.keys()
    assert [name for name in with_skips if not torch.equal(with_skips[name], clean[name])] == []


def test_adamw_and_averages_never_synchronize() -> None:
    named, optimizer = toy("adamw")
    tracks: Any = ({"name": "power", "power_width": 0.1},)
    averages = Averages(named, EmaConfig(enable=True, update_every=1, track=tracks))
    optimizer.prepare_state()
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    skip = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (1, 2):
            optimizer.set_rate(1e-3 / step)
            optimizer.step(skip=skip)
            averages.update(named, step)
            with averages.in_place_of("power", named):
                pass
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert optimizer.state("proj_out.bias")["step"].item() == 2
    assert optimizer.state("proj_out.bias")["step"].device.type == "cuda"
