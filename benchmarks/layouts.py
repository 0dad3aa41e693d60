"""Which layout trains which model on which GPU: the table of docs/multi-node.md, from the formulas of `check`.

    python benchmarks/layouts.py             # print it
    python benchmarks/layouts.py --write     # and put it into both pages

For eight GPUs, bf16, activation checkpointing and one average: the largest micro-batch (a power of two, at most 256)
whose predicted memory fits, on the stage that takes most.
"""

import sys
from functools import cache
from pathlib import Path

from sd3_light.budget.amount import GIB
from sd3_light.budget.flops import Tokens, image_tokens
from sd3_light.budget.gpu_memory import gpu_memory
from sd3_light.budget.training_setup import TrainingSetup
from sd3_light.config import SIZES, TrainConfig
from sd3_light.config.sizes import ModelSize
from sd3_light.model.fast.choice import why_stock_by_config

GPUS = 8
TEXT_TOKENS = 77 + 256
LARGEST = 256
CARDS = {"24 GB": 23.5, "48 GB": 47.0, "80 GB": 79.0, "141 GB": 139.0}
"""GiB that torch sees on such a card, about."""

FULL = 0.95
"""Share of a card that a prediction may fill: it was within 8% of what thirteen setups took."""

LARGE = ModelSize("38 blocks of width 2432", 38, 38, 64, 4096, 2048, 128, 192, True)
MODELS = (
    (SIZES["sd3_light_square"], 256),
    (SIZES["sd3_light"], 256),
    (SIZES["sd3.5_medium"], 1024),
    (LARGE, 1024),
)
LAYOUTS = ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3", "2 stages, ZeRO-1", "4 stages, ZeRO-1")
HEADS = {
    "en": ("model", *LAYOUTS, "choose"),
    "zh": ("模型", *LAYOUTS[:-2], "2 级流水，ZeRO-1", "4 级流水，ZeRO-1", "选择"),
}
_NAMES = {"output_dir": "run", "dataset": "data.toml", "max_steps": 1, "model": {"diffusers_path": "model"}}


def case_of(layout: str, size: ModelSize, tokens: Tokens, batch: int) -> TrainingSetup:
    """How a layout trains, by the name of its column. Stages have the micro-batches that keep them busy."""
    stages = int(layout.split()[0]) if "stages" in layout else 1
    zero = int(layout[-1]) if "ZeRO" in layout else None
    parallel = "fsdp2" if layout == "FSDP2" else "ddp"
    keys = {"parallel": parallel, "pipeline_stages": stages, "activation_checkpointing": True, **_NAMES}
    keys |= {} if zero is None else {"zero_stage": zero}
    config = TrainConfig.model_validate(keys, context={"base": Path()})
    return TrainingSetup(
        size,
        tokens,
        batch,
        ema_tracks=1,
        checkpointing=True,
        fast=why_stock_by_config(config, size, GPUS, zero is not None) is None,
        accumulation=4 * stages if stages > 1 else 1,
        world=GPUS,
        parallel=parallel,
        deepspeed=zero is not None,
        zero=zero or 0,
        stages=stages,
    )


def largest_batch(layout: str, size: ModelSize, pixels: int, memory: float) -> int:
    """The largest micro-batch that fits; 0 where one sample does not."""
    tokens, found, batch = Tokens(image_tokens(pixels, pixels), TEXT_TOKENS), 0, 1
    while batch <= LARGEST:
        if gpu_memory(case_of(layout, size, tokens, batch)).total > FULL * memory * GIB:
            break
        found, batch = batch, 2 * batch
    return found


def choice(batches: dict[str, int]) -> str:
    """What to write: the simplest layout whose micro-batch is at least half of the largest that any has."""
    enough = max(batches.values()) / 2
    return next((name for name in LAYOUTS if batches[name] >= max(1, enough)), "more GPUs, or LoRA")


@cache
def rows() -> list[str]:
    """The rows of the table, in Markdown, without its head."""
    found = []
    for size, pixels in MODELS:
        for card, memory in CARDS.items():
            batches = {layout: largest_batch(layout, size, pixels, memory) for layout in LAYOUTS}
            cells = " | ".join(str(batch) if batch else "-" for batch in batches.values())
            name = f"{size.name} ({size.num_parameters() / 1e9:.1f} B), {pixels} px"
            found.append(f"| {name} | {card} | {cells} | {choice(batches)} |")
    return found


def table(language: str = "en") -> list[str]:
    """The whole table, in Markdown; its rows are the same in both languages."""
    model, *layouts, choose = HEADS[language]
    head = [f"| {model} | GPU | {' | '.join(layouts)} | {choose} |", f"|---|---|{'---:|' * len(layouts)}---|"]
    return [*head, *rows()]


def write(page: Path, language: str = "en") -> None:
    """Put the table of today in the place of a page's."""
    lines, model = page.read_text(encoding="utf-8").splitlines(), HEADS[language][0]
    first = next(at for at, line in enumerate(lines) if line.startswith(f"| {model} | GPU |"))
    last = next(at for at in range(first, len(lines)) if not lines[at].startswith("|"))
    page.write_text("\n".join([*lines[:first], *table(language), *lines[last:]]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(Path(__file__).parents[1] / "docs" / "multi-node.md")
        write(Path(__file__).parents[1] / "docs" / "zh" / "multi-node.md", "zh")
    else:
        print("\n".join(table()))
