"""The table of layouts in docs/multi-node.md (model, GPU, largest micro-batch), from the formulas of `check`.

    python benchmarks/layouts.py             # print it
    python benchmarks/layouts.py --write     # write it into both pages

For eight GPUs, bf16, activation checkpointing and one EMA track: the largest micro-batch (a power of two, at most 256)
whose estimated memory fits, on the pipeline stage that needs most.
"""

import sys
from functools import cache
from pathlib import Path

from sd3_light.config import SIZES, TrainConfig
from sd3_light.config.sizes import ModelSize
from sd3_light.core.cost import Layout, Tokens
from sd3_light.cost.amount import GIB
from sd3_light.cost.gpu_memory import gpu_memory
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
HEADS = {
    "en": ("model", *LAYOUTS, "choose"),
    "zh": ("模型", *LAYOUTS[:-2], "2 个阶段，ZeRO-1", "4 个阶段，ZeRO-1", "选择"),
}
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
        world=GPUS,
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


def table(language: str = "en") -> list[str]:
    """Return the whole table in Markdown; its rows are the same in both languages."""
    model, *layouts, choose = HEADS[language]
    head = [f"| {model} | GPU | {' | '.join(layouts)} | {choose} |", f"|---|---|{'---:|' * len(layouts)}---|"]
    return [*head, *rows()]


def write(page: Path, language: str = "en") -> None:
    """Replace the table of a page."""
    lines, model = page.read_text(encoding="utf-8").splitlines(), HEADS[language][0]
    first = next(index for index, line in enumerate(lines) if line.startswith(f"| {model} | GPU |"))
    last = next(index for index in range(first, len(lines)) if not lines[index].startswith("|"))
    page.write_text("\n".join([*lines[:first], *table(language), *lines[last:]]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(Path(__file__).parents[1] / "docs" / "multi-node.md")
        write(Path(__file__).parents[1] / "docs" / "zh" / "multi-node.md", "zh")
    else:
        print("\n".join(table()))
