"""A number together with its formula, and units of bytes."""

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Amount:
    """A number and the formula that produced it, so that users can verify it."""

    value: int
    formula: str


def format_bytes(count: int) -> str:
    """Return bytes in GiB or MiB with one decimal."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
