"""Encoded prompts: padded as in the stock pipeline, or real tokens under T5's mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.core.sampling import EncodedText
from sd3_light.families.sd3.sample_texts import TextPolicy, batch_texts, unconditional_text
from sd3_light.families.sd3.text import encode_clip, encode_t5

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


@torch.no_grad()
def test_equal_texts_are_encoded_once(pipe: Any) -> None:
    first, second, third = policy("padded").encode(pipe, ["a", "two", "a"])
    assert first is third
    assert not torch.equal(first["prompt"], second["prompt"])


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


@torch.no_grad()
def test_real_text_is_truncated_like_padded_text(pipe: Any) -> None:
    (text,) = policy("real", 8).encode(pipe, [LONG])
    assert len(text["prompt"]) == 77 + 8


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
