"""The list of layers equals the stock model bit for bit in float32; new weights are a pure function of the seed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor, nn

from sd3_light.config import SIZES
from sd3_light.core.compiling import compile_blocks
from sd3_light.families.sd3.layers import build_layers, run_layers, unpatchify
from sd3_light.families.sd3.masked_attention import mask_attention, use_masked_attention
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.families.sd3.real_pipeline import RealTextAttention
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("one_thread")

TINY2, TINY3 = SIZES["tiny2"].transformer_config(), SIZES["tiny3"].transformer_config()
DUAL = {**TINY2, "dual_attention_layers": (0,)}
CONFIGS = {
    "tiny2": TINY2,
    "tiny3": TINY3,
    "no-qk-norm": replace(SIZES["tiny2"], qk_norm=False).transformer_config(),
    "dual": DUAL,
    "one-block": replace(SIZES["tiny2"], num_layers=1).transformer_config(),
}
LATENTS = [(8, 8), (4, 12), (10, 6)]


def inputs(height: int = 8, width: int = 8, batch: int = 2, tokens: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(height * 100 + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    times = 1000 * torch.rand(batch, generator=generator)
    return [normal(batch, 16, height, width), times, normal(batch, tokens, 256), normal(batch, 224)]


def stock_forward(transformer: SD3Transformer2DModel, features: list[Tensor], **attention: Tensor) -> Tensor:
    noisy, times, prompt, pooled = features
    inputs = {"hidden_states": noisy, "timestep": times, "encoder_hidden_states": prompt, "pooled_projections": pooled}
    output: Tensor = transformer(**inputs, joint_attention_kwargs=attention or None, return_dict=False)[0]
    return output


def list_forward(transformer: SD3Transformer2DModel, features: list[Tensor], **options: Any) -> Tensor:
    patches = run_layers(build_layers(transformer), features, **options)[0]
    return unpatchify(patches, *features[0].shape[-2:])


def gradients(transformer: SD3Transformer2DModel, output: Tensor) -> dict[str, Tensor]:
    transformer.zero_grad(set_to_none=True)
    weight = torch.linspace(-1, 1, output.numel()).view(
        output.shape
    )  # not symmetric, so that the order of patches matters
    (output * weight).sum().backward()
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


# --- equal to the stock forward ----------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("height", "width"), LATENTS)
def test_the_list_equals_the_stock_forward_bit_for_bit(name: str, height: int, width: int) -> None:
    transformer, features = perturbed(CONFIGS[name]), inputs(height, width)
    with torch.no_grad():
        expected = stock_forward(transformer, features)
        actual = list_forward(transformer, features)
    assert actual.shape == (2, 16, height, width)
    assert float(expected.std()) > 0.01, "the model must predict something"
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["tiny3", "no-qk-norm", "dual"])
def test_its_gradients_equal_the_stock_ones(name: str) -> None:
    transformer, features = perturbed(CONFIGS[name]), inputs(6, 8)
    expected = gradients(transformer, stock_forward(transformer, features))
    actual = gradients(transformer, list_forward(transformer, features))
    assert set(actual) == set(expected)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_layers_share_the_modules_of_the_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = perturbed(TINY3)
    layers = build_layers(transformer)
    assert len(layers) == 1 + 3 + 1
    expected = {id(parameter) for parameter in transformer.parameters()}
    listed = [id(parameter) for layer in layers for parameter in layer.parameters()]
    assert len(listed) == len(set(listed)), "two layers share a parameter: a pipeline would train it twice"
    assert set(listed) == expected
    # compiled in place: a wrapped module would rename every parameter and break checkpoints and exports
    compiled: list[nn.Module] = []

    def compile_one(forward: Any, dynamic: bool | None) -> Any:
        compiled.append(forward.__self__)
        return forward

    monkeypatch.setattr(torch, "compile", compile_one)
    transformer = perturbed(TINY3)
    names = list(transformer.state_dict())
    compile_blocks(transformer)
    assert compiled == list(transformer.transformer_blocks)
    assert list(transformer.state_dict()) == names
    transformer, features = perturbed(DUAL), inputs(6, 8)
    plain_output = list_forward(transformer, features)
    plain = gradients(transformer, plain_output)
    calls: list[str] = []
    handle = transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: calls.append("block"))
    output = list_forward(transformer, features, checkpointing=True)
    actual = gradients(transformer, output)
    handle.remove()
    assert len(calls) == 2, "activations were not recomputed"
    assert torch.equal(output, plain_output)
    assert set(actual) == set(plain)
    assert all(torch.equal(actual[key], plain[key]) for key in plain)


# --- text reconstruction -----------------------------------------------------------------------


def text_by_layer(transformer: SD3Transformer2DModel, features: list[Tensor]) -> list[Tensor]:
    """Text tokens of a stock forward: after the context embedder, then after every block with a text output."""
    texts: list[Tensor] = []

    def embedded(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        texts.append(output)

    def after_block(_module: nn.Module, _inputs: Any, output: tuple[Tensor | None, Tensor]) -> None:
        if output[0] is not None:
            texts.append(output[0])

    handles = [transformer.context_embedder.register_forward_hook(embedded)]
    handles += [block.register_forward_hook(after_block) for block in transformer.transformer_blocks]
    with torch.no_grad():
        stock_forward(transformer, features)
    for handle in handles:
        handle.remove()
    return texts


@pytest.mark.parametrize("target", [0, 1])
def test_the_text_of_a_target_layer_is_kept(target: int) -> None:
    transformer, features = perturbed(TINY3), inputs()
    expected = text_by_layer(transformer, features)
    assert len(expected) == 3  # the last block has no text output
    assert not torch.equal(expected[0], expected[1])
    patches, text, kept = run_layers(build_layers(transformer, target), features)
    assert torch.equal(text.detach(), expected[-1])
    assert torch.equal(kept, expected[target])
    assert not kept.requires_grad
    assert text.requires_grad
    assert torch.equal(unpatchify(patches.detach(), 8, 8), list_forward(transformer, features).detach())


@pytest.mark.parametrize("target", [2, 3, 4, -1])
def test_a_layer_without_a_later_text_is_rejected(target: int) -> None:
    with pytest.raises(AssertionError):
        build_layers(perturbed(TINY3), target)


# --- real text tokens --------------------------------------------------------------------------

LENGTHS = torch.tensor([9, 1, 4])


def real_inputs() -> list[Tensor]:
    return [*inputs(6, 8, batch=3), LENGTHS]


def one_sample(features: list[Tensor], at: int) -> list[Tensor]:
    """One sample alone, without padding."""
    noisy, times, prompt, pooled, lengths = (tensor[at : at + 1] for tensor in features)
    return [noisy, times, prompt[:, : int(lengths)], pooled, lengths]


def dirty(features: list[Tensor], scale: float) -> list[Tensor]:
    """The same inputs with garbage in the padding."""
    noisy, times, prompt, pooled, lengths = features
    padding = torch.arange(prompt.shape[1]) >= lengths[:, None]
    garbage = scale * torch.randn(prompt.shape, generator=torch.Generator().manual_seed(7))
    return [noisy, times, torch.where(padding[..., None], garbage, prompt), pooled, lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_real_sample_does_not_depend_on_its_batch(name: str) -> None:
    transformer, features = perturbed(CONFIGS[name]), real_inputs()
    target = 0 if CONFIGS[name]["num_layers"] > 1 else None
    expected = [stock_forward(transformer, one_sample(features, at)[:4]).detach() for at in range(3)]
    layers = build_layers(transformer, target, real_text=True)
    with torch.no_grad():
        together, other = run_layers(layers, features), run_layers(layers, dirty(features, 100.0))
        alone = [run_layers(layers, one_sample(features, at)) for at in range(3)]
    assert torch.equal(together[0], other[0]), "padding changes the output"
    for at, length in enumerate(LENGTHS.tolist()):
        for whole, single in zip(together, alone[at], strict=True):
            kept = whole[at : at + 1, : single.shape[1]] if single.dim() > 1 else whole[at : at + 1]
            torch.testing.assert_close(kept, single, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(unpatchify(alone[at][0], 6, 8), expected[at], rtol=1e-5, atol=1e-5)
        assert alone[at][1].shape[1] == length


@pytest.mark.parametrize("name", ["tiny3", "no-qk-norm", "dual"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_its_gradient_does_not_depend_on_its_batch(name: str, checkpointing: bool) -> None:
    """The gradient of a batch is the sum of its samples' gradients, whatever the padding contains."""
    transformer, features = perturbed(CONFIGS[name]), real_inputs()
    layers = build_layers(transformer, real_text=True)
    weight = torch.linspace(-1, 1, 3 * 16 * 6 * 8).view(3, 16, 6, 8)

    def gradient(features: list[Tensor], weight: Tensor) -> dict[str, Tensor]:
        transformer.zero_grad(set_to_none=True)
        (unpatchify(run_layers(layers, features, checkpointing)[0], 6, 8) * weight).sum().backward()
        return {key: p.grad.clone() for key, p in transformer.named_parameters() if p.grad is not None}

    together = gradient(dirty(features, 10.0), weight)
    alone = [gradient(one_sample(features, at), weight[at : at + 1]) for at in range(3)]
    assert set(together) == {key for key, _ in transformer.named_parameters()}, "engines need all gradients"
    for key, gradients_together in together.items():
        expected = sum(gradients_alone[key] for gradients_alone in alone)
        assert isinstance(expected, Tensor)
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(gradients_together / scale, expected / scale, rtol=1e-5, atol=1e-5, msg=key)


