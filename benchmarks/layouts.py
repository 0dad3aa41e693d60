"""Which layout trains which model on which GPU: the table of docs/multi-node.md, from the formulas of `check`.

For eight GPUs, bf16, activation checkpointing and one average: the largest micro-batch (a power of two, at most 256)
whose predicted memory fits. DDP and FSDP2 are `model.memory` as it is. ZeRO and pipeline stages are derived from it:
what one GPU alone would hold, less what the others hold for it. ZeRO-2 lies between ZeRO-1 and ZeRO-3.
"""

from dataclasses import replace

from sd3_light.config import SIZES
from sd3_light.config.sizes import ModelSize
from sd3_light.model.cost import Tokens, image_tokens
from sd3_light.model.memory import GIB, NCCL_BYTES, Case, activation_bytes, gpu_memory

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
LAYOUTS = ("DDP", "FSDP2", "ZeRO-1", "ZeRO-3", "2 stages, ZeRO-1", "4 stages, ZeRO-1")


def pipeline_bytes(case: Case, stages: int = 1) -> int:
    """What DeepSpeed's engine with ZeRO-1 holds on the fullest GPU (estimate).

    Weights and gradients are float32 and the arithmetic is autocast's, as in torch's engine; moments and averages are
    cut, and so is a copy of the weights that ZeRO makes for itself.
    """
    data = case.world // stages
    blocks = -(-case.size.num_layers // stages)
    stage = replace(case, world=1, size=case.size.with_overrides(num_layers=blocks))
    cut = stage.parameters * (8 + 4 * case.ema_tracks)
    waiting = (stages - 1) * activation_bytes(stage)  # micro-batches on their way through the later stages
    return gpu_memory(stage).total + NCCL_BYTES + waiting + (cut + 4 * stage.parameters) // data - cut


def bytes_of(layout: str, case: Case) -> int:
    """Bytes on each GPU, by the name of the column."""
    if layout == "DDP":
        return gpu_memory(case).total
    if layout in ("FSDP2", "ZeRO-3"):
        cut = gpu_memory(replace(case, parallel="fsdp2")).total
        return cut + (4 * case.parameters // case.world if layout == "ZeRO-3" else 0)
    return pipeline_bytes(case, 1 if layout == "ZeRO-1" else int(layout.split()[0]))


def largest_batch(layout: str, size: ModelSize, pixels: int, memory: float) -> int:
    """The largest micro-batch that fits; 0 where one sample does not."""
    tokens, found, batch = Tokens(image_tokens(pixels, pixels), TEXT_TOKENS), 0, 1
    while batch <= LARGEST:
        case = Case(size, tokens, batch, ema_tracks=1, checkpointing=True, world=GPUS)
        if bytes_of(layout, case) > FULL * memory * GIB:
            break
        found, batch = batch, 2 * batch
    return found


def choice(batches: dict[str, int]) -> str:
    """What to write: the simplest layout whose micro-batch is at least half of the largest that any has."""
    enough = max(batches.values()) / 2
    return next((name for name in LAYOUTS if batches[name] >= max(1, enough)), "more GPUs, or LoRA")


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


if __name__ == "__main__":
    print(f"| model | GPU | {' | '.join(LAYOUTS)} | choose |")
    print(f"|---|---|{'---:|' * len(LAYOUTS)}---|")
    print("\n".join(rows()))
