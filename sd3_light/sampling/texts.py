"""A prompt as the denoiser takes it, and batches of them.

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
    """How text was shown to the model in training, and so must be in sampling.

    `uncond_text` is what guidance leads away from: all zeros, or the encoding of the negative prompt (as stock).
    """

    t5_max_length: int
    uncond_text: Literal["zero", "empty"]
    text_tokens: Literal["padded", "real"]


@dataclass(frozen=True)
class EncodedText:
    """One text: tokens [T, W], CLIP's and then T5's, and the pooled vector [P]."""

    tokens: Tensor
    pooled: Tensor


@dataclass(frozen=True)
class TextBatch:
    """Texts together: tokens [B, T, W], pooled [B, P], and lengths [B]: how many tokens of each are its own. Zeros
    stand behind those of the shorter ones."""

    tokens: Tensor
    pooled: Tensor
    lengths: Tensor


def join_features(features: Mapping[str, Tensor]) -> EncodedText:
    """The text of one caption's features: ENCODER -> tokens, ENCODER.pooled -> vector."""
    tokens_BTW, pooled_BP, _ = join_text({name: [values] for name, values in features.items()})
    return EncodedText(tokens_BTW[0], pooled_BP[0])


def unconditional_text(like: EncodedText, text_tokens: str) -> EncodedText:
    """What a sample without any text carries where `uncond_text` is "zero": zeros, of real tokens a single one."""
    tokens_TW = torch.zeros_like(like.tokens if text_tokens == "padded" else like.tokens[:1])
    return EncodedText(tokens_TW, torch.zeros_like(like.pooled))


def batch_texts(texts: Sequence[EncodedText], device: torch.device, dtype: torch.dtype) -> TextBatch:
    """Texts of any numbers of tokens as one batch on a device."""
    tokens_BTW = nn.utils.rnn.pad_sequence([text.tokens for text in texts], batch_first=True)
    lengths_B = torch.tensor([len(text.tokens) for text in texts])
    pooled_BP = torch.stack([text.pooled for text in texts])
    return TextBatch(tokens_BTW.to(device, dtype), pooled_BP.to(device, dtype), lengths_B.to(device))


def encode(pipe: "StableDiffusion3Pipeline", texts: Sequence[str], policy: TextPolicy) -> list[EncodedText]:
    """The texts as the pipeline's own encoders give them; equal ones are encoded once."""
    unique = list(dict.fromkeys(texts))
    encoded = (
        _encode_padded(pipe, unique, policy) if policy.text_tokens == "padded" else _encode_real(pipe, unique, policy)
    )
    by_text = dict(zip(unique, encoded, strict=True))
    return [by_text[text] for text in texts]


def _encode_padded(pipe: "StableDiffusion3Pipeline", texts: list[str], policy: TextPolicy) -> list[EncodedText]:
    """As the stock pipeline computes them."""
    tokens_BTW, _, pooled_BP, _ = pipe.encode_prompt(
        prompt=texts,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=policy.t5_max_length,
    )
    return [EncodedText(tokens_TW, pooled_P) for tokens_TW, pooled_P in zip(tokens_BTW, pooled_BP, strict=True)]


def _encode_real(pipe: "StableDiffusion3Pipeline", texts: list[str], policy: TextPolicy) -> list[EncodedText]:
    """As the cache computes them: real tokens alone. One text at a time has no padding, and so needs no mask."""
    longest = int(pipe.tokenizer.model_max_length)  # of both CLIPs, as in the stock pipeline
    clips = {
        "clip_l": (Tokenizer(pipe.tokenizer, longest), pipe.text_encoder),
        "clip_g": (Tokenizer(pipe.tokenizer_2, longest), pipe.text_encoder_2),
    }
    t5 = Tokenizer(pipe.tokenizer_3, policy.t5_max_length)
    found = []
    for text in texts:
        features: dict[str, Tensor] = {}
        for name, (tokenizer, model) in clips.items():
            tokens, pooled = encode_clip(model, torch.tensor(tokenizer([text], padded=False), device=model.device))
            features |= {name: tokens[0], f"{name}.pooled": pooled[0]}
        ids = torch.tensor(t5([text], padded=False), device=pipe.text_encoder_3.device)
        features["t5"] = encode_t5(pipe.text_encoder_3, ids)[0]
        found.append(join_features(features))
    return found