def test_lengths_pass_through_the_layers_as_integers() -> None:
    """A pipeline may cut anywhere, and sends no gradient for them."""
    state: Any = tuple(real_inputs())
    *inner, output = build_layers(perturbed(TINY3), 1, real_text=True)
    for layer in inner:
        state = layer(state)
        assert all(isinstance(part, Tensor) for part in state)
        assert torch.equal(state[3], LENGTHS)
        assert [part.is_floating_point() for part in state] == [True, True, True, False, *[True] * (len(state) - 4)]
    _, text, lengths, kept = output(state)
    assert torch.equal(lengths, LENGTHS)
    assert text.shape == kept.shape
    transformer, features = perturbed(TINY3), real_inputs()
    layers = build_layers(transformer, real_text=True)
    transformer.set_attn_processor(JointAttnProcessor2_0())
    with pytest.raises(AssertionError, match="padded text"):
        run_layers(layers, features)


@pytest.mark.parametrize("name", ["tiny2", "no-qk-norm", "dual", "one-block"])
def test_without_lengths_masked_attention_is_the_stock_one_bit_for_bit(name: str) -> None:
    transformer, features = perturbed(CONFIGS[name]), inputs()
    expected = stock_forward(transformer, features)
    expected_gradients = gradients(transformer, expected)
    before = transformer.attn_processors
    with use_masked_attention(transformer):
        assert {type(processor) for processor in transformer.attn_processors.values()} == {RealTextAttention}
        actual = stock_forward(transformer, features)
        actual_gradients = gradients(transformer, actual)
    assert torch.equal(actual, expected)
    assert set(actual_gradients) == set(expected_gradients)
    assert all(torch.equal(actual_gradients[name], expected_gradients[name]) for name in expected_gradients)
    with pytest.raises(KeyboardInterrupt), use_masked_attention(transformer):
        raise KeyboardInterrupt
    after = transformer.attn_processors
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    # the backward pass of cuDNN gives NaN with a mask, at lengths such as 704
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with use_masked_attention(transformer):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def test_a_masked_block_compiles_without_graph_breaks_for_any_text_length() -> None:
    """Under checkpointing, forward and backward."""
    transformer = perturbed(DUAL)
    mask_attention(transformer)
    transformer.enable_gradient_checkpointing()

    def outcome(tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        output = stock_forward(transformer, inputs(8, 6, 3, tokens), text_lengths=LENGTHS)
        return output.detach(), gradients(transformer, output)

    expected = [outcome(tokens) for tokens in (9, 11)]
    transformer.transformer_blocks[0].compile(backend="eager", fullgraph=True)
    for tokens, (output, grads) in zip((9, 11), expected, strict=True):
        actual, actual_grads = outcome(tokens)
        torch.testing.assert_close(actual, output, rtol=1e-5, atol=1e-6)
        for name in grads:
            torch.testing.assert_close(actual_grads[name], grads[name], rtol=1e-4, atol=1e-5, msg=name)


# --- new weights -------------------------------------------------------------------------------


def test_new_weights_are_a_pure_function_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = new_transformer(TINY2, 3).state_dict()
    torch.manual_seed(99)
    torch.rand(17)
    two, other = new_transformer(TINY2, 3).state_dict(), new_transformer(TINY2, 4).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["context_embedder.weight"], other["context_embedder.weight"])
    name = "time_text_embed.timestep_embedder.linear_1.weight"
    assert not torch.equal(one[name], other[name])
    # weights can be drawn in any order, and in part
    few, many = (new_transformer({**TINY2, "num_layers": layers}, 3).state_dict() for layers in (2, 4))
    shared = [name for name in few if not name.startswith("transformer_blocks.1.")]
    assert len(shared) > 20
    assert all(torch.equal(few[name], many[name]) for name in shared)
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.default_generator.manual_seed(5)
    expected = torch.rand(4)
    torch.default_generator.manual_seed(5)
    new_transformer(TINY2, 0)
    assert torch.equal(torch.rand(4), expected)
    assert not seeded, "the GPUs' generators were seeded"


