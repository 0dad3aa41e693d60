"""The three text encoders, as diffusers' stock SD3 pipeline calls them, one at a time.

CLIP tokens are joined on width and zero-padded to T5's width, T5's tokens follow on length, pooled vectors are joined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

Features = dict[str, Tensor]

# name -> (model folder, tokenizer folder) of a diffusers SD3 folder
PARTS = {
    "clip_l": ("text_encoder", "tokenizer"),
    "clip_g": ("text_encoder_2", "tokenizer_2"),
    "t5": ("text_encoder_3", "tokenizer_3"),
}


@dataclass(frozen=True)
class TextEncoder:
    """One encoder with its tokenizer: texts in, padded features out."""

    name: str
    model: nn.Module
    tokenizer: Any
    max_length: int

    def __call__(self, texts: Sequence[str]) -> Features:
        """NAME -> tokens [B, L, W] and, for CLIP, NAME.pooled -> [B, W]; float32 on the CPU."""
        return _encode_t5(self, texts) if self.name == "t5" else _encode_clip(self, texts)

    def _ids(self, texts: Sequence[str]) -> Tensor:
        batch = self.tokenizer(
            list(texts), padding="max_length", max_length=self.max_length, truncation=True, return_tensors="pt"
        )
        ids: Tensor = batch.input_ids
        return ids.to(next(self.model.parameters()).device)


@torch.no_grad()
def _encode_clip(encoder: TextEncoder, texts: Sequence[str]) -> Features:
    output = encoder.model(encoder._ids(texts), output_hidden_states=True)
    tokens, pooled = output.hidden_states[-2], output.text_embeds
    return {encoder.name: tokens.float().cpu(), f"{encoder.name}.pooled": pooled.float().cpu()}


@torch.no_grad()
def _encode_t5(encoder: TextEncoder, texts: Sequence[str]) -> Features:
    return {encoder.name: encoder.model(encoder._ids(texts))[0].float().cpu()}


def load_text_encoder(
    name: str, diffusers_path: Path, t5_max_length: int, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """One of `PARTS` from a diffusers folder, frozen. Both CLIPs are padded to the first tokenizer's length."""
    model_folder, tokenizer_folder = PARTS[name]
    model_class, tokenizer_class = (
        (T5EncoderModel, T5TokenizerFast) if name == "t5" else (CLIPTextModelWithProjection, CLIPTokenizer)
    )
    load: Callable[..., Any] = model_class.from_pretrained
    model = load(diffusers_path / model_folder, dtype=dtype, local_files_only=True)
    tokenizer = tokenizer_class.from_pretrained(diffusers_path / tokenizer_folder, local_files_only=True)
    length = t5_max_length
    if name != "t5":
        first = CLIPTokenizer.from_pretrained(diffusers_path / PARTS["clip_l"][1], local_files_only=True)
        length = int(first.model_max_length)
    return TextEncoder(name, model.to(device).eval().requires_grad_(False), tokenizer, length)


def join_text(features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Batched features -> (prompt_embeds [B, T, W], pooled_prompt_embeds [B, P]) as SD3 takes them."""
    clip = torch.cat([features["clip_l"], features["clip_g"]], dim=-1)
    t5 = features["t5"]
    clip = nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
    pooled = torch.cat([features["clip_l.pooled"], features["clip_g.pooled"]], dim=-1)
    return torch.cat([clip, t5], dim=-2), pooled
