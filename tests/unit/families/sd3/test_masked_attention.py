"""Masked attention equals the stock one without a mask, and with a mask the stock one without padding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.families.sd3.masked_attention import mask_attention, use_masked_attention
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.families.sd3.real_pipeline import RealTextAttention
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("one_thread")

TINY2 = SIZES["tiny2"].transformer_config()
CONFIGS = {
    "qk-norm": TINY2,
    "no-qk-norm": replace(SIZES["tiny2"], qk_norm=False).transformer_config(),
    "dual": {**TINY2, "dual_attention_layers": (0,)},
    "one-block": replace(SIZES["tiny2"], num_layers=1).transformer_config(),
}
LENGTHS = [9, 4, 1]


@pytest.fixture(params=CONFIGS)
def transformer(request: pytest.FixtureRequest) -> SD3Transformer2DModel:
    return perturbed(CONFIGS[request.param])


def inputs(batch: int = 3, tokens: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 16, 8, 6, generator=generator),
        "timestep": 1000 * torch.rand(batch, generator=generator),
        "encoder_hidden_states": torch.randn(batch, tokens, 256, generator=generator),
        "pooled_projections": torch.randn(batch, 224, generator=generator),
    }


def forward(transformer: SD3Transformer2DModel, features: dict[str, Tensor], **kwargs: Any) -> Tensor:
    output: Tensor = transformer(**features, return_dict=False, **kwargs)[0]
    return output


def gradients(transformer: SD3Transformer2DModel, output: Tensor) -> dict[str, Tensor]:
    transformer.zero_grad(set_to_none=True)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


def test_without_a_mask_it_is_the_stock_processor_bit_for_bit(transformer: SD3Transformer2DModel) -> None:
    features = inputs()
    expected = forward(transformer, features)
    expected_gradients = gradients(transformer, expected)
    mask_attention(transformer)
    actual = forward(transformer, features)
    actual_gradients = gradients(transformer, actual)
    assert torch.equal(actual, expected)
    assert set(actual_gradients) == set(expected_gradients)
    assert all(torch.equal(actual_gradients[name], expected_gradients[name]) for name in expected_gradients)


def test_the_stock_processors_are_restored(transformer: SD3Transformer2DModel) -> None:
    before = transformer.attn_processors

    def fail() -> None:
        assert {type(processor) for processor in transformer.attn_processors.values()} == {RealTextAttention}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), use_masked_attention(transformer):
        fail()
    after = transformer.attn_processors
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert {type(processor) for processor in after.values()} == {JointAttnProcessor2_0}
    # the backward pass of cuDNN gives NaN with a mask, at lengths such as 704
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with use_masked_attention(transformer):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_block_compiles_without_graph_breaks_for_any_text_length() -> None:
    """Under checkpointing, forward and backward."""
    transformer = new_transformer(CONFIGS["dual"], 0)
    with torch.no_grad():
        transformer.proj_out.weight.normal_(generator=torch.Generator().manual_seed(0))
    mask_attention(transformer)
    transformer.enable_gradient_checkpointing()

    def outcome(tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        lengths = {"text_lengths": torch.tensor(LENGTHS)}
        output = forward(transformer, inputs(tokens=tokens), joint_attention_kwargs=lengths)
        return output.detach(), gradients(transformer, output)

    expected = [outcome(tokens) for tokens in (9, 11)]
    transformer.transformer_blocks[0].compile(backend="eager", fullgraph=True)
    for tokens, (output, grads) in zip((9, 11), expected, strict=True):
        actual, actual_grads = outcome(tokens)
        torch.testing.assert_close(actual, output, rtol=1e-5, atol=1e-6)
        for name in grads:
            torch.testing.assert_close(actual_grads[name], grads[name], rtol=1e-4, atol=1e-5, msg=name)
