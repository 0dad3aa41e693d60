"""The three text encoders, called as in diffusers' stock SD3 pipeline (padded) or on real tokens only.

CLIP tokens are concatenated on width and zero-padded to T5's width, T5 tokens follow on length, and pooled vectors are
concatenated. Shapes: B captions, L tokens, W width, H heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast
from transformers.activations import NewGELUActivation

from sd3_light.model.part_configs import check_files, load_part

Texts = Mapping[str, Sequence[Tensor]]
"""One tensor per sample: ENCODER -> its tokens [L, W] without padding, ENCODER.pooled -> a vector [W]."""

# name -> (model folder, tokenizer folder) of a diffusers SD3 folder
TEXT_ENCODERS = {
    "clip_l": ("text_encoder", "tokenizer"),
    "clip_g": ("text_encoder_2", "tokenizer_2"),
    "t5": ("text_encoder_3", "tokenizer_3"),
}


@dataclass(frozen=True)
class Tokenizer:
    """Converts texts to token ids, truncated to ``max_length`` including the end token."""

    tokenizer: Any
    max_length: int

    def __call__(self, texts: Sequence[str], padded: bool) -> list[list[int]]:
        """Return the ids of each text, optionally padded to ``max_length``."""
        padding = "max_length" if padded else False
        encoding = self.tokenizer(
            list(texts), padding=padding, max_length=self.max_length, truncation=True, return_attention_mask=False
        )
        ids: list[list[int]] = encoding["input_ids"]
        return ids

    @property
    def pad_id(self) -> int:
        """The id of the padding token."""
        return int(self.tokenizer.pad_token_id)


def load_tokenizer(name: str, diffusers_path: Path, t5_max_length: int) -> Tokenizer:
    """Load a text encoder's tokenizer. Both CLIPs use the first one's length, as in the stock pipeline."""
    folder, first = (diffusers_path / TEXT_ENCODERS[each][1] for each in (name, "clip_l"))
    check_files(folder, first)
    if name == "t5":
        return Tokenizer(T5TokenizerFast.from_pretrained(folder, local_files_only=True), t5_max_length)
    length = int(CLIPTokenizer.from_pretrained(first, local_files_only=True).model_max_length)
    return Tokenizer(CLIPTokenizer.from_pretrained(folder, local_files_only=True), length)


def load_text_model(name: str, diffusers_path: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load a text encoder, frozen, with fused attention, and in half precision with fused activations."""
    model_class = T5EncoderModel if name == "t5" else CLIPTextModelWithProjection
    folder = diffusers_path / TEXT_ENCODERS[name][0]
    model: nn.Module = load_part(model_class, folder, dtype=dtype, attn_implementation="sdpa")
    if dtype != torch.float32:
        fuse_activations(model)
    return model.to(device).eval().requires_grad_(False)


def fuse_activations(model: nn.Module) -> None:
    """Compute T5's GELU in one kernel that rounds once instead of eight that round each."""
    for module in model.modules():
        if isinstance(getattr(module, "act", None), NewGELUActivation):
            module.act = nn.GELU(approximate="tanh")


def encode_clip(model: nn.Module, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the second-to-last layer's tokens [B, L, W] and the pooled vector [B, W] at the first end token."""
    # attention is causal, so padding after the end token does not change the tokens before it
    output = model(ids_BL, output_hidden_states=True)
    return output.hidden_states[-2], output.text_embeds


def encode_t5(model: nn.Module, ids_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    """Return the tokens [B, L, W]. With ``lengths_B`` only the first ``lengths_B`` tokens of a caption are attended to.

    This is `T5EncoderModel.forward` with position bias and mask combined once instead of in every layer, in the layout
    of the fused kernels, and without a device synchronization.
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
    """Return views of batched features, one per sample, without the padding rows beyond ``ENCODER.length``."""
    texts: dict[str, list[Tensor]] = {}
    for name, values in features.items():
        if name.endswith(".length"):
            continue
        lengths = features.get(f"{name}.length")
        rows = list(values.unbind(0))
        texts[name] = (
            rows if lengths is None else [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
        )
    return texts


def join_text(
    texts: Texts, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return SD3's (prompt_embeds [B, T, W], pooled_prompt_embeds [B, P], lengths [B]).

    A sample's T5 tokens directly follow its CLIP tokens, then zeros up to T, the longest sample's length. ``allocate``
    can provide reused memory for the prompt, which is large and slow to allocate.
    """
    clip_l, clip_g, t5 = (texts[name] for name in TEXT_ENCODERS)
    num_clip = [max(len(left), len(right)) for left, right in zip(clip_l, clip_g, strict=True)]
    lengths = [clip + len(tokens) for clip, tokens in zip(num_clip, t5, strict=True)]
    assert min(lengths) > 0, "every sample needs at least one text token"
    shape = (len(t5), max(lengths), t5[0].shape[-1])
    prompt = t5[0].new_empty(shape) if allocate is None else allocate(shape, t5[0].dtype)
    left_end = clip_l[0].shape[-1]
    right_end = clip_l[0].shape[-1] + clip_g[0].shape[-1]
    for row, left, right, tokens, clip, length in zip(
        prompt.unbind(0), clip_l, clip_g, t5, num_clip, lengths, strict=True
    ):
        top = row[:clip]
        _copy_padded(left, top[:, :left_end])
        _copy_padded(right, top[:, left_end:right_end])
        top[:, right_end:].zero_()
        row[clip:length].copy_(tokens)
        row[length:].zero_()
    pooled = [torch.stack(list(texts[f"{name}.pooled"])) for name in ("clip_l", "clip_g")]
    return prompt, torch.cat(pooled, dim=-1), torch.tensor(lengths, device=prompt.device)


def _copy_padded(tokens: Tensor, target: Tensor) -> None:
    """Copy the tokens to the first rows and zero the others."""
    target[: len(tokens)].copy_(tokens)
    if len(tokens) < len(target):
        target[len(tokens) :].zero_()
