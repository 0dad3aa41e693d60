"""Models of published shapes and caches of random numbers: every part has its real width, weights are in bf16.

A part is built without memory. Its weights are made on the GPU and written shard by shard, so that a denoiser of 20 B
parameters needs one shard of host memory, and the time that the disk takes. A cache has SD3's columns.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from common.basics import ROOT
from sd3_light.config import ModelSize
from sd3_light.core import registry
from sd3_light.core.columns import CAPTION, Column
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.model.loading import empty_model
from sd3_light.parts.text_encoders import build_clip, build_t5, num_heads
from sd3_light.parts.tokenizers import learn_tokenizers, save_tokenizers

SHARD_BYTES = 1_000_000_000
_DEPTHS = ("num_layers", "num_single_layers", "n_layers")
_CLIP_TOKENS = 77
_T5_TOKENS = 512

Entries = dict[str, Any]
"""Entries of a config that differ from those of the tiny model; inner tables are merged."""

_T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 2, "num_heads": 64}
_T5_DEEP = {"num_layers": 24, "vocab_size": 32128}
_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 2}
_CLIP |= {"max_position_embeddings": _CLIP_TOKENS}
_QWEN3 = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 2, "num_attention_heads": 32}
_QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128}
_QWEN3_DEEP = {"num_hidden_layers": 36, "vocab_size": 151936}
_QWEN_VL = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 2, "num_attention_heads": 28}
_QWEN_VL |= {"num_key_value_heads": 4, "head_dim": 128}
_GEMMA = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 2, "num_attention_heads": 8}
_GEMMA |= {"num_key_value_heads": 4, "head_dim": 256}
_LEVELS = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32}
_VIDEO_VAE = {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
_DC_BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
_DC_SCALES = ((), (), (), (5,), (5,), (5,))
_DC_VAE = {"latent_channels": 32, "attention_head_dim": 32, "upsample_block_type": "interpolate"}
_DC_VAE |= {"downsample_block_type": "conv", "encoder_layers_per_block": (2, 2, 2, 3, 3, 3)}
_DC_VAE |= {"decoder_layers_per_block": (3,) * 6}
for _side in ("encoder", "decoder"):
    _DC_VAE |= {f"{_side}_block_types": _DC_BLOCKS, f"{_side}_qkv_multiscales": _DC_SCALES}
    _DC_VAE |= {f"{_side}_block_out_channels": (128, 256, 512, 512, 1024, 1024)}
_FLUX = {"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56), "in_channels": 64}


@dataclass(frozen=True)
class Family:
    """The published shape of a stock family: entries of configs by part. ``deep``: those of encoders of real depth.

    ``tokens`` are the lengths of tokenizers by part, where those of the tiny pipeline are smaller.
    """

    name: str
    denoiser: Entries
    vae: Entries
    encoders: dict[str, Entries]
    deep: dict[str, Entries] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SD3Shape:
    """The published shape of an SD3 or SD3.5. A toy has other widths."""

    layers: int
    heads: int
    dual: int
    positions: int
    clip_l: int = 768
    clip_g: int = 1280
    t5: int = 4096
    t5_inner: int = 10240
    vae: tuple[int, ...] = (128, 256, 512, 512)
    side: int = 1024
    norm: str | None = "rms_norm"


SD3 = {
    "sd3": SD3Shape(24, 24, 13, 384),
    "sd3_large": SD3Shape(38, 38, 0, 192),
    "sd3_medium": SD3Shape(24, 24, 0, 192, norm=None),  # of 2024, before SD3.5
}
TOY_SD3 = SD3Shape(3, 2, 1, 24, 64, 64, 128, 256, (8, 8, 8, 8), 128)
STOCK = {
    family.name: family
    for family in (
        Family(
            "flux",
            {**_FLUX, "num_layers": 19, "num_single_layers": 38, "joint_attention_dim": 4096}
            | {"pooled_projection_dim": 768},
            {**_LEVELS, "latent_channels": 16},
            {"text_encoder": _CLIP, "text_encoder_2": _T5},
            {"text_encoder": {"num_hidden_layers": 12, "vocab_size": 49408}, "text_encoder_2": _T5_DEEP},
            {"tokenizer": _CLIP_TOKENS, "tokenizer_2": _T5_TOKENS},
        ),
        Family(
            "flux2",
            {"attention_head_dim": 128, "num_attention_heads": 24, "num_layers": 5, "num_single_layers": 20}
            | {"in_channels": 128, "joint_attention_dim": 7680, "axes_dims_rope": (32, 32, 32, 32)}
            | {"timestep_guidance_channels": 256},
            {**_LEVELS, "latent_channels": 32},
            {"text_encoder": {**_QWEN3, "num_hidden_layers": 28}},  # the pipeline reads the hidden states of layer 27
            {"text_encoder": _QWEN3_DEEP},
        ),
        Family(
            "qwen_image",
            {**_FLUX, "out_channels": 16, "num_layers": 60, "joint_attention_dim": 3584},
            _VIDEO_VAE,
            {"text_encoder": {"text_config": _QWEN_VL}},
            {"text_encoder": {"text_config": {"num_hidden_layers": 28, "vocab_size": 152064}}},
        ),
        Family(
            "z_image",
            {"in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30}
            | {"cap_feat_dim": 2560, "axes_dims": [32, 48, 48], "axes_lens": [1024, 512, 512]},
            {**_LEVELS, "latent_channels": 16},
            {"text_encoder": _QWEN3},
            {"text_encoder": _QWEN3_DEEP},
        ),
        Family(
            "sana",
            {"in_channels": 32, "out_channels": 32, "num_attention_heads": 70, "attention_head_dim": 32}
            | {"num_layers": 20, "num_cross_attention_heads": 20, "cross_attention_head_dim": 112}
            | {"cross_attention_dim": 2240, "caption_channels": 2304, "sample_size": 32},
            _DC_VAE,
            {"text_encoder": _GEMMA},
            {"text_encoder": {"num_hidden_layers": 26, "vocab_size": 256000}},
        ),
        Family(
            "wan",
            {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "in_channels": 16}
            | {"out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "rope_max_seq_len": 1024},
            _VIDEO_VAE,
            {"text_encoder": _T5},
            {"text_encoder": {"num_layers": 24, "vocab_size": 256384}},
            {"tokenizer": _T5_TOKENS},
        ),
    )
}
FAMILIES = (*SD3, *STOCK)


@dataclass(frozen=True)
class Model:
    """What is written: a family with all, a third or some of its blocks, and encoders of real width or depth."""

    family: str
    depth: str = "full"
    encoders: str = "wide"
    toy: bool = False

    @property
    def blocks(self) -> Callable[[int], int]:
        """Return the number of blocks for the published one."""
        if self.depth == "third":
            return lambda count: max(1, round(count / 3))
        return (lambda count: count) if self.depth == "full" else (lambda count: int(self.depth))


def write_model(model: Model, folder: Path, captions: list[str], device: torch.device) -> int:
    """Write a complete model folder; return the denoiser's parameters. Tokenizers of SD3 learn the captions."""
    if model.family in SD3:
        return _write_sd3(model, folder, captions, device)
    return _write_stock(model, folder, device)


