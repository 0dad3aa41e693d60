"""Text features and encoded prompts: padded as in the stock pipeline, or real tokens under T5's mask."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.core.sampling import EncodedText
from sd3_light.families.sd3.sample_texts import TextPolicy, batch_texts, unconditional_text
from sd3_light.families.sd3.text import (
    TEXT_ENCODERS,
    Tokenizer,
    encode_clip,
    encode_t5,
    fuse_activations,
    join_text,
    load_text_model,
    load_tokenizer,
    unpad_text,
)

CAPTIONS = [
    "a small red circle to the left of a large blue square",
    "",
    "三个绿色的星星",
    "one word and then so many others that no tokenizer of sixteen places could ever hold all of them to the very end",
    "a!b?c <pad> </s> <|endoftext|>",
]
CLIPS = ("clip_l", "clip_g")


@pytest.fixture(scope="module")
def models(demo_parts: Path) -> dict[str, Any]:
    return {name: load_text_model(name, demo_parts, torch.device("cpu"), torch.float32) for name in TEXT_ENCODERS}


@pytest.fixture(scope="module")
def tokenizers(demo_parts: Path) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(name, demo_parts, 16) for name in TEXT_ENCODERS}


@torch.no_grad()
def encode(models: dict[str, Any], folder: Path, texts: list[str], length: int = 16) -> dict[str, Tensor]:
    """Return the padded features of all three encoders, as one batch."""
    ids = {name: torch.tensor(load_tokenizer(name, folder, length)(texts, padded=True)) for name in TEXT_ENCODERS}
    features = {"t5": encode_t5(models["t5"], ids["t5"])}
    for name in ("clip_l", "clip_g"):
        features[name], features[f"{name}.pooled"] = encode_clip(models[name], ids[name])
    return features


def stock_text(stock: Any, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        tokens, _, pooled, _ = stock.encode_prompt(
            prompt=texts, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=length
        )
    return tokens, pooled


def padded(features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the joined text with every row counted as a token."""
    return join_text(unpad_text(features))[:2]


@pytest.mark.parametrize("length", [16, 12])
def test_joined_text_equals_stock_bit_for_bit(stock: Any, models: Any, demo_parts: Path, length: int) -> None:
    ours, theirs = padded(encode(models, demo_parts, CAPTIONS, length)), stock_text(stock, CAPTIONS, length)
    assert ours[0].shape == (len(CAPTIONS), 16 + length, 256)
    assert torch.equal(ours[0], theirs[0]), "tokens"
    assert torch.equal(ours[1], theirs[1]), "pooled"


# --- real tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TEXT_ENCODERS))
def test_real_ids_equal_padded_ids_without_padding(tokenizers: Any, name: str) -> None:
    real, padded = (tokenizers[name](CAPTIONS, padded=padded) for padded in (False, True))
    for ids, filled in zip(real, padded, strict=True):
        assert filled[: len(ids)] == ids
        assert set(filled[len(ids) :]) <= {tokenizers[name].pad_id}
    end = tokenizers[name].tokenizer.eos_token_id
    assert [ids[-1] for ids in real] == [end] * len(CAPTIONS), "a truncated caption keeps its end token"
    assert [len(real[1]), len(real[3])] == [1 if name == "t5" else 2, 16], "the empty and the longest caption"


@pytest.mark.parametrize("length", [13, 16, 40])
@torch.no_grad()
def test_masked_t5_equals_the_models_forward(models: Any, tokenizers: Any, length: int) -> None:
    """For any padded length; compared with the public forward under an attention mask."""
    ids = [row[:13] for row in tokenizers["t5"](CAPTIONS, padded=False)]
    padded = torch.tensor([row + [0] * (length - len(row)) for row in ids])
    lengths = torch.tensor([len(row) for row in ids])
    mask = torch.arange(length) < lengths[:, None]
    theirs = models["t5"](padded, attention_mask=mask.long())[0]
    ours = encode_t5(models["t5"], padded, lengths)
    assert torch.allclose(ours[mask], theirs[mask], atol=1e-5)
    for row, values in zip(ids, ours, strict=True):
        alone = models["t5"](torch.tensor([row]))[0][0]
        assert torch.allclose(values[: len(row)], alone, atol=1e-5)


def real_features(counts: list[tuple[int, int, int]], rows: int = 6) -> dict[str, Tensor]:
    """Return random features with these numbers of real rows per encoder; padding rows are not zero."""
    generator = torch.Generator().manual_seed(0)
    widths = {"clip_l": 3, "clip_g": 5, "t5": 10}
    features = {name: torch.randn(len(counts), rows, width, generator=generator) for name, width in widths.items()}
    features |= {f"{name}.pooled": torch.randn(len(counts), widths[name], generator=generator) for name in CLIPS}
    return features | {
        f"{name}.length": torch.tensor([row[at] for row in counts]) for at, name in enumerate(TEXT_ENCODERS)
    }


