"""The three text encoders: as diffusers' stock SD3 pipeline calls them (padded), or on real tokens alone.

CLIP tokens are joined on width and zero-padded to T5's width, T5's tokens follow on length, pooled vectors are joined.
Shapes: B captions, L tokens, W width, H heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

TextFeatures = dict[str, Tensor]
Texts = Mapping[str, Sequence[Tensor]]
"""Of each part a tensor a sample: ENCODER its own tokens [L, W], ENCODER.pooled a vector [W]."""
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and type -> a tensor that is to be filled."""

# name -> (model folder, tokenizer folder) of a diffusers SD3 folder
TEXT_ENCODERS = {
    "clip_l": ("text_encoder", "tokenizer"),
    "clip_g": ("text_encoder_2", "tokenizer_2"),
    "t5": ("text_encoder_3", "tokenizer_3"),
}


@dataclass(frozen=True)
class Tokenizer:
    """Texts in, token ids out, cut to ``max_length`` with their end mark kept."""

    tokenizer: Any
    max_length: int

    def __call__(self, texts: Sequence[str], padded: bool) -> list[list[int]]:
        """The ids of each text: its own, or padded to ``max_length``."""
        padding = "max_length" if padded else False
        found = self.tokenizer(
            list(texts), padding=padding, max_length=self.max_length, truncation=True, return_attention_mask=False
        )
        ids: list[list[int]] = found["input_ids"]
        return ids

    @property
    def pad_id(self) -> int:
        """The id that fills places without a token."""
        return int(self.tokenizer.pad_token_id)


def load_tokenizer(name: str, diffusers_path: Path, t5_max_length: int) -> Tokenizer:
    """Load the tokenizer of a text encoder. Both CLIPs have the first tokenizer's length, as in the stock pipeline."""
    folder = diffusers_path / TEXT_ENCODERS[name][1]
    if name == "t5":
        return Tokenizer(T5TokenizerFast.from_pretrained(folder, local_files_only=True), t5_max_length)
    first = CLIPTokenizer.from_pretrained(diffusers_path / TEXT_ENCODERS["clip_l"][1], local_files_only=True)
    return Tokenizer(CLIPTokenizer.from_pretrained(folder, local_files_only=True), int(first.model_max_length))


def load_text_model(name: str, diffusers_path: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model of one of `TEXT_ENCODERS`, frozen, with fused attention."""
    model_class = T5EncoderModel if name == "t5" else CLIPTextModelWithProjection
    load: Callable[..., nn.Module] = model_class.from_pretrained
    model = load(
        diffusers_path / TEXT_ENCODERS[name][0], dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.to(device).eval().requires_grad_(False)


def encode_clip(model: nn.Module, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [B, L, W] of the last layer but one, and the pooled [B, W] of the first end mark.

    CLIP looks back only, so what stands behind the end mark changes nothing before it.
    """
    output = model(ids_BL, output_hidden_states=True)
    return output.hidden_states[-2], output.text_embeds


def encode_t5(model: nn.Module, ids_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    """tokens [B, L, W]. With ``lengths_B`` a caption's tokens attend to its own first tokens only, else to all.

    This is `T5EncoderModel.forward` with position bias and mask joined once, not in every layer, and laid out as the
    fused kernels take it; its masks are also made without asking the device for a value, which would make it wait.
    """
    stack: Any = model.encoder
    attention = stack.block[0].layer[0].SelfAttention
    length = ids_BL.shape[1]
    bias_BHLL = attention.compute_bias(length, length).contiguous()  # B is 1 until captions differ in length
    if lengths_B is not None:
        is_real_BL = torch.arange(length, device=ids_BL.device) < lengths_B[:, None]
        bias_BHLL = torch.where(is_real_BL[:, None, None], bias_BHLL, torch.finfo(bias_BHLL.dtype).min)
    hidden_BLW = stack.embed_tokens(ids_BL)
    for block in stack.block:
        hidden_BLW = block(hidden_BLW, attention_mask=None, position_bias=bias_BHLL)[0]
    tokens: Tensor = stack.final_layer_norm(hidden_BLW)
    return tokens


def unpad_text(features: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Batched features as texts, nothing copied; where ``ENCODER.length`` says how many rows are a sample's own, the
    others are left out."""
    texts: dict[str, list[Tensor]] = {}
    for name, values in features.items():
        if name.endswith(".length"):
            continue
        lengths = features.get(f"{name}.length")
        rows = list(values.unbind(0))
        texts[name] = rows if lengths is None else [row[:own] for row, own in zip(rows, lengths.tolist(), strict=True)]
    return texts


def join_text(texts: Texts, empty: Allocate | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(prompt_embeds [B, T, W], pooled_prompt_embeds [B, P], lengths [B]) as SD3 takes them.

    A sample's T5 tokens stand directly behind its CLIP tokens, zeros fill what is left, and T is the longest sample's
    length. The prompt lies in what ``empty`` gives: it is large, and fresh memory is slow.
    """
    clip_l, clip_g, t5 = (texts[name] for name in TEXT_ENCODERS)
    num_clip = [max(len(left), len(right)) for left, right in zip(clip_l, clip_g, strict=True)]
    lengths = [clip + len(tokens) for clip, tokens in zip(num_clip, t5, strict=True)]
    assert min(lengths) > 0, "a sample without any text token"
    shape = (len(t5), max(lengths), t5[0].shape[-1])
    prompt = t5[0].new_empty(shape) if empty is None else empty(shape, t5[0].dtype)
    middle, right = clip_l[0].shape[-1], clip_l[0].shape[-1] + clip_g[0].shape[-1]
    for row, left, central, tokens, clip, length in zip(
        prompt.unbind(0), clip_l, clip_g, t5, num_clip, lengths, strict=True
    ):
        top = row[:clip]
        _place(left, top[:, :middle])
        _place(central, top[:, middle:right])
        top[:, right:].zero_()
        row[clip:length].copy_(tokens)
        row[length:].zero_()
    pooled = [torch.stack(list(texts[f"{name}.pooled"])) for name in ("clip_l", "clip_g")]
    return prompt, torch.cat(pooled, dim=-1), torch.tensor(lengths, device=prompt.device)


def _place(tokens: Tensor, into: Tensor) -> None:
    """Tokens in the first rows, zeros behind them."""
    into[: len(tokens)].copy_(tokens)
    if len(tokens) < len(into):
        into[len(tokens) :].zero_()