def denoiser_parameters(model: Model) -> int:
    """Return the parameters of a model's denoiser, without writing anything."""
    return sum(parameter.numel() for parameter in _denoiser(model).parameters())


def write_configs(model: Model, folder: Path) -> Entries:
    """Write the config of a denoiser, and the index of a model that has no other parts; return the config."""
    denoiser = _denoiser(model)
    denoiser.save_config(folder / "transformer")
    family = "sd3" if model.family in SD3 else model.family
    index = {"_class_name": registry.family_named(family).pipeline}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return _public(denoiser.config)


def _denoiser(model: Model) -> Any:
    return _sd3_denoiser(model) if model.family in SD3 else _stock_denoiser(model, _tiny(model.family))


# --- SD3 ----------------------------------------------------------------------------------------


def _sd3_shape(model: Model) -> SD3Shape:
    return TOY_SD3 if model.toy else SD3[model.family]


def _sd3_denoiser(model: Model) -> Any:
    shape = _sd3_shape(model)
    config = {
        "sample_size": shape.side // 8, "patch_size": 2, "in_channels": 16, "out_channels": 16,
        "num_layers": model.blocks(shape.layers), "attention_head_dim": 64, "num_attention_heads": shape.heads,
        "joint_attention_dim": shape.t5, "caption_projection_dim": 64 * shape.heads,
        "pooled_projection_dim": shape.clip_l + shape.clip_g, "pos_embed_max_size": shape.positions,
        "dual_attention_layers": tuple(range(model.blocks(shape.dual) if shape.dual else 0)), "qk_norm": shape.norm,
    }  # fmt: skip
    return empty_model(diffusers.SD3Transformer2DModel, config)


