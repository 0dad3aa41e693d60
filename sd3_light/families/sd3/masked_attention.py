"""Joint attention that ignores padded text. diffusers' stock processor accepts a mask but does not apply it.

Shapes: B samples, H heads, N image tokens, T text tokens, K = N + T, E width of a head, D = H E.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor, nn


def real_text_mask(lengths_B: Tensor, num_text: int, num_image: int) -> Tensor:
    """Return the mask [B, 1, 1, N + T] of visible keys: image tokens and each sample's ``lengths_B`` text tokens."""
    position_K = torch.arange(num_image + num_text, device=lengths_B.device)
    return (position_K < num_image + lengths_B[:, None])[:, None, None]


class MaskedJointAttention:
    """The stock processor with a mask of visible keys; the outputs of masked text rows are meaningless."""

    def __init__(self) -> None:
        self.stock = JointAttnProcessor2_0()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (image_BND, text_BTD), or the image alone without text (SD3.5's second attention)."""
        if attention_mask is None or encoder_hidden_states is None:
            result: Tensor | tuple[Tensor, Tensor] = self.stock(attn, hidden_states, encoder_hidden_states)
            return result
        image = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text = _heads(attn, encoder_hidden_states, added, (attn.norm_added_q, attn.norm_added_k))
        query_BHKE, key_BHKE, value_BHKE = (torch.cat(pair, dim=2) for pair in zip(image, text, strict=True))
        joint_BHKE = nn.functional.scaled_dot_product_attention(
            query_BHKE, key_BHKE, value_BHKE, attn_mask=attention_mask
        )
        joint_BKD = joint_BHKE.transpose(1, 2).flatten(2).to(query_BHKE.dtype)
        image_BND, text_BTD = joint_BKD.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        image_BND = attn.to_out[1](attn.to_out[0](image_BND))
        return image_BND, text_BTD if attn.context_pre_only else attn.to_add_out(text_BTD)


def _heads(attn: Any, stream: Tensor, projections: tuple[Any, ...], norms: tuple[Any, ...]) -> list[Tensor]:
    """Return query, key and value of one stream, [B, H, tokens, E] each, with qk-norm if the model has it."""
    parts = [project(stream).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for project in projections]
    for index, norm in enumerate(norms):
        if norm is not None:
            parts[index] = norm(parts[index])
    return parts


def mask_attention(transformer: SD3Transformer2DModel) -> None:
    """Make every joint attention of a transformer apply masks; without a mask its results do not change."""
    # with a mask its backward pass gives NaN for some lengths (torch 2.11 to 2.13, pytorch issue 196678)
    torch.backends.cuda.enable_cudnn_sdp(False)
    transformer.set_attn_processor(MaskedJointAttention())


@contextmanager
def use_masked_attention(transformer: SD3Transformer2DModel) -> Iterator[None]:
    """Make the transformer apply masks (`real_text_mask`) inside the context; restore its processors afterwards."""
    previous = dict(transformer.attn_processors)
    mask_attention(transformer)
    try:
        yield
    finally:
        transformer.set_attn_processor(previous)
