"""Shards of SD3's columns for benchmarks."""

import torch
from torch import Tensor

from sd3_light.core.columns import CAPTION, Column
from sd3_light.data.shards import ShardContent

ENCODERS = ("clip_l", "clip_g", "t5")


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
