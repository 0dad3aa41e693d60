"""Tiny denoisers and whole pipelines of all families, with random weights in the real classes: one row per family."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler as Euler
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import nn

from sd3_light.assets import DEMO

TinyFolder = Callable[[str], Path]
"""Writes a family's pipeline once and returns its folder: the fixture `tiny_folder`."""

_FLUX: tuple[str, dict[str, Any]] = (
    "FluxTransformer2DModel",
    {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "guidance_embeds": True}
    | {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
)
_QWEN: tuple[str, dict[str, Any]] = (
    "QwenImageTransformer2DModel",
    {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    | {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
)
DENOISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": _FLUX,
    "flux_kontext": _FLUX,
    "qwen_image": _QWEN,
    "qwen_image_edit": _QWEN,
    "qwen_image_edit_plus": _QWEN,
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
    "flux2": (
        "Flux2Transformer2DModel",
        {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "guidance_embeds": False}
        | {"num_attention_heads": 2, "joint_attention_dim": 48, "axes_dims_rope": (4, 4, 4, 4)}
        | {"timestep_guidance_channels": 32},
    ),
    "krea2": (
        "Krea2Transformer2DModel",
        {"in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
        | {"intermediate_size": 48, "num_key_value_heads": 1, "timestep_embed_dim": 32, "text_hidden_dim": 32}
        | {"num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 2}
        | {"text_intermediate_size": 48, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
        | {"axes_dims_rope": (4, 4, 8)},
    ),
    "prx": (
        "PRXTransformer2DModel",
        {"in_channels": 4, "patch_size": 2, "context_in_dim": 32, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2}
        | {"depth": 2, "axes_dim": [8, 8]},
    ),
}
_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 2048}
_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
_SEEN = ("vision_start", "image_pad", "vision_end", "video_pad")
_ROPE = {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 1e4}
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def make_denoiser(family: str, **more: Any) -> nn.Module:
    """Return the family's transformer with random weights; ``more`` are other entries of its config."""
    name, config = DENOISERS[family]
    denoiser: nn.Module = getattr(diffusers, name)(**config | more)
    return denoiser


# --- VAEs ----------------------------------------------------------------------------------------

_STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [1.5, 0.5, 2.0, 0.8]}
_LEVELS = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "latent_channels": 4}


def _kl_vae() -> Any:
    """Normalised by shift and scale."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    scale = {"scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False}
    return diffusers.AutoencoderKL(**blocks, **_LEVELS, **scale)


def _flux2_vae() -> Any:
    """Normalised by statistics in its weights."""
    vae = diffusers.AutoencoderKLFlux2(**_LEVELS, layers_per_block=1)
    vae.bn.running_mean.normal_(0, 0.3)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def _qwen_vae() -> Any:
    """Normalised by mean and deviation; images are videos of one frame."""
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return diffusers.AutoencoderKLQwenImage(**sizes, **_STATISTICS)


def _wan_vae() -> Any:
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return diffusers.AutoencoderKLWan(**sizes, **_STATISTICS, temperal_downsample=[False, True, True])


def deep_compression_vae(levels: int = 4) -> Any:
    """Without a distribution; each level after the first halves the sides."""
    blocks = ("ResBlock",) * (levels - 1) + ("EfficientViTBlock",)
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_block_types": blocks, f"{side}_block_out_channels": (8,) * levels}
        sides |= {f"{side}_layers_per_block": (1,) * levels, f"{side}_qkv_multiscales": ((),) * levels}
    return diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=4, scaling_factor=0.41407, **sides)


# --- text encoders and tokenizers ----------------------------------------------------------------


def _qwen_tokenizer() -> Any:
    vocab = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    special = {name: len(vocab) + at for at, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    tokenizer = transformers.Qwen2Tokenizer(vocab | special, [], extra_special_tokens=list(special))
    tokenizer.chat_template = CHAT
    return tokenizer


def _gemma_tokenizer(**settings: Any) -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = [chr(code) for code in range(33, 127)]
    vocab = {name: at for at, name in enumerate([*special, "▁", *letters])}
    tokenizer = transformers.GemmaTokenizer(vocab, [], **settings)
    bos = TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])])
    tokenizer._tokenizer.post_processor = bos  # as the published ones: the empty text has one token
    return tokenizer


def _t5_tokenizer() -> Any:
    return transformers.T5TokenizerFast.from_pretrained(DEMO / "tokenizer_3")


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
        "tokenizer_2": _t5_tokenizer(),
    }


def _flux2_parts() -> dict[str, Any]:
    """The pipeline reads the hidden states 9, 18 and 27."""
    config = transformers.Qwen3Config(**_TEXT | {"hidden_size": 16, "num_hidden_layers": 28})
    return {"text_encoder": transformers.Qwen3ForCausalLM(config), "tokenizer": _qwen_tokenizer()}


def _qwen_parts() -> dict[str, Any]:
    config = transformers.Qwen2_5_VLConfig(text_config={**_TEXT, "rope_parameters": _ROPE}, vision_config=_VISION)
    return {"text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config), "tokenizer": _qwen_tokenizer()}


def _edit_parts() -> dict[str, Any]:
    """With the tokens of images, and a processor of them."""
    tokenizer = _qwen_tokenizer()
    tokenizer.add_tokens([f"<|{name}|>" for name in _SEEN], special_tokens=True)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _SEEN}
    ids |= {"image_token_id": ids["image_pad_token_id"], "video_token_id": ids["video_pad_token_id"]}
    text = {**_TEXT, "rope_parameters": _ROPE, "max_position_embeddings": 4096}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=_VISION, **ids)
    with_processor()
    kinds = {"image_processor": transformers.Qwen2VLImageProcessor, "tokenizer": lambda: tokenizer}
    if find_spec("torchvision"):
        kinds["video_processor"] = transformers.Qwen2VLVideoProcessor
    return {
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
        "tokenizer": tokenizer,
        "processor": transformers.Qwen2VLProcessor(**{name: make() for name, make in kinds.items()}),
    }


def with_processor() -> None:
    """Let transformers make and load a Qwen2VLProcessor without torchvision, which only its videos need."""
    if find_spec("torchvision") is None:
        names = ["image_processor", "tokenizer"]
        transformers.Qwen2VLProcessor.get_attributes = classmethod(lambda kind: names)


def _z_image_parts() -> dict[str, Any]:
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**_TEXT))
    return {"text_encoder": encoder, "tokenizer": _qwen_tokenizer()}


def _sana_parts() -> dict[str, Any]:
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**_TEXT))
    return {"text_encoder": encoder, "tokenizer": _gemma_tokenizer()}


def _wan_parts() -> dict[str, Any]:
    tokenizer = _t5_tokenizer()
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": len(tokenizer)}
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes, is_encoder_decoder=False))
    return {"text_encoder": encoder, "tokenizer": tokenizer}


def _krea2_parts() -> dict[str, Any]:
    text = {**_TEXT, "num_hidden_layers": 4, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    return {"text_encoder": transformers.Qwen3VLModel(config), "tokenizer": _qwen_tokenizer()}


def _prx_parts() -> dict[str, Any]:
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    module = T5GemmaModuleConfig(**_TEXT | {"query_pre_attn_scalar": 16})
    config = transformers.T5GemmaConfig(encoder=module, decoder=module, vocab_size=_TEXT["vocab_size"])
    encoder = T5GemmaEncoder(config.encoder)  # the composite config also sets dropout_rate
    return {"text_encoder": encoder, "tokenizer": _gemma_tokenizer(model_max_length=32)}


# --- whole pipelines -----------------------------------------------------------------------------


class TinyPipeline(NamedTuple):
    """A family's pipeline: its class, what makes its text encoders, VAE and scheduler, and its own settings."""

    kind: str
    parts: Callable[[], dict[str, Any]]
    vae: Callable[[], Any]
    scheduler: Callable[[], Any]
    settings: Mapping[str, Any] = MappingProxyType({})


def _multistep(kind: Any) -> Callable[[], Any]:
    flow = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction", "solver_order": 2}
    return lambda: kind(**flow)


def _euler(**settings: Any) -> Callable[[], Any]:
    return lambda: Euler(**settings)


_FLUX_TIMES = _euler(shift=3.0, use_dynamic_shifting=True)
_QWEN_LINE = {"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02, "shift": 1.0}
_QWEN_TIMES = _euler(use_dynamic_shifting=True, **_QWEN_LINE)
_KREA_TIMES = _euler(use_dynamic_shifting=True, max_image_seq_len=6400)
_SANA_TIMES = _multistep(diffusers.DPMSolverMultistepScheduler)
_WAN_TIMES = _multistep(diffusers.UniPCMultistepScheduler)
_KREA_LAYERS = {"text_encoder_select_layers": (1, 2, 4)}
PIPELINES = {  # with the published settings of schedulers
    "flux": TinyPipeline("FluxPipeline", _flux_parts, _kl_vae, _FLUX_TIMES),
    "flux_kontext": TinyPipeline("FluxKontextPipeline", _flux_parts, _kl_vae, _FLUX_TIMES),
    "flux2": TinyPipeline("Flux2KleinPipeline", _flux2_parts, _flux2_vae, _FLUX_TIMES),
    "qwen_image": TinyPipeline("QwenImagePipeline", _qwen_parts, _qwen_vae, _QWEN_TIMES),
    "qwen_image_edit": TinyPipeline("QwenImageEditPipeline", _edit_parts, _qwen_vae, _QWEN_TIMES),
    "qwen_image_edit_plus": TinyPipeline("QwenImageEditPlusPipeline", _edit_parts, _qwen_vae, _QWEN_TIMES),
    "z_image": TinyPipeline("ZImagePipeline", _z_image_parts, _kl_vae, _euler(shift=3.0)),
    "sana": TinyPipeline("SanaPipeline", _sana_parts, deep_compression_vae, _SANA_TIMES),
    "wan": TinyPipeline("WanPipeline", _wan_parts, _wan_vae, _WAN_TIMES),
    "krea2": TinyPipeline("Krea2Pipeline", _krea2_parts, _qwen_vae, _KREA_TIMES, _KREA_LAYERS),
    "prx": TinyPipeline("PRXPipeline", _prx_parts, _kl_vae, _euler(shift=3.0)),
}


def make_vae(family: str) -> Any:
    return PIPELINES[family].vae()


def make_pipeline(family: str, scheduler: Any = None, **config: Any) -> Any:
    """Return a whole pipeline with random weights; ``config`` are other entries of its denoiser's config."""
    torch.manual_seed(0)
    tiny = PIPELINES[family]
    kind: Any = getattr(diffusers, tiny.kind)
    parts = {"transformer": make_denoiser(family, **config), "vae": tiny.vae(), **tiny.parts()}
    return kind(scheduler=scheduler or tiny.scheduler(), **parts, **tiny.settings)


def save_pipeline(family: str, folder: Path) -> Path:
    """Write a whole pipeline with random weights; its scheduler takes the times that a test gives."""
    make_pipeline(family, Euler()).save_pretrained(folder)
    return folder
