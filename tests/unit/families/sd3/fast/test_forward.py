"""The fast path equals the stock transformer in float32, with all gradients; in fp8 its error is that of rounding."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.families.sd3.fast import forward, reference
from sd3_light.families.sd3.fast.block import BlockOptions, Keep
from sd3_light.families.sd3.fast.forward import FastDenoiser, why_stock
from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, multiply, plain_rows, to_form
from sd3_light.families.sd3.fast.row_layout import fill_rows
from sd3_light.families.sd3.fast.weights import WeightCopies
from sd3_light.families.sd3.layers import build_layers, run_layers
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGS = {
    "three-blocks": replace(SIZES["tiny2"], num_layers=3).transformer_config(),
    "one-block": replace(SIZES["tiny2"], num_layers=1).transformer_config(),
    "no-qk-norm": replace(SIZES["tiny2"], qk_norm=False).transformer_config(),
}
LENGTHS = [9, 1, 4]


def features(batch: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    latent, prompt, pooled = ((batch, 16, 8, 12), (batch, 9, 256), (batch, 224))
    noisy, text, vector = (torch.randn(shape, generator=generator) for shape in (latent, prompt, pooled))
    return [noisy, 1000 * torch.rand(batch, generator=generator), text, vector]


def gradients(transformer: SD3Transformer2DModel, patches: Tensor) -> dict[str, Tensor]:
    transformer.zero_grad(set_to_none=True)
    weight = torch.linspace(-1, 1, patches.numel()).view(patches.shape)
    (patches * weight).sum().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


def stock_patches(transformer: SD3Transformer2DModel, lengths: list[int] | None) -> Tensor:
    inputs = features() if lengths is None else [*features(), torch.tensor(lengths)]
    return run_layers(build_layers(transformer, real_text=lengths is not None), inputs)[0]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "real"])
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_backward_match_the_stock_blocks(name: str, lengths: list[int] | None) -> None:
    transformer = perturbed(CONFIGS[name])
    expected = stock_patches(transformer, lengths)
    expected_grads = gradients(transformer, expected)
    for keep, sharded in product(get_args(Keep), (False, True)):
        stock = copy.deepcopy(transformer) if sharded else transformer
        patches = FastDenoiser(stock, torch.float32, BlockOptions(keep=keep), sharded)(features(), lengths)
        grads = gradients(stock, patches)
        torch.testing.assert_close(patches, expected, rtol=1e-5, atol=2e-5)
        assert grads.keys() == expected_grads.keys() == dict(transformer.named_parameters()).keys()
        for key, gradient in expected_grads.items():
            worst = float((grads[key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3))
            assert worst < 2e-5, f"{key}: {worst}"


def test_replaced_weight_data_is_used() -> None:
    transformer = perturbed(CONFIGS["one-block"])
    denoiser = FastDenoiser(transformer, torch.float32)
    before = denoiser(features())
    out = transformer.transformer_blocks[0].attn.to_out[0]
    out.weight.data = 2 * out.weight.data
    after = denoiser(features())
    torch.testing.assert_close(after, stock_patches(transformer, None), rtol=1e-5, atol=2e-5)
    assert not torch.allclose(after, before, atol=1e-3)
    assert why_stock(perturbed(CONFIGS["no-qk-norm"])) is None
    dual = perturbed({**CONFIGS["three-blocks"], "dual_attention_layers": (0,)})
    assert "second attention" in str(why_stock(dual))
    adapted = perturbed(CONFIGS["one-block"])
    adapted.transformer_blocks[0].attn.to_out[0] = torch.nn.Sequential(adapted.transformer_blocks[0].attn.to_out[0])
    assert "adapters" in str(why_stock(adapted))
    with pytest.raises(AssertionError, match="adapters"):
        FastDenoiser(adapted, torch.float32)


def test_rows_after_the_last_sample_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the number of joined rows of real text is rounded up."""
    transformer = perturbed(CONFIGS["three-blocks"])
    expected = FastDenoiser(transformer, torch.float32)(features(), LENGTHS)
    expected_grads = gradients(transformer, expected)
    make_layout = forward.make_layout

    def rounded_up(*args: Any) -> Any:
        layout = make_layout(*args)
        return replace(layout, capacity=layout.capacity + 5)

    monkeypatch.setattr(forward, "make_layout", rounded_up)
    patches = FastDenoiser(transformer, torch.float32)(features(), LENGTHS)
    torch.testing.assert_close(patches, expected)
    torch.testing.assert_close(gradients(transformer, patches), expected_grads)
    # few numbers of rows recur, whatever the lengths are.
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        lengths = torch.randint(1, 65, (100,), generator=generator)
        fixed = fill_rows(lengths, 64)
        assert torch.equal(fixed.lengths[:100], lengths)
        assert len(fixed.lengths) == 104, "four fillers"
        assert int(fixed.lengths.sum()) == fixed.rows
        assert 0 <= int(fixed.lengths[100:].min()) <= int(fixed.lengths.max()) <= 64
        assert 0 <= fixed.rows - int(lengths.sum()) < 4 * 64
        seen.add(fixed.rows)
    assert 1 < len(seen) < 8
    assert fill_rows(torch.full((100,), 64), 64).rows == 26 * 4 * 64 - 4 * 64


# --- products in fp8 -----------------------------------------------------------------------------
# Rounding to e4m3 changes a number by up to 2^-4 of itself, 0.026 in the root mean square. Both factors of a product
# are rounded, so a product of random rows is off by sqrt(2) x 0.026 = 0.037 of its norm, for any length.


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
    noisy, _, text, vector = features()
    inputs = (noisy, torch.tensor([9.0, 500, 999]), text, vector)
    patches = FastDenoiser(transformer, torch.float32, options)(inputs, lengths)
    return patches.detach(), gradients(transformer, patches)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "real"])
def test_fp8_outputs_and_gradients_are_close_for_each_keep_option(lengths: list[int] | None) -> None:
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