def _write_sd3(model: Model, folder: Path, captions: list[str], device: torch.device) -> int:
    shape = _sd3_shape(model)
    deep = model.encoders == "deep" and not model.toy
    tokenizers = learn_tokenizers(captions, 1000)
    for name, tokenizer in tokenizers.items():
        tokenizer.model_max_length = _T5_TOKENS if name == "tokenizer_3" else _CLIP_TOKENS
    save_tokenizers(tokenizers, folder)
    first, second, third = tokenizers.values()
    with torch.device("meta"):
        encoders = {
            "text_encoder": build_clip(first, shape.clip_l, 12 if deep else 2, num_heads(shape.clip_l), "quick_gelu"),
            "text_encoder_2": build_clip(second, shape.clip_g, 32 if deep else 2, num_heads(shape.clip_g), "gelu"),
            "text_encoder_3": build_t5(third, shape.t5, 24 if deep else 2, shape.t5 // 64, shape.t5_inner),
        }
    vae = {
        "in_channels": 3, "out_channels": 3, "latent_channels": 16, "layers_per_block": 2,
        "block_out_channels": shape.vae, "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "norm_num_groups": min(32, shape.vae[0]),
        "scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False, "use_post_quant_conv": False,
        "sample_size": shape.side,
    }  # fmt: skip
    denoiser = _sd3_denoiser(model)
    parts = {"transformer": denoiser, "vae": empty_model(diffusers.AutoencoderKL, vae), **encoders}
    for name, part in parts.items():
        write_part(part, folder / name, device)
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    index: Entries = {
        "_class_name": "StableDiffusion3Pipeline",
        **{name: ["transformers", type(part).__name__] for name, part in encoders.items()},
        "tokenizer": ["transformers", "CLIPTokenizerFast"],
        "tokenizer_2": ["transformers", "CLIPTokenizerFast"],
        "tokenizer_3": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return sum(parameter.numel() for parameter in denoiser.parameters())


# --- stock families -----------------------------------------------------------------------------


def _tiny(family: str) -> Any:
    """Return the tiny pipeline of the tests, which has the tokenizers, the scheduler and the other entries."""
    if str(ROOT) not in sys.path:  # a script has its own folder there
        sys.path.append(str(ROOT))
    from tests.families import make_pipeline

    return make_pipeline(family)


def _stock_denoiser(model: Model, tiny: Any) -> Any:
    entries = {} if model.toy else STOCK[model.family].denoiser
    config = {**_public(tiny.transformer.config), **entries}
    config |= {key: model.blocks(config[key]) for key in _DEPTHS if key in config}
    return empty_model(type(tiny.transformer), config)


def _public(config: Mapping[str, Any], *without: str) -> Entries:
    """Return the entries of a config of diffusers; a private one lists keys whose values would be ignored."""
    return {key: value for key, value in config.items() if not key.startswith("_") and key not in without}


def _write_stock(model: Model, folder: Path, device: torch.device) -> int:
    tiny = _tiny(model.family)
    real = STOCK[model.family]
    denoiser = _stock_denoiser(model, tiny)
    parts: dict[str, Any] = {"transformer": denoiser, "vae": tiny.vae}
    if not model.toy:
        # without statistics of four channels: the class has those of the published VAE
        parts["vae"] = empty_model(
            type(tiny.vae), {**_public(tiny.vae.config, "latents_mean", "latents_std"), **real.vae}
        )
    for name, entries in real.encoders.items():
        encoder = getattr(tiny, name)
        if not model.toy:
            deep = real.deep[name] if model.encoders == "deep" else {}
            with torch.device("meta"):
                encoder = type(encoder)(_config(encoder.config, merged(entries, deep)))
        parts[name] = encoder
    for name, tokens in ({} if model.toy else real.tokens).items():
        getattr(tiny, name).model_max_length = tokens
    tiny.save_pretrained(folder)  # tokenizers, scheduler and model_index.json; the other parts are replaced
    for name, part in parts.items():
        for file in (folder / name).iterdir():
            file.unlink()
        write_part(part, folder / name, device)
    return sum(parameter.numel() for parameter in denoiser.parameters())


def merged(table: Mapping[str, Any], more: Mapping[str, Any]) -> Entries:
    """Return a table with other entries; inner tables are merged."""
    result = dict(table)
    for key, value in more.items():
        result[key] = merged(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result


def _config(config: Any, entries: Entries) -> Any:
    """Return a config of transformers with other entries."""
    table = config.to_dict()
    for inner in (table, table.get("text_config") or {}):
        inner.pop("layer_types", None)  # one per layer of the tiny model
    table = merged(table, entries)
    inner = table.get("text_config")
    if inner is not None and "rope_parameters" in inner:
        inner["rope_parameters"] = {**inner["rope_parameters"], "mrope_section": [16, 24, 24]}
    return type(config).from_dict(table)


# --- weights ------------------------------------------------------------------------------------


def write_part(part: Any, folder: Path, device: torch.device) -> None:
    """Write a model of diffusers or transformers: its config, and weights in bf16, shard by shard.

    Weights without memory are made on the device; others keep their values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_stock = hasattr(part, "save_config")
    if is_stock:
        part.save_config(folder)
    else:
        part.config.dtype = torch.bfloat16
        part.config.architectures = [type(part).__name__]
        part.config.save_pretrained(folder)
    stem = "diffusion_pytorch_model" if is_stock else "model"
    torch.manual_seed(0)
    shards = list(_shards(part))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        name = f"{stem}{suffix}.safetensors"
        save_file({key: _value(key, tensor, device) for key, tensor in shard.items()}, folder / name, {"format": "pt"})
        places |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": 2 * sum(map(_count, shards))}, "weight_map": places}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _shards(part: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a part in groups that a file holds; of a tied weight, the first name."""
    shard: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in part.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if shard and 2 * (_count(shard) + tensor.numel()) > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _count(shard: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in shard.values())


@torch.no_grad()
def _value(name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """Return a weight on the host: matrices that keep the scale of their input, norms of one, biases of zero."""
    if not tensor.is_meta:
        value = tensor.detach()
        return (value.bfloat16() if value.is_floating_point() else value).contiguous()
    options: Any = {"dtype": torch.bfloat16, "device": device}
    if tensor.ndim >= 2 and not name.endswith("gamma"):
        fan_in = tensor.numel() // tensor.shape[0]
        return torch.randn(tensor.shape, **options).mul_(fan_in**-0.5).cpu()
    fill = 0.0 if name.endswith(("bias", "running_mean")) else 1.0
    return torch.full(tensor.shape, fill, **options).cpu()


# --- caches of random numbers ---------------------------------------------------------------------

IMAGES = "images"
LABEL = f"{IMAGES}#0"
ENCODERS = ("clip_l", "clip_g", "t5")


@dataclass(frozen=True)
class Shape:
    """Shape of the samples: side in pixels, then tokens and width of each encoder."""

    pixels: int
    clip_tokens: int
    t5_tokens: int
    clip_l: int
    clip_g: int
    t5: int

    @staticmethod
    def of(size: ModelSize, pixels: int | None = None, tokens: int = 16) -> "Shape":
        """Return the shape of SD3's encoders if the model size uses them, otherwise that of the demo, with ``tokens``
        of each."""
        if size.text_width == 4096:
            return Shape(pixels or 256, 77, 256, 768, 1280, 4096)
        return Shape(pixels or 64, tokens, tokens, 96, size.pooled_width - 96, size.text_width)

    @property
    def widths(self) -> dict[str, int]:
        """Token width of each encoder."""
        return {"clip_l": self.clip_l, "clip_g": self.clip_g, "t5": self.t5}


def sd3_columns(latent: tuple[int, ...], shapes: dict[str, tuple[int, int]]) -> list[Column]:
    """Return the columns for moments of a shape and the tokens and width of each encoder."""
    columns = [Column("moments", "image", "float16", latent, ())]
    columns += [Column(name, CAPTION, "bfloat16", shapes[name], (), ragged=True) for name in ENCODERS]
    pooled = [(f"{name}.pooled", shapes[name][1:]) for name in ENCODERS[:2]]
    return [*columns, *(Column(name, CAPTION, "bfloat16", shape, ()) for name, shape in pooled)]


def sd3_content(sample_id: Tensor, moments: Tensor, caption_start: Tensor, text: dict[str, Tensor]) -> ShardContent:
    """Return samples with distinct captions, named as in a shard."""
    shapes = {name: (int(text[f"{name}.start"].diff().max()), text[f"{name}.tokens"].shape[1]) for name in ENCODERS}
    captions = torch.arange(int(caption_start[-1]))
    columns = sd3_columns(tuple(moments.shape[2:]), shapes)
    return ShardContent(columns, sample_id, caption_start, captions, {"moments": moments, **text})


def t5_lengths(count: int, longest: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw tokens of typical web captions: log-normal with median 22 and sigma 0.5 (mean 25), at least 5."""
    return np.clip(rng.lognormal(np.log(22), 0.5, count), 5, longest).astype(np.int64)


def token_counts(shape: Shape, count: int, real: bool, rng: np.random.Generator) -> dict[str, Tensor]:
    """Return encoder -> tokens of each caption."""
    drawn = t5_lengths(count, shape.t5_tokens, rng)
    t5 = torch.from_numpy(drawn) if real else torch.full((count,), shape.t5_tokens)
    clip = t5.clamp(max=shape.clip_tokens) if real else torch.full((count,), shape.clip_tokens)
    return {"clip_l": clip, "clip_g": clip, "t5": t5}


def content(shape: Shape, first: int, number: int, counts: Mapping[str, Tensor]) -> ShardContent:
    """Return samples with equally many captions: latents around 0 with small variance, text of small numbers."""
    side, captions = shape.pixels // 8, len(counts["t5"])
    mean = torch.randn(number, 1, 16, side, side)
    moments = torch.cat([mean, torch.full_like(mean, -6.0)], dim=2).to(torch.float16)
    text = {}
    for name, width in shape.widths.items():
        start = torch.cat([torch.zeros(1, dtype=torch.int64), counts[name].cumsum(0)])
        text[f"{name}.tokens"] = (0.2 * torch.randn(int(start[-1]), width)).to(torch.bfloat16)
        text[f"{name}.start"] = start
        if name != "t5":
            text[f"{name}.pooled"] = torch.randn(captions, width).to(torch.bfloat16)
    first_captions = torch.arange(number + 1) * (captions // number)
    return sd3_content(torch.arange(first, first + number), moments, first_captions, text)


def write_cache(folder: Path, shape: Shape, samples: int, captions: int, real: bool, most: int = 128) -> float:
    """Write a cache in shards of at most ``most`` samples; return the mean text tokens per sample, CLIP and T5."""
    (folder / SHARDS).mkdir(parents=True)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    counts = token_counts(shape, samples * captions, real, rng)
    entries = []
    for first in range(0, samples, most):
        number = min(most, samples - first)
        part = {name: values[first * captions :][: number * captions] for name, values in counts.items()}
        entries.append(write(folder, shape, f"{first // most:05d}", content(shape, first, number, part)))
    empty_counts = {name: values[:1].clamp(max=2) if real else values[:1] for name, values in counts.items()}
    empty = write(folder, shape, "empty", content(replace(shape, pixels=8), 0, 1, empty_counts))
    Manifest({"text_tokens": "real" if real else "padded"}, tuple(entries), empty, {"pictures": samples}).save(folder)
    return float((counts["clip_l"] + counts["t5"]).double().mean())


def write(folder: Path, shape: Shape, name: str, samples: ShardContent) -> ShardEntry:
    """Write one shard."""
    side = (shape.pixels, shape.pixels)
    bucket = "empty" if name == "empty" else f"{shape.pixels}x{shape.pixels}"
    entry = ShardEntry(f"{name}.safetensors", bucket, side, LABEL, 0, 0, "", name)
    origins = [Origin(f"{number}", "", *side, ("",)) for number in samples.sample_id.tolist()]
    return write_shard(folder / SHARDS, entry, samples, origins)


# --- a model folder that has only configs ---------------------------------------------------------


def write_model_folder(folder: Path, shape: Shape) -> None:
    """Write the files of an SD3 folder that `check` and training read: configs. Weights are empty files."""
    clip = {"max_position_embeddings": 77}
    configs: dict[str, dict[str, Any]] = {
        "vae": {"latent_channels": 16, "block_out_channels": [1] * 4, "scaling_factor": 1.5305, "shift_factor": 0.0609},
        "text_encoder": {**clip, "hidden_size": shape.clip_l, "projection_dim": shape.clip_l},
        "text_encoder_2": {**clip, "hidden_size": shape.clip_g, "projection_dim": shape.clip_g},
        "text_encoder_3": {"d_model": shape.t5},
    }
    for name, config in configs.items():
        write_config_file(folder / name / "config.json", config)
        (folder / name / ("diffusion_pytorch_model" if name == "vae" else "model")).with_suffix(".safetensors").touch()
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        length = shape.t5_tokens if name == "tokenizer_3" else shape.clip_tokens
        write_config_file(folder / name / "tokenizer_config.json", {"model_max_length": length})
        write_config_file(folder / name / "tokenizer.json", {})
    write_config_file(folder / "model_index.json", {})
    write_config_file(folder / "scheduler" / "scheduler_config.json", {})


def write_config_file(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