@pytest.mark.parametrize("name", CONFIGS)
def test_all_weights_exist_and_norms_start_at_1(name: str) -> None:
    transformer, theirs = new_transformer(CONFIGS[name], 0), SD3Transformer2DModel(**CONFIGS[name])
    ours = transformer.state_dict()
    assert {key: values.shape for key, values in ours.items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert all(values.device.type == "cpu" and values.isfinite().all() for values in ours.values())
    assert torch.equal(ours["pos_embed.pos_embed"], theirs.state_dict()["pos_embed.pos_embed"])
    norms = [values for key, values in ours.items() if ".norm_" in key]
    assert all(bool((values == 1).all()) for values in norms)
    assert bool(norms) == (name != "no-qk-norm")
    assert all(parameter.requires_grad for parameter in transformer.parameters())


@pytest.mark.parametrize("name", ["tiny3", "dual"])
def test_no_two_drawn_weights_are_equal(name: str) -> None:
    """One seed for several layers would give layers of the same shape the same weights."""
    transformer = new_transformer(CONFIGS[name], 0)
    drawn = {key: p.detach() for key, p in transformer.named_parameters() if p.dim() >= 2 and p.any()}
    assert len(drawn) > 20
    first: dict[tuple[float, ...], str] = {}
    for key, weight in drawn.items():
        start = tuple((weight.flatten()[:8] / weight.std()).mul(1e4).round().tolist())  # independent of scale
        assert start not in first, f"{key} begins like {first[start]}"
        first[start] = key


def test_blocks_start_as_the_identity_and_the_output_at_zero() -> None:
    transformer, features = new_transformer(DUAL, 0), inputs()
    with torch.no_grad():
        embed, *blocks, output = build_layers(transformer)
        start = state = embed(tuple(features))
        for block in blocks:
            state = block(state)
        assert torch.equal(state[0], start[0])
        assert torch.equal(state[1], start[1])
        assert not output(state)[0].any()
    transformer = new_transformer(TINY3, 0)
    assert {p.dtype for p in transformer.parameters()} == {torch.float32}
    assert all(float(p.detach().abs().max()) <= 1.0 for p in transformer.parameters())
    embed = transformer.time_text_embed.timestep_embedder.linear_1.weight.detach()
    assert float(embed.std()) == pytest.approx(0.02, rel=0.05)
    proj = transformer.pos_embed.proj.weight.detach().flatten(1)  # xavier over the flattened patch
    assert float(proj.std()) == pytest.approx((2 / sum(proj.shape)) ** 0.5, rel=0.05)
    for weight in (embed, proj, transformer.context_embedder.weight.detach()):
        assert abs(float(weight.mean())) < 4 * float(weight.std()) / weight.numel() ** 0.5, "around zero"
