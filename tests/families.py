"""Tiny denoisers and whole pipelines of several families, with random weights in the real classes."""

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

from sd3_light.assets import DEMO

DENOISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "guidance_embeds": True}
        | {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
        | {"axes_dims_rope": (4, 4, 8)},
    ),
    "qwen": (
        "QwenImageTransformer2DModel",
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
        | {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
    ),
    "z_image": (
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        | {"cap_feat_dim": 32, "axes_dims": [4, 4, 8], "axes_lens": [256, 32, 32]},
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
_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 2048}
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def make_denoiser(family: str) -> nn.Module:
    """Return the family's transformer with random weights."""
    name, config = DENOISERS[family]
    denoiser: nn.Module = getattr(diffusers, name)(**config)
    return denoiser


def make_vae(family: str) -> Any:
    """Return the family's VAE: normalised by shift and scale, by mean and deviation, or without a distribution."""
    if family == "qwen":
        statistics = {"latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [1.5, 0.5, 2.0, 0.8]}
        sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        return diffusers.AutoencoderKLQwenImage(**sizes, **statistics)
    if family == "sana":
        blocks, widths = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"), (8, 8, 8, 8)
        sides = {f"{side}_block_types": blocks for side in ("encoder", "decoder")}
        sides |= {f"{side}_block_out_channels": widths for side in ("encoder", "decoder")}
        sides |= {f"{side}_layers_per_block": (1, 1, 1, 1) for side in ("encoder", "decoder")}
        sides |= {f"{side}_qkv_multiscales": ((), (), (), ()) for side in ("encoder", "decoder")}
        return diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=4, scaling_factor=0.41407, **sides)
    down, up = (("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4)
    sizes = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "latent_channels": 4}
    scale = {"scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False}
    return diffusers.AutoencoderKL(down_block_types=down, up_block_types=up, **sizes, **scale)


def _qwen_tokenizer() -> Any:
    vocab = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    special = {name: len(vocab) + at for at, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    tokenizer = transformers.Qwen2Tokenizer(vocab | special, [], extra_special_tokens=list(special))
    tokenizer.chat_template = CHAT
    return tokenizer


def _gemma_tokenizer() -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = [chr(code) for code in range(33, 127)]
    return transformers.GemmaTokenizer({name: at for at, name in enumerate([*special, "▁", *letters])}, [])


def _flux_parts() -> dict[str, Any]:
    clip = transformers.CLIPTextConfig.from_pretrained(DEMO / "text_encoder")
    t5 = transformers.T5Config.from_pretrained(DEMO / "text_encoder_3")
    clip.hidden_size = t5.d_model = 32
    clip.num_attention_heads, clip.intermediate_size, clip.num_hidden_layers = 2, 48, 1
    t5.d_kv, t5.d_ff, t5.num_layers, t5.num_heads = 16, 48, 1, 2
    return {
        "text_encoder": transformers.CLIPTextModel(clip),
        "tokenizer": transformers.CLIPTokenizer.from_pretrained(DEMO / "tokenizer"),
        "text_encoder_2": transformers.T5EncoderModel(t5),
        "tokenizer_2": transformers.T5TokenizerFast.from_pretrained(DEMO / "tokenizer_3"),
    }


def _qwen_parts() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 1e4}
    text = {**_TEXT, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return {"text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config), "tokenizer": _qwen_tokenizer()}


def _z_image_parts() -> dict[str, Any]:
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**_TEXT))
    return {"text_encoder": encoder, "tokenizer": _qwen_tokenizer()}


def _sana_parts() -> dict[str, Any]:
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**_TEXT))
    return {"text_encoder": encoder, "tokenizer": _gemma_tokenizer()}


PIPELINES = {
    "flux": (diffusers.FluxPipeline, _flux_parts),
    "qwen": (diffusers.QwenImagePipeline, _qwen_parts),
    "z_image": (diffusers.ZImagePipeline, _z_image_parts),
    "sana": (diffusers.SanaPipeline, _sana_parts),
}


def save_pipeline(family: str, folder: Path) -> Path:
    """Write a whole pipeline with random weights; its scheduler takes the times that a test gives."""
    torch.manual_seed(0)
    kind, parts = PIPELINES[family]
    make: Any = partial(kind, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    make(transformer=make_denoiser(family), vae=make_vae(family), **parts()).save_pretrained(folder)
    return folder
