"""The demo's three text encoders with random weights, in the classes that SD3 uses."""

from pathlib import Path
from typing import Any

import torch
from demo_tokenizers import DEMO_VOCABULARY, EOS, Vocabulary, clip_tokenizer, t5_tokenizer
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

NAMES = ("text_encoder", "text_encoder_2", "text_encoder_3")


class Encoder(nn.Module):
    """A text encoder with its tokenizer and the outputs that SD3 uses: ids -> (tokens, pooled or None)."""

    model: Any

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
        super().__init__()
        self.tokenizer, self.model = tokenizer, model

    def ids(self, texts: list[str]) -> Tensor:
        """Return padded ids [captions, tokens per caption]."""
        padding = {"padding": "max_length", "max_length": self.tokenizer.model_max_length, "truncation": True}
        ids: Tensor = self.tokenizer(texts, return_tensors="pt", **padding).input_ids
        return ids

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self.model(ids, output_hidden_states=True)
        if isinstance(self.model, T5EncoderModel):
            return output[0], None
        return output.hidden_states[-2], output.text_embeds


def build_clip(pad: str, width: int, heads: int, activation: str, vocabulary: Vocabulary) -> Encoder:
    """Build a CLIP text encoder with three layers; the last one is used only for the pooled output."""
    tokenizer = clip_tokenizer(pad, vocabulary)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, projection_dim=width,
        num_hidden_layers=3, num_attention_heads=heads, hidden_act=activation,
        max_position_embeddings=vocabulary.max_length,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config)
    init_weights(model)
    return Encoder(tokenizer, model.eval())


def build_t5(width: int, vocabulary: Vocabulary) -> Encoder:
    """Build a T5 encoder with two layers and the gated GELU of T5-v1.1."""
    tokenizer = t5_tokenizer(vocabulary)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=64, num_heads=4, d_ff=384, num_layers=2,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=32, relative_attention_max_distance=128,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        dropout_rate=0.0, use_cache=False, is_encoder_decoder=False,
    )  # fmt: skip
    model = T5EncoderModel(config)
    init_weights(model)
    return Encoder(tokenizer, model.eval())


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Initialize embeddings at unit scale (the usual 0.02 would hide the words), and layers that add about the same."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.5 if "position" in name else 1.0)
        elif isinstance(module, nn.Linear):
            is_residual = name.endswith((".out_proj", ".fc2", ".o", ".wo"))
            module.weight.normal_(std=(0.5 if is_residual else 1.0) * module.in_features**-0.5)
            if name.endswith(".q"):
                module.weight.mul_(64**-0.5)  # T5 does not divide by the root of the head width
            if module.bias is not None:
                module.bias.zero_()


def build_encoders(seed: int, vocabulary: Vocabulary = DEMO_VOCABULARY) -> dict[str, Encoder]:
    """Return the three encoders by name, with random weights."""
    torch.manual_seed(seed)
    encoders = (
        build_clip(EOS, 96, 3, "quick_gelu", vocabulary),
        build_clip("!", 128, 4, "gelu", vocabulary),
        build_t5(256, vocabulary),
    )
    return dict(zip(NAMES, encoders, strict=True))


def load_encoders(folder: Path) -> list[Encoder]:
    """Load the three encoders of a folder in full precision."""
    classes = ((CLIPTokenizer, CLIPTextModelWithProjection),) * 2 + ((T5TokenizerFast, T5EncoderModel),)
    return [
        Encoder(
            tokenizer.from_pretrained(folder / name.replace("text_encoder", "tokenizer")),
            model.from_pretrained(folder / name, dtype=torch.float32).eval(),
        )
        for name, (tokenizer, model) in zip(NAMES, classes, strict=True)
    ]
