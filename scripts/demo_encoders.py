"""The demo's three text encoders with random weights, in the classes that SD3 uses."""

from pathlib import Path
from typing import Any

import torch
from demo_tokenizers import DEMO_VOCABULARY, Vocabulary, make_tokenizers
from torch import Tensor, nn
from transformers import (
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    T5TokenizerFast,
)

from sd3_light.parts.text_encoders import build_clip, build_t5

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


def build_encoders(seed: int, vocabulary: Vocabulary = DEMO_VOCABULARY) -> dict[str, Encoder]:
    """Return the three encoders by name, with random weights."""
    torch.manual_seed(seed)
    first, second, third = make_tokenizers(vocabulary).values()
    encoders = (
        Encoder(first, build_clip(first, 96, 3, 3, "quick_gelu")),
        Encoder(second, build_clip(second, 128, 3, 4, "gelu")),
        Encoder(third, build_t5(third, 256, 2, 4, 384)),
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
