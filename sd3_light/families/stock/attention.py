"""Attention of stock denoisers on a GPU: padding costs no time, and positions need no complex numbers.

With a mask PyTorch takes a kernel that is slower than flash attention, and complex numbers are not compiled. On a CPU
the stock processors run. Shapes: B samples, K tokens, H heads, E width of a head.
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

_HALF = (torch.bfloat16, torch.float16)


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
    """Attend from every row to the first ``lengths`` [B] rows of its sample, or to all: [B, K, H, E] -> [B, K, H E].

    Further rows are padding, whose results are meaningless.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    if lengths is not None and query.is_cuda and dtype in _HALF:
        return _attend_packed(query.to(dtype), key.to(dtype), value.to(dtype), lengths)
    mask = None
    if lengths is not None:
        mask = (torch.arange(query.shape[1], device=query.device) < lengths[:, None])[:, None, None]
    queries = query.transpose(1, 2)
    output = scaled_dot_product_attention(queries, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask)
    return output.transpose(1, 2).flatten(2)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    tokens = query.shape[1]
    bounds = _bounds(lengths, tokens)
    rows = [part.flatten(0, 1) for part in (query, key, value)]
    output: Any = varlen_attn(rows[0], rows[1], rows[2], bounds, bounds, tokens, tokens)
    attended: Tensor = output.unflatten(0, (-1, tokens)).flatten(2)
    return attended


def _bounds(lengths: Tensor, tokens: int) -> Tensor:
    """Return the bounds of sequences among B x K rows: each sample's own rows, then its padding, which is by itself."""
    first = tokens * torch.arange(len(lengths), device=lengths.device)
    pairs = torch.stack([first, first + lengths], dim=1).flatten()
    return torch.cat([pairs, pairs.new_full((1,), tokens * len(lengths))]).to(torch.int32)


def rotate(rows: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of numbers [B, K, H, E] by the complex ``angles`` [K, E / 2] or [B, K, E / 2]."""
    cosine, sine = torch.view_as_real(angles).unsqueeze(-3).unbind(-1)
    first, second = rows.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return turned.flatten(-2).type_as(rows)


def _heads(attn: Any, rows: Tensor, layers: tuple[Any, ...], norms: tuple[Any, ...], angles: Tensor) -> list[Tensor]:
    """Return query, key and value [B, K, H, E] of one stream, queries and keys normalised and turned."""
    parts = [layer(rows).unflatten(-1, (attn.heads, -1)) for layer in layers]
    for index, norm in enumerate(norms):
        parts[index] = rotate(parts[index] if norm is None else norm(parts[index]), angles)
    return parts


class QwenAttention(QwenDoubleStreamAttnProcessor2_0):
    """The processor of Qwen-Image; masked rows of text come last."""

    device = "cuda"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Return the rows of the image and of the text; both names are of a mask of the text [B, T]."""
        mask = encoder_hidden_states_mask if attention_mask is None else attention_mask
        if hidden_states.device.type != self.device:
            return super().__call__(attn, hidden_states, encoder_hidden_states, mask, None, image_rotary_emb)
        image_angles, text_angles = image_rotary_emb
        layers = (attn.to_q, attn.to_k, attn.to_v)
        image = _heads(attn, hidden_states, layers, (attn.norm_q, attn.norm_k), image_angles)
        layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        norms = (attn.norm_added_q, attn.norm_added_k)
        text = _heads(attn, encoder_hidden_states, layers, norms, text_angles)
        tokens = hidden_states.shape[1]
        lengths = None if mask is None else tokens + mask.sum(1)
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(image, text, strict=True))
        output = attend(query, key, value, lengths).to(query.dtype)
        of_image = output[:, :tokens].contiguous()
        for layer in attn.to_out:
            of_image = layer(of_image)
        return of_image, attn.to_add_out(output[:, tokens:].contiguous())


class ZImageAttention(ZSingleStreamAttnProcessor):
    """The processor of Z-Image; masked rows come last."""

    device = "cuda"

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Any = None,
    ) -> Any:
        """Return the rows."""
        if hidden_states.device.type != self.device:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis)
        layers = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = _heads(attn, hidden_states, layers, (attn.norm_q, attn.norm_k), freqs_cis)
        lengths = None if attention_mask is None else attention_mask.sum(1)
        output = attend(query, key, value, lengths).to(query.dtype)
        for layer in attn.to_out:
            output = layer(output)
        return output


class _ContiguousGradient(torch.autograd.Function):
    """The identity, whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def with_contiguous_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Return the output of a module whose gradient is contiguous; a forward hook.

    PyTorch keeps cuDNN's plan of a backward pass by the shapes and strides of queries, keys and values, but not by
    those of the gradient. Where blocks of one shape have gradients of two strides, the second one is read wrongly.
    """
    rows: Tensor = _ContiguousGradient.apply(output)  # type: ignore[no-untyped-call]
    return rows


def use_attention(denoiser: nn.Module, processor: Any) -> None:
    """Let all attention of a denoiser run through this processor."""
    for module in denoiser.modules():
        if isinstance(module, Attention):
            module.set_processor(processor)
