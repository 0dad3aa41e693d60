"""The duration of training steps, from speeds that were measured on a kind of GPU. Pure.

Each row is from docs/evidence/LOG.md: the share of the dense bf16 peak that training of `sd3_light` reaches, by kind
of blocks, and the time per block below which no micro-batch gets, because the host cannot launch its kernels faster.
"""

import re
from typing import NamedTuple

from sd3_light.core.cost import BlockKind
from sd3_light.cost.device_peaks import peak_flops

CPU_CORE_FLOPS = 20e9
"""Assumed FLOP/s of training in float32 per CPU core; cores differ several times."""
CPU_CORE_RANGE = (4e9, 60e9)
"""FLOP/s of training in float32 per CPU core, where nothing was measured; with a tiny denoiser they may be lower."""
PEAK_RANGE = (0.1, 0.5)
"""Share of its bf16 peak that training reaches on a kind of GPU that was not measured."""


class MeasuredSpeed(NamedTuple):
    """Words that a GPU's name contains, the kind of its blocks, and what was measured."""

    words: str
    blocks: str
    share_of_peak: float
    block_seconds: float


# fmt: off
_MEASURED = (
    #             words   blocks              share  seconds per block
    MeasuredSpeed("h200", "fast",             0.49,  0.009),
    MeasuredSpeed("h200", "fp8",              0.55,  0.009),
    MeasuredSpeed("h200", "compiled",         0.43,  0.0057),
    MeasuredSpeed("h200", "compiled adapter", 0.32,  0.0057),
    MeasuredSpeed("h200", "stock",            0.23,  0.009),
    MeasuredSpeed("h200", "stock adapter",    0.23,  0.009),
)
# fmt: on
_GRAPH_BLOCK_SECONDS = 0.0018
"""The time per block of a small micro-batch whose kernels are recorded: that of the kernels themselves."""


def measured_blocks(kind: BlockKind, has_adapter: bool, fp8: bool = False) -> str:
    """Return the name of blocks in the table of speeds."""
    if fp8:
        return "fp8"
    return f"{kind} adapter" if has_adapter else kind


def measured_speed(device_name: str, blocks: str) -> MeasuredSpeed | None:
    """Return what was measured on this kind of GPU with these blocks; None if nothing was."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    return next((row for row in _MEASURED if row.blocks == blocks and words.issuperset(row.words.split())), None)


def time_range(flops: float, micro_batches: int, num_layers: int, peaks: tuple[float, float]) -> tuple[float, float]:
    """Return the least and the most seconds of ``flops`` on one GPU by `PEAK_RANGE` of the lower and the higher peak.

    The most are at least those of the launches on the GPUs that were measured.
    """
    low, high = PEAK_RANGE
    slowest, fastest = peaks
    launches = micro_batches * num_layers * max(row.block_seconds for row in _MEASURED)
    return flops / (high * fastest), max(flops / (low * slowest), launches)


def training_seconds(
    device_name: str,
    blocks: str,
    flops: float,
    micro_batches: int,
    num_layers: int,
    gpus: int = 1,
    graphs: bool = False,
) -> float | None:
    """Return the seconds of ``flops`` in ``micro_batches`` per GPU; None for a kind of GPU that was not measured.

    ``blocks`` are named by `measured_blocks`, ``graphs``: they are recorded. Several GPUs are assumed to scale
    linearly, which was not measured.
    """
    speed = measured_speed(device_name, blocks)
    peak = peak_flops(device_name, "bfloat16")
    if speed is None or peak is None:
        return None
    block_seconds = _GRAPH_BLOCK_SECONDS if graphs else speed.block_seconds
    return max(flops / (gpus * peak * speed.share_of_peak), micro_batches * num_layers * block_seconds)
