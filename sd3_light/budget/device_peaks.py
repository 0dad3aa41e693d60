"""What a GPU could do at most: dense matrix products a second, by the name that torch gives it.

Figures are the vendors' own, without sparsity. GeForce cards are counted with float32 accumulation, which is half of
what their data sheets print for bf16, because that is what torch asks for.
"""

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Words that a GPU's name must have, and its TFLOP/s in each type; None where it has no such unit."""

    words: str
    bfloat16: float | None
    float16: float
    tf32: float | None
    float32: float


# Of several lines that fit a name, the one with most words holds.
# fmt: off
_TABLE = (
    #    words in the name   bf16     fp16     tf32     fp32
    Peak("b200",             2250.0,  2250.0,  1125.0,  75.0),
    Peak("gb200",            2500.0,  2500.0,  1250.0,  80.0),
    Peak("h200",              989.4,   989.4,   494.7,  67.0),
    Peak("h200 nvl",          835.5,   835.5,   417.5,  60.0),
    Peak("gh200",             989.4,   989.4,   494.7,  67.0),
    Peak("h100",              989.4,   989.4,   494.7,  67.0),
    Peak("h100 pcie",         756.0,   756.0,   378.0,  51.0),
    Peak("h100 nvl",          835.5,   835.5,   417.5,  60.0),
    Peak("h800",              989.4,   989.4,   494.7,  67.0),
    Peak("h800 pcie",         756.0,   756.0,   378.0,  51.0),
    Peak("h20",               148.0,   148.0,    74.0,  44.0),
    Peak("a100",              312.0,   312.0,   156.0,  19.5),
    Peak("a800",              312.0,   312.0,   156.0,  19.5),
    Peak("l40s",              362.0,   362.0,   183.0,  91.6),
    Peak("l40",               181.0,   181.0,    90.5,  90.5),
    Peak("l4",                121.0,   121.0,    60.0,  30.3),
    Peak("a10",               125.0,   125.0,    62.5,  31.2),
    Peak("a10g",               70.0,    70.0,    35.0,  31.2),
    Peak("a6000",             154.8,   154.8,    77.4,  38.7),
    Peak("6000 ada",          364.2,   364.2,   182.1,  91.1),
    Peak("3090",               71.0,    71.0,    35.6,  35.6),
    Peak("4090",              165.2,   165.2,    82.6,  82.6),
    Peak("5090",              209.5,   209.5,   104.8, 104.8),
    Peak("v100",               None,   125.0,    None,  15.7),
    Peak("v100 pcie",          None,   112.0,    None,  14.0),
    Peak("mi300x",           1307.4,  1307.4,   653.7, 163.4),
)
# fmt: on
_OTHER_CHIPS = frozenset({"laptop", "ti", "d", "super", "mobile", "mig"})
"""Words that make of a known name another chip, or a part of one."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of matrix products on a GPU; None where the GPU is not known or has no unit for the type.

    ``device_name`` as `torch.cuda.get_device_name` says it; ``dtype`` is bfloat16, float16, tf32 or float32.
    """
    assert dtype in ("bfloat16", "float16", "tf32", "float32"), dtype
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHER_CHIPS:
        return None
    fitting = [peak for peak in _TABLE if words.issuperset(peak.words.split())]
    if not fitting:
        return None
    tera: float | None = getattr(max(fitting, key=lambda peak: len(peak.words.split())), dtype)
    return None if tera is None else tera * 1e12
