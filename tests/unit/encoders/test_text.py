"""Our text features are the stock pipeline's, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.encoders.text import PARTS, join_text, load_text_encoder

CAPTIONS = [
    "a small red circle to the left of a large blue square",
    "",
    "三个绿色的星星",
    "one word and then so many others that no tokenizer of sixteen places could ever hold all of them to the very end",
    "a!b?c <pad> </s> <|endoftext|>",
]


@pytest.fixture(scope="module")
def encode(demo_parts: Path) -> Callable[[list[str], int], dict[str, Tensor]]:
    """Texts and T5 length -> the batched features of all three encoders."""
    cpu = torch.device("cpu")

    def features(texts: list[str], length: int = 16) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in PARTS:
            found |= load_text_encoder(name, demo_parts, length, cpu, torch.float32)(texts)
        return found

    return features


def stock_text(stock: Any, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        tokens, _, pooled, _ = stock.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
    return tokens, pooled


@pytest.mark.parametrize("length", [16, 12])
def test_the_joined_text_is_stock_bit_for_bit(stock: Any, encode: Any, length: int) -> None:
    ours, theirs = join_text(encode(CAPTIONS, length)), stock_text(stock, CAPTIONS, length)
    assert ours[0].shape == (len(CAPTIONS), 16 + length, 256)
    assert torch.equal(ours[0], theirs[0]), "tokens"
    assert torch.equal(ours[1], theirs[1]), "pooled"


@pytest.mark.parametrize("caption", CAPTIONS)
def test_a_caption_alone_is_stock_too(stock: Any, encode: Any, caption: str) -> None:
    ours, theirs = join_text(encode([caption])), stock_text(stock, [caption], 16)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_different_captions_have_different_features(encode: Any) -> None:
    """Were a vocabulary lost, everything would be the same unknown token."""
    features = encode(["a red circle", "a blue circle", "a blue square"])
    for name, values in features.items():
        for one, two in ((0, 1), (1, 2)):
            assert not torch.allclose(values[one], values[two], atol=1e-3), name


def test_each_part_stands_where_sd3_expects_it(encode: Any) -> None:
    features = encode(CAPTIONS)
    widths = {name: features[name].shape[-1] for name in PARTS}
    tokens, pooled = join_text(features)
    left, right = widths["clip_l"], widths["clip_l"] + widths["clip_g"]
    assert torch.equal(tokens[:, :16, :left], features["clip_l"])
    assert torch.equal(tokens[:, :16, left:right], features["clip_g"])
    assert (tokens[:, :16, right:] == 0).all()
    assert torch.equal(tokens[:, 16:], features["t5"])
    assert torch.equal(pooled, torch.cat([features["clip_l.pooled"], features["clip_g.pooled"]], dim=-1))


def test_encoders_are_frozen(demo_parts: Path) -> None:
    for name in PARTS:
        encoder = load_text_encoder(name, demo_parts, 16, torch.device("cpu"), torch.float32)
        assert not encoder.model.training
        assert not any(parameter.requires_grad for parameter in encoder.model.parameters())
        assert not any(values.requires_grad for values in encoder(["a"]).values())
