"""In float32 the fast path equals the stock transformer: outputs and the gradients of every parameter."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.families.sd3.fast import forward
from sd3_light.families.sd3.fast.block import BlockOptions, Keep
from sd3_light.families.sd3.fast.forward import FastDenoiser, why_stock
from sd3_light.families.sd3.fast.row_layout import fill_rows
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
