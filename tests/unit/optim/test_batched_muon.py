"""Muon for many matrices at once against torch's own, one matrix at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from sd3_light.optim import batched_muon
from sd3_light.optim.batched_muon import BatchedMuon, orthogonalise_together

SHAPES = ((48, 32), (32, 48), (48, 32), (16, 16), (48, 32))
KEYS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(kind: type[torch.optim.Muon]) -> tuple[list[nn.Parameter], torch.optim.Muon]:
    weights = [nn.Parameter(matrix) for matrix in draw(0)]
    return weights, kind(weights, **KEYS)


def set_gradients(weights: list[nn.Parameter], seed: int) -> None:
    for weight, gradient in zip(weights, draw(seed), strict=True):
        weight.grad = gradient


@pytest.mark.parametrize("max_elements", [2**24, 2 * 48 * 32, 1])
def test_matrices_train_as_with_torchs_muon(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    monkeypatch.setattr(batched_muon, "MAX_ELEMENTS", max_elements)
    (ours, batched), (theirs, single) = make(BatchedMuon), make(torch.optim.Muon)
    for step in range(4):
        for weights, optimizer in ((ours, batched), (theirs, single)):
            set_gradients(weights, 1 + step)
            optimizer.step()
    for weight, other, start in zip(ours, theirs, draw(0), strict=True):
        torch.testing.assert_close(weight.detach(), other.detach(), rtol=1e-6, atol=1e-7)
        assert (weight - start).abs().max() > 1e-3
        assert torch.equal(batched.state[weight]["momentum_buffer"], single.state[other]["momentum_buffer"])


@pytest.mark.parametrize("max_elements", [2**24, 1])
def test_parts_of_a_fused_matrix_train_as_separate_matrices(monkeypatch: pytest.MonkeyPatch, max_elements: int) -> None:
    monkeypatch.setattr(batched_muon, "MAX_ELEMENTS", max_elements)
    fused = [nn.Parameter(torch.cat(draw(seed)[3:4] * 2 + draw(seed + 1)[3:4])) for seed in (0, 2)]
    alone = [nn.Parameter(part.clone()) for weight in fused for part in weight.detach().chunk(3)]
    together = BatchedMuon([{"params": fused, "parts": 3}], **KEYS)
    whole = [nn.Parameter(weight.detach().clone()) for weight in fused]
    unsplit, apart = BatchedMuon(whole, **KEYS), BatchedMuon(alone, **KEYS)
    for step in range(3):
        gradients = [torch.randn(48, 16, generator=torch.Generator().manual_seed(9 + step + at)) for at in (0, 50)]
        for weights in (fused, whole, alone):
            parts = gradients if weights is not alone else [part for g in gradients for part in g.chunk(3)]
            for weight, gradient in zip(weights, parts, strict=True):
                weight.grad = gradient.clone()
        for optimizer in (together, unsplit, apart):
            optimizer.step()
    assert torch.equal(torch.cat(fused), torch.cat(alone))
    assert not torch.allclose(torch.cat(fused), torch.cat(whole), atol=1e-3)


def test_a_skipped_step_and_a_matrix_without_gradient_change_nothing() -> None:
    weights, optimizer = make(BatchedMuon)
    set_gradients(weights, 1)
    weights[2].grad = None
    optimizer.step()
    assert [torch.equal(weight, start) for weight, start in zip(weights, draw(0), strict=True)].count(True) == 1
    assert torch.equal(weights[2], draw(0)[2])
    (with_skips, skipping), (clean, plain) = make(BatchedMuon), make(BatchedMuon)
    for step, skip in enumerate([1.0, 0.0, 1.0, 0.0]):
        set_gradients(with_skips, step)
        if skip:
            for weight in with_skips:
                weight.grad = torch.full_like(weight, torch.nan)
        skipping.found_inf = torch.tensor(skip)  # type: ignore[attr-defined]
        skipping.step()
    for step in (1, 3):
        set_gradients(clean, step)
        plain.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        plain.step()
    for weight, other in zip(with_skips, clean, strict=True):
        assert torch.equal(weight, other)
        assert torch.equal(skipping.state[weight]["momentum_buffer"], plain.state[other]["momentum_buffer"])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (16, 16)])
def test_matrices_are_orthogonalised_together_as_one_by_one(shape: tuple[int, int]) -> None:
    keys: dict[str, Any] = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    matrices *= torch.tensor([1, 1e-3, 1e3])[:, None, None]
    together = orthogonalise_together(matrices, **keys).float()
    for ours, matrix in zip(together, matrices, strict=True):
        theirs = _zeropower_via_newtonschulz(matrix, **keys).float()
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
