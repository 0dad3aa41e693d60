"""Where the marks of an axis stand and how they are written."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, on a logarithmic scale or not."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end."""
        low, high, at = (math.log(each) for each in (self.low, self.high, value)) if self.log else self._plain(value)
        return (at - low) / (high - low)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values on the axis, about ``most`` of them."""
        if self.log and self.high / self.low >= 10:
            return _powers(self.low, self.high, most)
        span = self.high - self.low
        size = 10 ** math.floor(math.log10(span / most))
        step = next(factor * size for factor in (1, 2, 2.5, 5, 10, 20) if span / (factor * size) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [at * step for at in range(first, last + 1)]

    def _plain(self, value: float) -> tuple[float, float, float]:
        return self.low, self.high, value


def axis_of(values: Iterable[float], zero: bool = False) -> Axis:
    """An axis that shows all values with a little room; ``zero`` is on it if asked for.

    Where most of the values would lie in a thin strip, it is logarithmic.
    """
    ranked = sorted(values)
    assert ranked, "there is something to show"
    low, high = ranked[0], ranked[-1]
    if not zero and low > 0 and high / ranked[len(ranked) // 2] > 20:
        return Axis(low / 1.1, high * 1.1, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return Axis(low if zero and low == 0 else low - room, high + room)


def label(value: float) -> str:
    """A mark in few letters: ``250k``, ``0.55``, ``1e-4``."""
    size = abs(value)
    if size and size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}" if size < 1000 else f"{value:,.0f}"


def _powers(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, math.ceil((last - first) / most)) if digits == (1,) else 1
    marks = [digit * 10.0**power for power in range(first, last + 1, every) for digit in digits]
    return [mark for mark in marks if low <= mark <= high]
