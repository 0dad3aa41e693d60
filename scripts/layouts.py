"""The tables of docs/reference/multi-node.md from the formulas of `check`: micro-batches, and bytes sent per step.

    python scripts/layouts.py             # print them
    python scripts/layouts.py --write     # write them into the page

For eight GPUs, bf16, activation checkpointing and one EMA track: the largest micro-batch (a power of two, at most 256)
whose estimated memory fits, on the pipeline stage that needs most. What is sent is that of 8, 64 and 1,024 GPUs, and
the bandwidth that hides it behind computing is for the speed measured on an H200.
"""

import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel

from sd3_light.config import SIZES, TrainConfig
from sd3_light.config.sizes import ModelSize
from sd3_light.core.cost import Layout, Tokens
from sd3_light.cost.amount import GIB, format_bytes
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.throughput import training_seconds
from sd3_light.cost.traffic import needed_bandwidth, sent_per_step
from sd3_light.cost.training_flops import training_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.cost import SD3Cost, image_tokens

GPUS = 8
TEXT_TOKENS = 77 + 256
LARGEST = 256
CARDS = {"24 GB": 23.5, "48 GB": 47.0, "80 GB": 79.0, "141 GB": 139.0}
"""Approximate GiB that torch can use on such a GPU."""

FULL = 0.95
"""Share of the memory that an estimate may fill: it was within 8% of thirteen measured setups."""

LARGE = ModelSize("38 blocks of width 2432", 38, 38, 64, 4096, 2048, 128, 192, 1 / 3, True)
MODELS = (
    (SIZES["sd3_light_square"], 256),
    (SIZES["sd3_light"], 256),
    (SIZES["sd3.5_medium"], 1024),
    (LARGE, 1024),
)
LAYOUTS = ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3", "2 stages, ZeRO-1", "4 stages, ZeRO-1")
SCALES = (8, 64, 1024)
TRAFFIC_HEAD = ("model, pixels, micro-batch", "layout", "a step on an H200", *(f"{gpus:,} GPUs" for gpus in SCALES))
_NAMES = {"output_dir": "run", "dataset": "data.toml", "max_steps": 1, "model": {"diffusers_path": "model"}}


def setup_of(layout: str, size: ModelSize, tokens: Tokens, batch: int) -> TrainingSetup:
    """Return the training setup of a layout, with enough micro-batches to keep pipeline stages busy."""
    stages = int(layout.split()[0]) if "stages" in layout else 1
    zero = int(layout[-1]) if "ZeRO" in layout else None
    parallel = "fsdp2" if layout == "FSDP2" else "ddp"
    keys = {"parallel": parallel, "pipeline_stages": stages, "activation_checkpointing": True, **_NAMES}
    keys |= {} if zero is None else {"zero_stage": zero}
    config = TrainConfig.model_validate(keys, context={"base": Path()})
    cost = SD3Cost(size)
    return TrainingSetup(
        cost,
        tokens,
        batch,
        ema_tracks=1,
        checkpointing=True,
        fast=cost.why_stock(config, Layout(GPUS, zero is not None)) is None,
        accumulation=4 * stages if stages > 1 else 1,
        world_size=GPUS,
        parallel=parallel,
        deepspeed=zero is not None,
        zero=zero or 0,
        stages=stages,
    )


def largest_batch(layout: str, size: ModelSize, pixels: int, memory: float) -> int:
    """Return the largest micro-batch that fits, or 0 if one sample does not fit."""
    tokens, largest, batch = Tokens(image_tokens(pixels, pixels), TEXT_TOKENS), 0, 1
    while batch <= LARGEST:
        if gpu_memory(setup_of(layout, size, tokens, batch)).total > FULL * memory * GIB:
            break
        largest, batch = batch, 2 * batch
    return largest


def choice(batches: dict[str, int]) -> str:
    """Return the recommended layout: the simplest one with at least half of the largest micro-batch."""
    enough = max(batches.values()) / 2
    return next((name for name in LAYOUTS if batches[name] >= max(1, enough)), "more GPUs, or LoRA")


@cache
def rows() -> list[str]:
    """Return the rows of the table in Markdown, without the header."""
    lines = []
    for size, pixels in MODELS:
        for card, memory in CARDS.items():
            batches = {layout: largest_batch(layout, size, pixels, memory) for layout in LAYOUTS}
            cells = " | ".join(str(batch) if batch else "-" for batch in batches.values())
            name = f"{size.name} ({size.num_parameters() / 1e9:.1f} B), {pixels} px"
            lines.append(f"| {name} | {card} | {cells} | {choice(batches)} |")
    return lines


def table() -> list[str]:
    """Return the table of micro-batches in Markdown."""
    head = [f"| model | GPU | {' | '.join(LAYOUTS)} | choose |", f"|---|---|{'---:|' * len(LAYOUTS)}---|"]
    return [*head, *rows()]


def traffic_table() -> list[str]:
    """Return what a GPU sends per step, and the Gbit/s that this needs."""
    return [f"| {' | '.join(TRAFFIC_HEAD)} |", "|---|---|---:|---:|---:|---:|", *traffic_rows()]


@cache
def traffic_rows() -> list[str]:
    """Return the rows of the table of what is sent, in Markdown."""
    lines = []
    for size, pixels in MODELS:
        tokens = Tokens(image_tokens(pixels, pixels), TEXT_TOKENS)
        batch = 64 if pixels < 512 else 8
        name = f"{size.name} ({size.num_parameters() / 1e9:.1f} B), {pixels} px, {batch}"
        for layout in ("DDP", "FSDP2"):
            alone = setup_of(layout, size, tokens, batch)
            flops = batch * training_flops(alone.cost, tokens, checkpointing=True).value
            seconds = training_seconds("NVIDIA H200", alone.block_kind, flops, 1, size.num_layers)
            assert seconds is not None
            cells = []
            for gpus in SCALES:
                sent = sent_per_step(replace(alone, world_size=gpus)).value
                if layout == "FSDP2":
                    sent = round(sent * filled_share(size, gpus))
                cells.append(f"{format_bytes(sent)}, {needed_bandwidth(sent, seconds) / 1e9:,.0f}")
            lines.append(f"| {name} | {layout} | {seconds:.2f} s | {' | '.join(cells)} |")
    return lines


def filled_share(size: ModelSize, gpus: int) -> float:
    """Return what FSDP2 gathers, relative to the weights: each GPU has as many rows of a weight, some of them empty."""
    held = sum(-(-rows // gpus) * gpus * math.prod(rest) for rows, *rest in weight_shapes(size))
    return held / sum(map(math.prod, weight_shapes(size)))


@cache
def weight_shapes(size: ModelSize) -> list[tuple[int, ...]]:
    """Return the shapes of a denoiser's weights."""
    with torch.device("meta"):
        denoiser = SD3Transformer2DModel.from_config(size.transformer_config())
    return [tuple(weight.shape) for weight in denoiser.parameters()]


def write(page: Path) -> None:
    """Replace the tables of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for new in (table(), traffic_table()):
        first = lines.index(new[0])
        last = next(index for index in range(first, len(lines)) if not lines[index].startswith("|"))
        lines[first:last] = new
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(Path(__file__).parents[1] / "docs" / "reference" / "multi-node.md")
    else:
        print("\n".join([*table(), "", *traffic_table()]))
