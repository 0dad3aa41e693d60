"""The fast path equals the stock transformer in float32: outputs and the gradients of every parameter."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.model.fast import forward
from sd3_light.model.fast.block import BlockOptions, Keep
from sd3_light.model.fast.forward import FastDenoiser, why_stock
from sd3_light.model.layers import build_layers, run_layers
from sd3_light.model.random_weights import new_transformer

CONFIGS = {
    "three-blocks": SIZES["tiny2"].transformer_config(num_layers=3),
    "one-block": SIZES["tiny2"].transformer_config(num_layers=1),
    "no-qk-norm": SIZES["tiny2"].transformer_config(qk_norm=False),
}
LENGTHS = [9, 1, 4]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def lively(config: dict[str, Any]) -> SD3Transformer2DModel:
    """A model whose every weight matters."""
    transformer = new_transformer(config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return transformer


def features(batch: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    latent, prompt, pooled = ((batch, 16, 8, 12), (batch, 9, 256), (batch, 224))
    noisy, text, vector = (torch.randn(shape, generator=generator) for shape in (latent, prompt, pooled))
    return [noisy, 1000 * torch.rand(batch, generator=generator), text, vector]


def learned(transformer: SD3Transformer2DModel, patches: Tensor) -> dict[str, Tensor]:
    transformer.zero_grad(set_to_none=True)
    weight = torch.linspace(-1, 1, patches.numel()).view(patches.shape)
    (patches * weight).sum().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


def expected(transformer: SD3Transformer2DModel, lengths: list[int] | None) -> Tensor:
    given = features() if lengths is None else [*features(), torch.tensor(lengths)]
    return run_layers(build_layers(transformer, real_text=lengths is not None), given)[0]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "real"])
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_backward_are_the_stock_ones(name: str, lengths: list[int] | None) -> None:
    transformer = lively(CONFIGS[name])
    wanted = expected(transformer, lengths)
    of_wanted = learned(transformer, wanted)
    for keep in get_args(Keep):
        found = FastDenoiser(transformer, torch.float32, BlockOptions(keep=keep))(features(), lengths)
        of_found = learned(transformer, found)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
        assert of_found.keys() == of_wanted.keys() == dict(transformer.named_parameters()).keys()
        for key, gradient in of_wanted.items():
            worst = float((of_found[key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3))
            assert worst < 2e-5, f"{key}: {worst}"


def test_replaced_weight_data_is_used() -> None:
    transformer = lively(CONFIGS["one-block"])
    denoiser = FastDenoiser(transformer, torch.float32)
    before = denoiser(features())
    out = transformer.transformer_blocks[0].attn.to_out[0]
    out.weight.data = 2 * out.weight.data
    moved = denoiser(features())
    torch.testing.assert_close(moved, expected(transformer, None), rtol=1e-5, atol=2e-5)
    assert not torch.allclose(moved, before, atol=1e-3)


def test_a_transformer_that_it_is_not_written_for_is_named() -> None:
    assert why_stock(lively(CONFIGS["no-qk-norm"])) is None
    dual = lively({**CONFIGS["three-blocks"], "dual_attention_layers": (0,)})
    assert "second attention" in str(why_stock(dual))
    adapted = lively(CONFIGS["one-block"])
    adapted.transformer_blocks[0].attn.to_out[0] = torch.nn.Sequential(adapted.transformer_blocks[0].attn.to_out[0])
    assert "adapters" in str(why_stock(adapted))
    with pytest.raises(AssertionError, match="adapters"):
        FastDenoiser(adapted, torch.float32)


def test_steps_of_a_fused_optimizer_are_followed() -> None:
    losses = []
    for is_fast in (False, True):
        transformer = lively(CONFIGS["three-blocks"])
        optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3, fused=True)
        fast = FastDenoiser(transformer, torch.float32)
        for _ in range(3):
            patches = fast(features()) if is_fast else expected(transformer, None)
            loss = patches.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-4)
    assert losses[2] < 0.9 * losses[0], "something was learned"


def test_rows_behind_the_last_sample_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the joined rows of real text are rounded up."""
    transformer = lively(CONFIGS["three-blocks"])
    wanted = FastDenoiser(transformer, torch.float32)(features(), LENGTHS)
    of_wanted = learned(transformer, wanted)
    plan_of = forward.make_plan

    def rounded(*given: Any) -> Any:
        plan = plan_of(*given)
        return replace(plan, room=plan.room + 5)

    monkeypatch.setattr(forward, "make_plan", rounded)
    found = FastDenoiser(transformer, torch.float32)(features(), LENGTHS)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(learned(transformer, found), of_wanted)
