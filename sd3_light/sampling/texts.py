"""Prompts encoded for the denoiser, and batches of them.

Shapes: B texts, T tokens, W width of a token, P width of a pooled vector, N image tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from sd3_light.encoders.text import Tokenizer, encode_clip, encode_t5, join_text

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline


@dataclass(frozen=True)
class TextPolicy:
    """How text was encoded in training, and must be in sampling.

    `uncond_text` is the unconditional input of guidance: zeros, or the encoded negative prompt (as in stock SD3).
    """

    t5_max_length: int
    uncond_text: Literal["zero", "empty"]
    text_tokens: Literal["padded", "real"]


@dataclass(frozen=True)
class EncodedText:
    """One text: tokens [T, W], CLIP's then T5's, and the pooled vector [P]."""

    tokens: Tensor
    pooled: Tensor


@dataclass(frozen=True)
class TextBatch:
    """A batch of texts: tokens [B, T, W] padded with zeros, pooled [B, P], and lengths [B] in tokens."""

    tokens: Tensor
    pooled: Tensor
    lengths: Tensor


def join_features(features: Mapping[str, Tensor]) -> EncodedText:
    """Join one caption's features: ENCODER -> tokens, ENCODER.pooled -> vector."""
    tokens_BTW, pooled_BP, _ = join_text({name: [values] for name, values in features.items()})
    return EncodedText(tokens_BTW[0], pooled_BP[0])


def unconditional_text(like: EncodedText, text_tokens: str) -> EncodedText:
    """Return zeros in place of a text, for `uncond_text` "zero"; with real tokens a single token."""
    tokens_TW = torch.zeros_like(like.tokens if text_tokens == "padded" else like.tokens[:1])
    return EncodedText(tokens_TW, torch.zeros_like(like.pooled))


def batch_texts(texts: Sequence[EncodedText], device: torch.device, dtype: torch.dtype) -> TextBatch:
    """Batch texts of any lengths on a device."""
    tokens_BTW = nn.utils.rnn.pad_sequence([text.tokens for text in texts], batch_first=True)
    lengths_B = torch.tensor([len(text.tokens) for text in texts])
    pooled_BP = torch.stack([text.pooled for text in texts])
    return TextBatch(tokens_BTW.to(device, dtype), pooled_BP.to(device, dtype), lengths_B.to(device))


def encode(pipe: "StableDiffusion3Pipeline", texts: Sequence[str], policy: TextPolicy) -> list[EncodedText]:
    """Encode texts with the pipeline's encoders; equal ones are encoded once."""
    unique = list(dict.fromkeys(texts))
    encoded = (
        _encode_padded(pipe, unique, policy) if policy.text_tokens == "padded" else _encode_real(pipe, unique, policy)
    )
    by_text = dict(zip(unique, encoded, strict=True))
    return [by_text[text] for text in texts]


def _encode_padded(pipe: "StableDiffusion3Pipeline", texts: list[str], policy: TextPolicy) -> list[EncodedText]:
    """Encode as the stock pipeline does."""
    tokens_BTW, _, pooled_BP, _ = pipe.encode_prompt(
        prompt=texts,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=policy.t5_max_length,
    )
    return [EncodedText(tokens_TW, pooled_P) for tokens_TW, pooled_P in zip(tokens_BTW, pooled_BP, strict=True)]


def _encode_real(pipe: "StableDiffusion3Pipeline", texts: list[str], policy: TextPolicy) -> list[EncodedText]:
    """Encode as the cache does: real tokens only. One text at a time needs no padding and no mask."""
    max_length = int(pipe.tokenizer.model_max_length)  # for both CLIPs, as in the stock pipeline
    clips = {
        "clip_l": (Tokenizer(pipe.tokenizer, max_length), pipe.text_encoder),
        "clip_g": (Tokenizer(pipe.tokenizer_2, max_length), pipe.text_encoder_2),
    }
    t5 = Tokenizer(pipe.tokenizer_3, policy.t5_max_length)
    encoded = []
    for text in texts:
        features: dict[str, Tensor] = {}
        for name, (tokenizer, model) in clips.items():
            tokens, pooled = encode_clip(model, torch.tensor(tokenizer([text], padded=False), device=model.device))
            features |= {name: tokens[0], f"{name}.pooled": pooled[0]}
        ids = torch.tensor(t5([text], padded=False), device=pipe.text_encoder_3.device)
        features["t5"] = encode_t5(pipe.text_encoder_3, ids)[0]
        encoded.append(join_features(features))
    return encoded
