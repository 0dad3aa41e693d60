"""The files of a benchmark run of the training stage: a cache of random numbers, a model folder, a train TOML."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sd3_shards import sd3_content
from torch import Tensor

from sd3_light.config import SIZES, ModelSize
from sd3_light.core.cost import Tokens
from sd3_light.cost.amount import GIB
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.families.sd3.cost import SD3Cost, image_tokens

SAMPLES_PER_SHARD = 128
IMAGES = "images"
LABEL = f"{IMAGES}#0"


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


# --- cache -------------------------------------------------------------------------------------


def token_counts(shape: Shape, count: int, real: bool, rng: np.random.Generator) -> dict[str, Tensor]:
    """Return encoder -> tokens of each caption."""
    drawn = np.clip(rng.lognormal(np.log(22), 0.5, count), 5, shape.t5_tokens).astype(np.int64)
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


def write_cache(folder: Path, shape: Shape, samples: int, captions: int, real: bool) -> float:
    """Write a whole cache; returns the mean text tokens per sample, CLIP and T5 together."""
    (folder / SHARDS).mkdir(parents=True)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    counts = token_counts(shape, samples * captions, real, rng)
    entries = []
    for first in range(0, samples, SAMPLES_PER_SHARD):
        number = min(SAMPLES_PER_SHARD, samples - first)
        part = {name: values[first * captions :][: number * captions] for name, values in counts.items()}
        entries.append(write(folder, shape, f"{first // SAMPLES_PER_SHARD:05d}", content(shape, first, number, part)))
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


# --- model folder and config ---------------------------------------------------------------


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
        write_json(folder / name / "config.json", config)
        (folder / name / ("diffusion_pytorch_model" if name == "vae" else "model")).with_suffix(".safetensors").touch()
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        length = shape.t5_tokens if name == "tokenizer_3" else shape.clip_tokens
        write_json(folder / name / "tokenizer_config.json", {"model_max_length": length})
        write_json(folder / name / "tokenizer.json", {})
    write_json(folder / "model_index.json", {})
    write_json(folder / "scheduler" / "scheduler_config.json", {})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def chosen_size(args: argparse.Namespace) -> ModelSize:
    """Return the size of the denoiser."""
    size = SIZES[args.size].with_overrides(args.layers, None)
    return size if args.heads is None else replace(size, num_heads=args.heads)


def train_toml(args: argparse.Namespace, shape: Shape) -> str:
    """Return the train TOML. It has no exports, since the model folder is incomplete."""
    booleans = {"true": "true", "false": "false"}
    names = ("checkpointing", "fast", "cuda_graphs")
    flags = {name: booleans.get(getattr(args, name), f'"{getattr(args, name)}"') for name in names}
    size = chosen_size(args)
    shaped = f"shape = {{num_layers = {size.num_layers}, num_heads = {size.num_heads}}}"
    sized = f'size = "{args.size}"' + ("" if args.layers is None else f"\nnum_layers = {args.layers}")
    return f"""
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
max_steps = {args.steps + args.alone}
micro_batch_size_per_gpu = {args.batch}
gradient_accumulation_steps = {args.accumulation}
zero_stage = {args.zero_stage}
activation_checkpointing = {flags["checkpointing"]}
fast = {flags["fast"]}
compile = {str(args.compile).lower()}
cuda_graphs = {flags["cuda_graphs"]}
fp8 = {str(args.fp8).lower()}
warmup_steps = 1000
checkpoint_every_n_steps = {args.checkpoint_every or args.steps + args.alone}
keep_last_n_checkpoints = 1
logging_steps = {args.logging_steps}
num_dataloader_workers = {args.workers}
dataloader_prefetch_per_worker = 2
cache_residence = "{args.residence}"
[model]
train_type = "sd3_light_pretrain"
diffusers_path = "model"
{sized if args.heads is None else shaped}
t5_max_length = {shape.t5_tokens}
text_tokens = "{args.text}"
enable_uncond_text_dropout = true
uncond_text = "empty"
[optimizer]
type = "{args.optimizer}"
[ema]
enable = true
update_every = {args.ema_every}
"""


def prepare_folder(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write all files of a run and return its description."""
    size, real = chosen_size(args), args.text == "real"
    shape = Shape.of(size, args.pixels, args.max_tokens)
    tokens = write_cache(folder / "cache", shape, args.samples, args.captions, real)
    write_model_folder(folder / "model", shape)
    (folder / IMAGES).mkdir()
    (folder / "train.toml").write_text(train_toml(args, shape), encoding="utf-8")
    data = f'resolutions = [{shape.pixels}]\n[[directory]]\npath = "{IMAGES}"\n'
    (folder / "data.toml").write_text(data, encoding="utf-8")
    case = TrainingSetup(
        SD3Cost(size),
        Tokens(image_tokens(shape.pixels, shape.pixels), shape.clip_tokens + shape.t5_tokens),
        args.batch,
        ema_tracks=1,
        checkpointing={"true": True, "false": False}.get(args.checkpointing, "selective"),  # type: ignore[arg-type]
        compiled=args.compile,
        fast=args.fast != "false" and not args.compile,
        accumulation=args.accumulation,
        optimizer=args.optimizer,
    )
    cache = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
    about = {
        "regime": args.regime,
        "engine": args.engine,
        "size": args.size,
        "layers": size.num_layers,
        "heads": size.num_heads,
        "batch": args.batch,
        "text": args.text,
        "compile": args.compile,
        "fast": args.fast,
        "cuda_graphs": args.cuda_graphs,
        "fp8": args.fp8,
        "workers": args.workers,
        "residence": args.residence,
        **asdict(shape),
    }
    return {
        **about,
        "checkpointing": args.checkpointing,
        "text_tokens": tokens,
        "cache_gb": cache / 1e9,
        "predicted_gib": gpu_memory(case).total / GIB,
    }
