"""Tiny denoisers of several families, in the real diffusers classes."""

from typing import Any

import diffusers
from torch import nn

DENOISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "guidance_embeds": True}
        | {
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "axes_dims_rope": (4, 4, 8),
        },
    ),
    "qwen": (
        "QwenImageTransformer2DModel",
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
        | {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
    ),
    "z-image": (
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        | {"cap_feat_dim": 32, "axes_dims": [4, 4, 8], "axes_lens": [128, 32, 32]},
    ),
    "sana": (
        "SanaTransformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32}
        | {"caption_channels": 32, "sample_size": 8},
    ),
    "wan": (
        "WanTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "in_channels": 4, "out_channels": 4}
        | {"text_dim": 32, "freq_dim": 32, "ffn_dim": 48, "rope_max_seq_len": 32},
    ),
}


def make_denoiser(family: str) -> nn.Module:
    """Return the family's transformer with random weights."""
    name, config = DENOISERS[family]
    denoiser: nn.Module = getattr(diffusers, name)(**config)
    return denoiser
