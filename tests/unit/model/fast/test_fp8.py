"""Products in 8 bits: what is rounded, how far that carries, and that nothing else changes.

A number rounded to e4m3 is off by up to 2^-4 of itself, by 0.026 in the mean square. Both factors of a product are
rounded, so a product of random rows is off by sqrt(2) x 0.026 = 0.037 of its length, however long they are.
"""

from typing import Any, get_args

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.model.fast import products, reference
from sd3_light.model.fast.block import BlockOptions, Keep
from sd3_light.model.fast.forward import FastDenoiser
from sd3_light.model.fast.fp8 import E4M3, Eight, formed, multiply, plain
from sd3_light.model.fast.weights import Weights
from sd3_light.model.random_weights import new_transformer

LENGTHS = [9, 1, 4]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def lively() -> SD3Transformer2DModel:
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return transformer


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))


@pytest.mark.parametrize("inner", [64, 1024])
def test_a_product_is_off_by_what_its_factors_are(inner: int) -> None:
    # rows and weights of very different size: each has its own scale
    x, w = (
        normal(96, inner) * torch.logspace(-12, 12, 96)[:, None],
        normal(80, inner) * torch.logspace(-3, 3, 80)[:, None],
    )
    found = multiply(formed(x, "eight", x.dtype), formed(w, "eight", w.dtype), None, torch.float32, fast_sums=True)
    by_row = (found - x @ w.t()) / torch.outer(x.norm(dim=1), w.norm(dim=1)) * inner**0.5
    for axis in (0, 1):
        off = by_row.square().mean(axis).sqrt()
        assert 0.02 < float(off.min()) <= float(off.max()) < 0.06


def test_a_row_touches_no_other() -> None:
    x, w = normal(5, 32), formed(normal(16, 32), "eight", torch.float32)
    alone = multiply(formed(x[4:], "eight", x.dtype), w, None, x.dtype, True)
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, float("nan"), float("inf"), 3e37
    found = multiply(formed(x, "eight", x.dtype), w, torch.ones(16), x.dtype, True)
    assert torch.equal(found[0], torch.ones(16))
    assert not torch.isfinite(found[1:3]).any()
    assert torch.isfinite(found[3]).all()
    torch.testing.assert_close(found[4] - 1, alone[0])


def test_forms() -> None:
    rows = normal(3, 8).bfloat16()
    assert torch.equal(formed(rows, "plain", rows.dtype), rows)
    both, eight = formed(rows, "both", rows.dtype), formed(rows, "eight", rows.dtype)
    assert isinstance(both, Eight)
    assert both.values.dtype == E4M3
    assert torch.equal(plain(both), rows)
    with pytest.raises(AssertionError, match="only the rounded rows"):
        plain(eight)


def test_weights_are_rounded_from_float32_and_followed() -> None:
    transformer = lively()
    weights = Weights(transformer, torch.bfloat16, fp8=True)
    with torch.no_grad():
        transformer.transformer_blocks[0].attn.to_k.weight.mul_(3.0)
    weights.refresh()
    qkv = weights.blocks[0][0].qkv
    assert qkv.weight is None
    assert qkv.eight is not None
    exact = torch.cat([module.weight for module in qkv.modules]).detach()
    assert 0.01 < distance(qkv.eight.forward.wide(), exact) < 0.04
    assert 0.01 < distance(qkv.eight.backward.wide(), exact.t()) < 0.04
    assert weights.modulation.weight is not None, "modulation is not rounded"
    rows = normal(4, exact.shape[1])
    wide = products.forward(qkv, reference.round_rows(rows), biased=True, fast_sums=True)
    assert wide.dtype == torch.bfloat16
    assert distance(wide.float(), rows @ exact.t() + qkv.bias.float()) < 0.06


def learned(transformer: SD3Transformer2DModel, how: BlockOptions, lengths: Any) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((3, 16, 8, 12), (3, 9, 256), (3, 224))
    noisy, text, vector = (torch.randn(shape, generator=generator) for shape in shapes)
    patches = FastDenoiser(transformer, torch.float32, how)(
        (noisy, torch.tensor([9.0, 500, 999]), text, vector), lengths
    )
    transformer.zero_grad(set_to_none=True)
    (patches * torch.linspace(-1, 1, patches.numel()).view(patches.shape)).sum().backward()
    return patches.detach(), {n: p.grad.clone() for n, p in transformer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "real"])
def test_outputs_and_gradients_are_near_whatever_is_kept(lengths: list[int] | None) -> None:
    transformer = lively()
    wanted, gradients = learned(transformer, BlockOptions(), lengths)
    found, others = learned(transformer, BlockOptions(products="fp8"), lengths)
    assert 1e-3 < distance(found, wanted) < 0.03
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # a few roundings lie between a weight and the loss
        assert distance(others[name], gradient) < 0.2, name
    for keep in get_args(Keep)[1:]:
        again, anew = learned(transformer, BlockOptions(keep=keep, products="fp8"), lengths)
        assert torch.equal(again, found)
        torch.testing.assert_close(anew, others, rtol=1e-5, atol=1e-6)


def test_it_learns_as_well() -> None:
    losses = []
    for how in (BlockOptions(), BlockOptions(products="fp8")):
        transformer = lively()
        optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3)
        for _ in range(8):
            patches = FastDenoiser(transformer, torch.float32, how)(
                (normal(2, 16, 4, 4), torch.tensor([100.0, 700.0]), normal(2, 5, 256), normal(2, 224))
            )
            loss = patches.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[7] < 0.5 * losses[0]
    assert losses[8:] == pytest.approx(losses[:8], rel=0.05)
