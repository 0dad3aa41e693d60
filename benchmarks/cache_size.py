"""Bytes per cached sample with `real` and `padded` text tokens, for captions of several lengths.

    python benchmarks/cache_size.py [--side 256] [--captions 20 60 250]

The table is arithmetic from the format of shards with SD3's sizes (16 latent channels; CLIP-L 768, CLIP-G 1280, T5
4096 wide) and one caption per image; a caption of n T5 tokens has n + 1 CLIP tokens, at most 77. The same arithmetic is
compared with a small shard written with the demo's encoders, and the program fails if they differ.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sd3_shards import sd3_content

from sd3_light.assets import DEMO
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.shards import Origin, write_shard
from sd3_light.families.sd3.encoders import FrozenParts

MB = 1e6
GOAL_MB = 0.35  # for captions of 20 tokens with `real`
CLIP_LENGTH = 77
T5_LENGTH = 256


@dataclass(frozen=True)
class Widths:
    """Widths of the text encoders and channels of the latents."""

    clip_l: int
    clip_g: int
    t5: int
    latent: int


SD3 = Widths(768, 1280, 4096, 16)


def sample_bytes(widths: Widths, side: tuple[int, int], clip_tokens: int, t5_tokens: int) -> int:
    """Return the bytes of a sample with one caption, one image variant and no mask."""
    moments = 2 * (2 * widths.latent) * (side[0] // 8) * (side[1] // 8)
    tokens = 2 * (clip_tokens * (widths.clip_l + widths.clip_g) + t5_tokens * widths.t5)
    pooled = 2 * (widths.clip_l + widths.clip_g)
    numbers = 8 * (1 + 1 + 1 + 3)  # id, first caption, caption, first row of each encoder
    return moments + tokens + pooled + numbers


def table(side: int, lengths: list[int]) -> list[tuple[int, int, int]]:
    """Return (T5 tokens, bytes with `real`, bytes with `padded`) rows."""
    padded = sample_bytes(SD3, (side, side), CLIP_LENGTH, T5_LENGTH)
    return [
        (length, sample_bytes(SD3, (side, side), min(length + 1, CLIP_LENGTH), min(length, T5_LENGTH)), padded)
        for length in lengths
    ]


# --- comparison with a file --------------------------------------------------------------------


def write_small_shard(folder: Path, text_tokens: str) -> tuple[int, int]:
    """Write a shard; returns (bytes of its tensors, bytes computed by the arithmetic)."""
    captions = ["a red circle", "two blue squares on a grey background", "", "a small star"]
    pixels = np.random.default_rng(0).integers(0, 256, (len(captions), 64, 80, 3), dtype=np.uint8)
    with FrozenParts(
        DEMO, torch.device("cpu"), text_dtype=torch.float32, t5_max_length=16, text_tokens=text_tokens, batch_size=4
    ) as parts:
        moments, text = parts.encode_images(pixels, flip=False)["moments"], parts.encode_captions(captions)
        parts.synchronize()
    content = sd3_content(torch.arange(len(captions)), moments, torch.arange(len(captions) + 1), text)
    entry = ShardEntry("small.safetensors", "80x64", (80, 64), "demo#0", 0, 0, "", "")
    written = write_shard(folder, entry, content, [Origin(caption, "", 80, 64, (caption,)) for caption in captions])
    widths = Widths(*(text[f"{name}.tokens"].shape[1] for name in ("clip_l", "clip_g", "t5")), moments.shape[2] // 2)
    rows = {name: text[f"{name}.start"].diff().tolist() for name in ("clip_l", "t5")}
    expected = sum(sample_bytes(widths, (80, 64), *tokens) for tokens in zip(rows["clip_l"], rows["t5"], strict=True))
    ends = 8 * 4  # caption_start and the start of each encoder have one number more than samples
    return tensor_bytes(folder / written.file), expected + ends


def tensor_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file after its header."""
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        ends = [item["data_offsets"][1] for name, item in json.loads(file.read(header)).items() if name[0] != "_"]
    assert path.stat().st_size == 8 + header + max(ends)
    return max(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=256, help="side of the square images in pixels")
    parser.add_argument("--captions", type=int, nargs="+", default=[20, 60, 250], help="T5 tokens, end mark included")
    args = parser.parse_args()
    print(f"{args.side} px, SD3's sizes\n")
    print("| caption tokens | real, MB | padded, MB | real / padded |\n|---:|---:|---:|---:|")
    for length, real, padded in table(args.side, args.captions):
        print(f"| {length} | {real / MB:.3f} | {padded / MB:.3f} | {real / padded:.1%} |")
    print()
    for text_tokens in ("real", "padded"):
        with tempfile.TemporaryDirectory() as folder:
            written, expected = write_small_shard(Path(folder), text_tokens)
        assert written == expected, (
            f"{text_tokens}: the file has {written} bytes of tensors, the arithmetic gives {expected}"
        )
        print(f"a shard with the demo's encoders, {text_tokens}: {written} bytes of tensors, as computed")
    goal = sample_bytes(SD3, (256, 256), 21, 20) / MB
    print(f"goal: at most {GOAL_MB} MB for 20 tokens at 256 px with real: {goal:.3f} MB")
    assert goal <= GOAL_MB


if __name__ == "__main__":
    main()
