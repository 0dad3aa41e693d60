"""Text encoders with random weights: sizes, the scale of weights and outputs, masks."""

import pytest
import torch
from torch import nn
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase, T5EncoderModel

from sd3_light.parts.sizes import TextSize
from sd3_light.parts.text_encoders import build_encoders, encode, num_heads, scale_outputs
from sd3_light.parts.tokenizers import learn_tokenizers

SIZE = TextSize(96, 128, 256, 2, (8, 16, 32, 64), (1, 1, 1, 1))

Encoders = tuple[CLIPTextModelWithProjection, CLIPTextModelWithProjection, T5EncoderModel]
Tokenizers = dict[str, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return learn_tokenizers(["a red circle and a blue square", "一个红色的圆形"], 700)


@pytest.fixture
def encoders(tokenizers: Tokenizers) -> Encoders:
    return build_encoders(SIZE, tokenizers, 0)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 100, (12, 16), generator=torch.Generator().manual_seed(0))


def test_configs_and_weights_are_of_sd3(encoders: Encoders, tokenizers: Tokenizers) -> None:
    clip_l, clip_g, t5 = (model.config for model in encoders)
    first, second, third = tokenizers.values()
    for config, tokenizer, width, heads in ((clip_l, first, 96, 3), (clip_g, second, 128, 2)):
        assert (config.hidden_size, config.projection_dim, config.intermediate_size) == (width, width, 4 * width)
        assert (config.num_attention_heads, config.num_hidden_layers) == (heads, 2)
        assert (config.vocab_size, config.max_position_embeddings) == (len(tokenizer), tokenizer.model_max_length)
        assert config.bos_token_id == tokenizer.bos_token_id
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    assert (clip_l.hidden_act, clip_g.hidden_act) == ("quick_gelu", "gelu")
    assert (t5.d_model, t5.d_kv, t5.num_heads, t5.d_ff, t5.num_layers) == (256, 64, 4, 512, 2)
    assert (t5.vocab_size, t5.eos_token_id, t5.pad_token_id) == (len(third), 1, 0)
    assert t5.feed_forward_proj == "gated-gelu"
    assert t5.dropout_rate == 0
    assert not any(model.training for model in encoders)
    for seed, same in ((0, True), (1, False)):
        for model, other in zip(encoders, build_encoders(SIZE, tokenizers, seed), strict=True):
            weights = zip(model.parameters(), other.parameters(), strict=True)
            assert all(torch.equal(left, right) for left, right in weights) == same
    # 1 for embeddings, 0.5 for positions; linear layers keep the scale of their input, those that add to the residual
    # stream halve it, and T5's queries are divided by the root of the head width.
    expected = {
        "token_embedding": 1.0, "position_embedding": 0.5, "q_proj": 1.0, "out_proj": 0.5, "fc1": 1.0, "fc2": 0.5,
        "text_projection": 1.0, "shared": 1.0, "embed_tokens": 1.0, "q": 1 / 8, "k": 1.0, "v": 1.0, "o": 0.5,
        "wi_0": 1.0, "wi_1": 1.0, "wo": 0.5,
    }  # fmt: skip
    checked = set()
    for model in encoders:
        for name, module in model.named_modules():
            kind = name.rpartition(".")[2]
            if kind not in expected:
                continue
            checked.add(kind)
            scale = module.in_features**0.5 if isinstance(module, nn.Linear) else 1.0
            assert scale * module.weight.std().item() == pytest.approx(expected[kind], rel=0.05), name
            if getattr(module, "bias", None) is not None:
                assert module.bias.abs().max() == 0
    assert checked == expected.keys()


@pytest.mark.parametrize(("width", "heads"), [(32, 1), (64, 1), (96, 3), (128, 2), (160, 5), (192, 3), (512, 8)])
def test_heads_are_64_or_32_wide(width: int, heads: int) -> None:
    assert num_heads(width) == heads


@torch.no_grad()
def test_t5_attends_to_real_tokens_only_if_lengths_are_given(encoders: Encoders, ids: torch.Tensor) -> None:
    t5, lengths = encoders[2], torch.full((12,), 5)
    other = ids.clone()
    other[:, 5:] = 4
    for given, same in ((lengths, True), (None, False)):
        left, right = (encode(t5, tokens, given)[0][:, :5] for tokens in (ids, other))
        assert torch.allclose(left, right, atol=1e-5) == same
    assert encode(t5, ids)[1] is None
    stock = t5(ids, attention_mask=(torch.arange(16) < 5).long().expand(12, 16)).last_hidden_state
    assert torch.allclose(encode(t5, ids, lengths)[0][:, :5], stock[:, :5], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 1, 2])
def test_clips_tokens_are_scaled_whole_others_by_channel(encoders: Encoders, ids: torch.Tensor, index: int) -> None:
    model = encoders[index]
    tokens, pooled = encode(model, ids)
    scale_outputs(model, tokens, pooled)
    scaled, scaled_pooled = encode(model, ids)
    scale = tokens.square().mean((0, 1) if pooled is None else (0, 1, 2)).sqrt()
    assert torch.allclose(scaled, tokens / scale, atol=1e-3)
    assert torch.allclose(scaled.square().mean(), torch.ones(()), atol=1e-3)
    assert (pooled is None) == (scaled_pooled is None) == (index == 2)
    if pooled is not None:
        assert torch.allclose(scaled_pooled, pooled / pooled.square().mean(0).sqrt(), atol=1e-3)
