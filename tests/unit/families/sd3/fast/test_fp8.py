"""Products in fp8: what is rounded, how large the error is, and that nothing else changes.

Rounding to e4m3 changes a number by up to 2^-4 of itself, 0.026 in the root mean square. Both factors of a product are
rounded, so a product of random rows is off by sqrt(2) x 0.026 = 0.037 of its norm, for any length.
"""

from typing import Any, get_args

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.block import BlockOptions, Keep
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, multiply, plain_rows, to_form
from sd3_light.families.sd3.fast.weights import WeightCopies
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [9, 1, 4]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def perturbed_transformer() -> SD3Transformer2DModel:
    return perturbed(SIZES["tiny2"].transformer_config())


def relative_distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-9))


@pytest.mark.parametrize("inner", [64, 1024])
def test_product_error_follows_from_the_rounding_error(inner: int) -> None:
    # rows and weights of very different magnitude: each row has its own scale
    x, w = (
        normal(96, inner) * torch.logspace(-12, 12, 96)[:, None],
        normal(80, inner) * torch.logspace(-3, 3, 80)[:, None],
    )
    product = multiply(to_form(x, "fp8", x.dtype), to_form(w, "fp8", w.dtype), None, torch.float32, fast_sums=True)
    error = (product - x @ w.t()) / torch.outer(x.norm(dim=1), w.norm(dim=1)) * inner**0.5
    for axis in (0, 1):
        rms = error.square().mean(axis).sqrt()
        assert 0.02 < float(rms.min()) <= float(rms.max()) < 0.06


def test_rows_and_weights_are_rounded_on_their_own() -> None:
    x, w = normal(5, 32), to_form(normal(16, 32), "fp8", torch.float32)
    alone = multiply(to_form(x[4:], "fp8", x.dtype), w, None, x.dtype, True)
    x[0], x[1, 3], x[2, 5], x[3] = 0.0, float("nan"), float("inf"), 3e37
    product = multiply(to_form(x, "fp8", x.dtype), w, torch.ones(16), x.dtype, True)
    assert torch.equal(product[0], torch.ones(16))
    assert not torch.isfinite(product[1:3]).any()
    assert torch.isfinite(product[3]).all()
    torch.testing.assert_close(product[4] - 1, alone[0])
    rows = normal(3, 8).bfloat16()
    assert torch.equal(to_form(rows, "plain", rows.dtype), rows)
    both, rounded = to_form(rows, "both", rows.dtype), to_form(rows, "fp8", rows.dtype)
    assert isinstance(both, Fp8Rows)
    assert both.values.dtype == E4M3
    assert torch.equal(plain_rows(both), rows)
    with pytest.raises(AssertionError, match="only the rounded rows"):
        plain_rows(rounded)
    transformer = perturbed_transformer()
    weights = WeightCopies(transformer, torch.bfloat16, fp8=True)
    with torch.no_grad():
        transformer.transformer_blocks[0].attn.to_k.weight.mul_(3.0)
    weights.refresh()
    qkv = weights.blocks[0][0].qkv
    assert qkv.weight is None
    exact = torch.cat([module.weight for module in qkv.modules]).detach()
    assert 0.01 < relative_distance(qkv.fp8.forward.dequantized(), exact) < 0.04
    assert 0.01 < relative_distance(qkv.fp8.backward.dequantized(), exact.t()) < 0.04
    assert weights.modulation.weight is not None, "modulation is not rounded"
    rows = normal(4, exact.shape[1])
    product = qkv.forward(reference.round_rows(rows), biased=True, fast_sums=True)
    assert product.dtype == torch.bfloat16
    assert relative_distance(product.float(), rows @ exact.t() + qkv.bias.float()) < 0.06


def with_gradients(
    transformer: SD3Transformer2DModel, options: BlockOptions, lengths: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((3, 16, 8, 12), (3, 9, 256), (3, 224))
    noisy, text, vector = (torch.randn(shape, generator=generator) for shape in shapes)
    patches = FastDenoiser(transformer, torch.float32, options)(
        (noisy, torch.tensor([9.0, 500, 999]), text, vector), lengths
    )
    transformer.zero_grad(set_to_none=True)
    (patches * torch.linspace(-1, 1, patches.numel()).view(patches.shape)).sum().backward()
    return patches.detach(), {n: p.grad.clone() for n, p in transformer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "real"])
def test_outputs_and_gradients_are_close_for_each_keep_option(lengths: list[int] | None) -> None:
    transformer = perturbed_transformer()
    expected, expected_grads = with_gradients(transformer, BlockOptions(), lengths)
    patches, grads = with_gradients(transformer, BlockOptions(products="fp8"), lengths)
    assert 1e-3 < relative_distance(patches, expected) < 0.03
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        # several roundings are between a weight and the loss
        assert relative_distance(grads[name], gradient) < 0.2, name
    for keep in get_args(Keep)[1:]:
        recomputed, recomputed_grads = with_gradients(transformer, BlockOptions(keep=keep, products="fp8"), lengths)
        assert torch.equal(recomputed, patches)
        torch.testing.assert_close(recomputed_grads, grads, rtol=1e-5, atol=1e-6)
