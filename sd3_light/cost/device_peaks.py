"""Peak dense FLOP/s of GPUs, by the device name that torch reports.

Figures are the vendors', without sparsity. GeForce cards are listed with float32 accumulation, half of the bf16 figure
in their data sheets, because torch uses it.
"""

import re
from typing import NamedTuple

from sd3_light.config.faults import UserError


class DevicePeak(NamedTuple):
    """Words that a GPU's name contains, its TFLOP/s (None without a unit for bfloat16), and GiB of its versions."""

    words: str
    bfloat16: float | None
    float32: float
    gib: tuple[int, ...]


# If several lines match a name, the one with most words wins.
# fmt: off
_PEAKS = (
    #          words in the name   bf16     fp32   GiB
    DevicePeak("b200",            2250.0,  75.0,  (180,)),
    DevicePeak("gb200",           2500.0,  80.0,  (186,)),
    DevicePeak("h200",            989.4,   67.0,  (141,)),
    DevicePeak("h200 nvl",        835.5,   60.0,  (141,)),
    DevicePeak("gh200",           989.4,   67.0,  (96, 144)),
    DevicePeak("h100",            989.4,   67.0,  (80,)),
    DevicePeak("h100 pcie",       756.0,   51.0,  (80,)),
    DevicePeak("h100 nvl",        835.5,   60.0,  (94,)),
    DevicePeak("h800",            989.4,   67.0,  (80,)),
    DevicePeak("h800 pcie",       756.0,   51.0,  (80,)),
    DevicePeak("h20",             148.0,   44.0,  (96,)),
    DevicePeak("a100",            312.0,   19.5,  (40, 80)),
    DevicePeak("a800",            312.0,   19.5,  (40, 80)),
    DevicePeak("l40s",            362.0,   91.6,  (48,)),
    DevicePeak("l40",             181.0,   90.5,  (48,)),
    DevicePeak("l4",              121.0,   30.3,  (24,)),
    DevicePeak("a10",             125.0,   31.2,  (24,)),
    DevicePeak("a10g",            70.0,    31.2,  (24,)),
    DevicePeak("a6000",           154.8,   38.7,  (48,)),
    DevicePeak("6000 ada",        364.2,   91.1,  (48,)),
    DevicePeak("3060",            25.5,    12.7,  (12,)),
    DevicePeak("4070",            58.3,    29.1,  (12,)),
    DevicePeak("4080",            97.5,    48.7,  (16,)),
    DevicePeak("5070",            61.7,    30.9,  (12,)),
    DevicePeak("5080",            112.6,   56.3,  (16,)),
    DevicePeak("3090",            71.0,    35.6,  (24,)),
    DevicePeak("4090",            165.2,   82.6,  (24,)),
    DevicePeak("5090",            209.5,   104.8, (32,)),
    DevicePeak("v100",            None,    15.7,  (16, 32)),
    DevicePeak("v100 pcie",       None,    14.0,  (16, 32)),
    DevicePeak("mi300x",          1307.4,  163.4, (192,)),
)
# fmt: on
_NEAR = 0.1
"""Share by which the memory that a user names may differ from that of a kind."""
_OTHER_CHIPS = frozenset({"laptop", "ti", "d", "super", "mobile", "mig"})
"""Words that turn a known name into another chip, or into a slice of one."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak dense FLOP/s of a GPU; None if the GPU is unknown or has no unit for the dtype.

    ``device_name`` comes from `torch.cuda.get_device_name`; ``dtype`` is bfloat16 or float32.
    """
    assert dtype in ("bfloat16", "float32"), dtype
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHER_CHIPS:
        return None
    matching = [peak for peak in _PEAKS if words.issuperset(peak.words.split())]
    if not matching:
        return None
    tera: float | None = getattr(max(matching, key=lambda peak: len(peak.words.split())), dtype)
    return None if tera is None else tera * 1e12


def kinds_with_memory(total_bytes: int) -> list[DevicePeak]:
    """Return the kinds of GPUs with about this memory and units for bfloat16, the slowest first."""
    gib = total_bytes / 2**30
    kinds = [peak for peak in _PEAKS if any(abs(size - gib) <= _NEAR * size for size in peak.gib) and peak.bfloat16]
    return sorted(kinds, key=lambda peak: peak.bfloat16 or 0.0)


def require_known_gpu(name: str) -> None:
    """Raise a UserError that lists the known GPUs unless ``name`` is one of them."""
    if peak_flops(name, "float32") is None:
        known = ", ".join(peak.words.upper() for peak in _PEAKS)
        raise UserError(
            f"--gpu {name}: unknown kind of GPU; the known ones are {known}; --gpu-memory GIB alone checks the memory"
        )
