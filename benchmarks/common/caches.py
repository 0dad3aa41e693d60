"""A cache of random numbers with SD3's columns, and a model folder that has only configs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import ModelSize
from sd3_light.core.columns import CAPTION, Column
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin, ShardContent, write_shard

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


# --- model folder --------------------------------------------------------------------------------


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