def test_real_tokens_are_contiguous_with_zeros_at_the_end() -> None:
    counts = [(2, 2, 1), (6, 6, 4), (1, 1, 0), (2, 4, 3), (4, 2, 3)]
    features = real_features(counts)
    tokens, pooled, lengths = join_text(unpad_text(features))
    assert lengths.tolist() == [3, 10, 1, 7, 7]
    assert lengths.dtype == torch.int64
    assert tokens.shape == (5, 10, 10), "as long as the longest"
    for at, (num_l, num_g, num_t5) in enumerate(counts):
        expected = torch.zeros(10, 10)
        expected[:num_l, :3] = features["clip_l"][at, :num_l]
        expected[:num_g, 3:8] = features["clip_g"][at, :num_g]
        start = max(num_l, num_g)
        expected[start : start + num_t5] = features["t5"][at, :num_t5]
        assert torch.equal(tokens[at], expected)
    assert torch.equal(pooled, torch.cat([features["clip_l.pooled"], features["clip_g.pooled"]], dim=-1))
    features = real_features([(2, 2, 1), (6, 6, 4)])
    texts = unpad_text(features)
    assert set(texts) == {"clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"}
    assert [len(tokens) for tokens in texts["t5"]] == [1, 4]
    assert all(texts[name][1].data_ptr() == features[name][1].data_ptr() for name in texts)
    with pytest.raises(AssertionError):
        join_text(unpad_text(real_features([(2, 2, 1), (0, 0, 0)])))


def test_the_fused_activation_is_that_of_t5(demo_parts: Path, models: dict[str, Any]) -> None:
    ids = torch.arange(2, 14).reshape(2, 6)
    with torch.no_grad():
        expected = encode_t5(models["t5"], ids)
        fused = load_text_model("t5", demo_parts, torch.device("cpu"), torch.float32)
        fuse_activations(fused)
        assert any(isinstance(module, torch.nn.GELU) for module in fused.modules())
        torch.testing.assert_close(encode_t5(fused, ids), expected, rtol=1e-5, atol=1e-5)
    for model in models.values():
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


PROMPTS = ["a small red circle", "two blue squares left of a large green star", "a"]
LONG = " ".join(["red"] * 40)


def policy(text_tokens: str, length: int = 12) -> TextPolicy:
    return TextPolicy(length, "empty", text_tokens)  # type: ignore[arg-type]


def encoded(tokens: Tensor, pooled: Tensor) -> EncodedText:
    return {"prompt": tokens, "pooled": pooled}


@torch.no_grad()
def test_padded_text_equals_the_stock_pipeline(pipe: Any) -> None:
    tokens, _, pooled, _ = pipe.encode_prompt(PROMPTS, None, None, max_sequence_length=12)
    encoded = policy("padded").encode(pipe, PROMPTS)
    assert torch.equal(torch.stack([text["prompt"] for text in encoded]), tokens)
    assert torch.equal(torch.stack([text["pooled"] for text in encoded]), pooled)
    first, second, third = policy("padded").encode(pipe, ["a", "two", "a"])
    assert first is third
    assert not torch.equal(first["prompt"], second["prompt"])
    (text,) = policy("real", 8).encode(pipe, [LONG])
    assert len(text["prompt"]) == 77 + 8


@torch.no_grad()
def test_real_text_is_the_first_tokens_of_a_padded_batch_under_its_mask(pipe: Any) -> None:
    for prompt, text in zip(PROMPTS, policy("real").encode(pipe, PROMPTS), strict=True):
        clip_ids = pipe.tokenizer(prompt).input_ids
        t5_ids = pipe.tokenizer_3(prompt).input_ids
        clip, t5 = len(clip_ids), len(t5_ids)
        assert text["prompt"].shape == (clip + t5, 48)
        padded = torch.tensor([clip_ids + [1] * (77 - clip)])
        left, left_pooled = encode_clip(pipe.text_encoder, padded)
        right, right_pooled = encode_clip(pipe.text_encoder_2, padded)
        torch.testing.assert_close(text["prompt"][:clip, :16], left[0, :clip])
        torch.testing.assert_close(text["prompt"][:clip, 16:40], right[0, :clip])
        assert not text["prompt"][:clip, 40:].any()
        torch.testing.assert_close(text["pooled"], torch.cat([left_pooled[0], right_pooled[0]]))
        masked = encode_t5(pipe.text_encoder_3, torch.tensor([t5_ids + [0] * 9]), torch.tensor([t5]))
        torch.testing.assert_close(text["prompt"][clip:], masked[0, :t5])


@pytest.mark.parametrize(("text_tokens", "length"), [("padded", 5), ("real", 1)])
def test_unconditional_text_is_zeros(text_tokens: str, length: int) -> None:
    empty = unconditional_text(encoded(torch.ones(5, 3), torch.ones(2)), text_tokens)
    assert torch.equal(empty["prompt"], torch.zeros(length, 3))
    assert torch.equal(empty["pooled"], torch.zeros(2))


def test_a_batch_is_padded_with_zeros_at_the_end(pipe: Any) -> None:
    texts = [encoded(torch.ones(length, 3), torch.full((2,), float(length))) for length in (2, 4, 1)]
    batch = batch_texts(texts, torch.float64)
    assert batch["prompt"].sum(dim=(1, 2)).tolist() == [6, 12, 3]
    assert batch["prompt"][0, :2].all()
    assert batch["prompt"].dtype == batch["pooled"].dtype == torch.float64
    assert batch.host["prompt.length"].tolist() == [2, 4, 1]
    assert batch["pooled"][:, 0].tolist() == [2, 4, 1]
