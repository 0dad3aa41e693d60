"""Models of other families for `real_size.py`: real widths and VAEs, fewer blocks, random weights in bf16."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch

from tests.families import make_pipeline

_T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 2, "num_heads": 64}
_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 2}
_QWEN = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 2, "num_attention_heads": 28}
_QWEN |= {"num_key_value_heads": 4, "head_dim": 128}
_FLUX_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "latent_channels": 16,
}
_BLOCK = {"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56)}


@dataclass(frozen=True)
class RealFamily:
    """The entries of configs that give a family its published widths, by part."""

    denoiser: dict[str, Any]
    vae: dict[str, Any]
    encoders: dict[str, dict[str, Any]] = field(default_factory=dict)


FAMILIES = {
    "flux": RealFamily(
        {**_BLOCK, "in_channels": 64, "num_layers": 2, "num_single_layers": 4, "joint_attention_dim": 4096}
        | {"pooled_projection_dim": 768},
        _FLUX_VAE,
        {"text_encoder": _CLIP, "text_encoder_2": _T5},
    ),
    "qwen_image": RealFamily(
        {**_BLOCK, "in_channels": 64, "out_channels": 16, "num_layers": 3, "joint_attention_dim": 3584},
        {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
        {"text_encoder": {"text_config": _QWEN}},
    ),
    "wan": RealFamily(
        {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "in_channels": 16, "out_channels": 16}
        | {"text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "rope_max_seq_len": 1024},
        {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
        {"text_encoder": _T5},
    ),
}


def write_family(name: str, folder: Path, device: torch.device, toy: bool) -> int:
    """Write a whole model folder; return the denoiser's parameters."""
    pipe = make_pipeline(name)
    if not toy:
        _enlarge(pipe, FAMILIES[name], device)
    pipe.to(dtype=torch.bfloat16).save_pretrained(folder)
    return sum(parameter.numel() for parameter in pipe.transformer.parameters())


def _enlarge(pipe: Any, real: RealFamily, device: torch.device) -> None:
    """Replace the tiny parts of a pipeline by wide ones, made on the device."""
    statistics = {key: [0.0, 1.0][key.endswith("std")] for key in ("latents_mean", "latents_std")}
    with torch.device(device):
        denoiser = type(pipe.transformer)(**{**pipe.transformer.config, **real.denoiser})
        vae_config = {**pipe.vae.config, **real.vae}
        for key, value in statistics.items():
            if key in vae_config:
                vae_config[key] = [value] * 16
        vae = getattr(diffusers, type(pipe.vae).__name__)(**vae_config)
        parts = {"transformer": denoiser, "vae": vae}
        for name, entries in real.encoders.items():
            tiny = getattr(pipe, name)
            parts[name] = type(tiny)(_widened(tiny.config, entries))
    pipe.register_modules(**parts)


def _widened(config: Any, entries: dict[str, Any]) -> Any:
    """Return a config of transformers with other entries; those of an inner config are a dictionary."""
    table = config.to_dict()
    for key, value in entries.items():
        table[key] = {**table[key], **value} if isinstance(value, dict) else value
    inner = table.get("text_config")
    if inner is not None and "rope_parameters" in inner:
        inner["rope_parameters"] = {**inner["rope_parameters"], "mrope_section": [16, 24, 24]}
    return type(config).from_dict(table)
