"""A number together with its formula, and units of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Amount:
    """A number and the formula that produced it, so that users can verify it."""

    value: int
    formula: str


def format_bytes(count: float) -> str:
    """Return bytes in the unit that gives three or four digits."""
    return _in_unit(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_flops(count: float) -> str:
    """Return FLOPs in the unit that gives three or four digits."""
    return _in_unit(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def _in_unit(value: float, base: int, units: Sequence[str]) -> str:
    index = 0
    while value >= base and index < len(units) - 1:
        value = value / base
        index = index + 1
    return f"{value:.3g} {units[index]}" if value < 1000 else f"{value:,.0f} {units[index]}"
