"""Attention under a mask: the stock one without a mask, and with it what the stock one computes without padding."""

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.model.masked_attention import MaskedJointAttention, mask_attention, real_text_mask, use_masked_attention
from sd3_light.model.random_weights import new_transformer

TINY2 = SIZES["tiny2"].transformer_config()
CONFIGS = {
    "qk-norm": TINY2,
    "no-qk-norm": SIZES["tiny2"].transformer_config(qk_norm=False),
    "dual": {**TINY2, "dual_attention_layers": (0,)},
    "one-block": SIZES["tiny2"].transformer_config(num_layers=1),
}
LENGTHS = [9, 4, 1]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=CONFIGS)
def transformer(request: pytest.FixtureRequest) -> SD3Transformer2DModel:
    """A model whose every weight matters."""
    made = new_transformer(CONFIGS[request.param], 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return made


def inputs(batch: int = 3, tokens: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 16, 8, 6, generator=generator),
        "timestep": 1000 * torch.rand(batch, generator=generator),
        "encoder_hidden_states": torch.randn(batch, tokens, 256, generator=generator),
        "pooled_projections": torch.randn(batch, 224, generator=generator),
    }


def mask(tokens: int = 9) -> Tensor:
    return real_text_mask(torch.tensor(LENGTHS), tokens, 4 * 3)


def forward(transformer: SD3Transformer2DModel, given: dict[str, Tensor], **kwargs: Any) -> Tensor:
    output: Tensor = transformer(**given, return_dict=False, **kwargs)[0]
    return output


def gradients(transformer: SD3Transformer2DModel, output: Tensor) -> dict[str, Tensor]:
    transformer.zero_grad(set_to_none=True)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


def test_the_mask_shows_all_of_the_image_and_the_first_text_tokens() -> None:
    found = real_text_mask(torch.tensor([3, 1, 2]), 3, 2)
    assert found.dtype == torch.bool
    assert found.shape == (3, 1, 1, 5)
    assert found[:, 0, 0].int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]


def test_without_a_mask_it_is_the_stock_processor_bit_for_bit(transformer: SD3Transformer2DModel) -> None:
    given = inputs()
    expected = forward(transformer, given)
    expected_gradients = gradients(transformer, expected)
    mask_attention(transformer)
    found = forward(transformer, given)
    found_gradients = gradients(transformer, found)
    assert torch.equal(found, expected)
    assert set(found_gradients) == set(expected_gradients)
    assert all(torch.equal(found_gradients[name], expected_gradients[name]) for name in expected_gradients)


def test_under_the_mask_padding_is_not_there(transformer: SD3Transformer2DModel) -> None:
    """What the unchanged stock model says of each sample alone, its text cut where it ends."""
    given = inputs()
    alone = [{name: values[at : at + 1] for name, values in given.items()} for at in range(3)]
    for one, length in zip(alone, LENGTHS, strict=True):
        one["encoder_hidden_states"] = one["encoder_hidden_states"][:, :length]
    with torch.no_grad():
        expected = torch.cat([forward(transformer, one) for one in alone])
        padded = forward(transformer, given)
        with use_masked_attention(transformer):
            found = forward(transformer, given, joint_attention_kwargs={"attention_mask": mask()})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert float((padded - expected).abs().max()) > 1e-2, "padding that does not show proves nothing"


def test_what_padding_holds_changes_nothing(transformer: SD3Transformer2DModel) -> None:
    given = inputs()
    padding = torch.arange(9) >= torch.tensor(LENGTHS)[:, None]
    dirty = {**given, "encoder_hidden_states": given["encoder_hidden_states"].masked_fill(padding[..., None], 1e4)}
    with torch.no_grad(), use_masked_attention(transformer):
        one, two = (forward(transformer, x, joint_attention_kwargs={"attention_mask": mask()}) for x in (given, dirty))
    assert torch.equal(one, two)


def test_the_stock_processors_come_back(transformer: SD3Transformer2DModel) -> None:
    before = transformer.attn_processors

    def fail() -> None:
        assert {type(found) for found in transformer.attn_processors.values()} == {MaskedJointAttention}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), use_masked_attention(transformer):
        fail()
    after = transformer.attn_processors
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert {type(found) for found in after.values()} == {JointAttnProcessor2_0}


def test_a_block_compiles_whole_for_any_length_of_text() -> None:
    """Traced without a break in the graph, under checkpointing, forwards and backwards."""
    transformer = new_transformer(CONFIGS["dual"], 0)
    with torch.no_grad():
        transformer.proj_out.weight.normal_(generator=torch.Generator().manual_seed(0))
    mask_attention(transformer)
    transformer.enable_gradient_checkpointing()

    def outcome(tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        output = forward(transformer, inputs(tokens=tokens), joint_attention_kwargs={"attention_mask": mask(tokens)})
        return output.detach(), gradients(transformer, output)

    expected = [outcome(tokens) for tokens in (9, 11)]
    transformer.transformer_blocks[0].compile(backend="eager", fullgraph=True)
    for tokens, (output, grads) in zip((9, 11), expected, strict=True):
        found, found_grads = outcome(tokens)
        torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-6)
        for name in grads:
            torch.testing.assert_close(found_grads[name], grads[name], rtol=1e-4, atol=1e-5, msg=name)
