"""Optimizers on a GPU never synchronize with the host, and a skipped step changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config import EmaConfig, OptimizerConfig
from sd3_light.optim.adamw_8bit import checked_kernel
from sd3_light.optim.batched_muon import BatchedMuon
from sd3_light.optim.build import Optimizer, make_optimizer
from sd3_light.optim.ema import Averages


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


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit"])
def test_a_skipped_step_changes_nothing(kind: str) -> None:
    with_skips, clean = run_steps(*toy(kind), [1.0, 0.0, 0.0, 1.0, 0.0]), run_steps(*toy(kind), [0.0, 0.0, 0.0])
    assert with_skips.keys() == clean.keys()
    assert [name for name in with_skips if not torch.equal(with_skips[name], clean[name])] == []


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit"])
def test_optimizers_and_averages_never_synchronize(kind: str) -> None:
    named, optimizer = toy(kind)
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


def test_the_kernel_of_8_bit_moments_equals_its_reference() -> None:
    assert checked_kernel(torch.device("cuda", 0)) is not None


def test_muon_launches_few_kernels_for_many_matrices() -> None:
    """Their number depends on the shapes, not on the matrices; the updates are those of torch's Muon."""

    def train(kind: type[torch.optim.Muon], copies: int) -> tuple[int, list[nn.Parameter]]:
        generator = torch.Generator("cuda").manual_seed(0)
        weights = [nn.Parameter(torch.randn(64, 96, generator=generator, device="cuda")) for _ in range(copies)]
        optimizer = kind(weights, lr=1e-2, adjust_lr_fn="match_rms_adamw")
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, device="cuda")
        optimizer.step()
        with torch.profiler.profile() as profile:
            optimizer.step()
        return sum("bmm" in event.name for event in profile.events() if event.name.startswith("aten::")), weights

    (few, _), (many, ours), (_, theirs) = train(BatchedMuon, 2), train(BatchedMuon, 30), train(torch.optim.Muon, 30)
    assert 0 < few == many
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-3)  # steps of 2e-2, in bfloat16
