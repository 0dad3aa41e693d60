"""Axis ranges, ticks and positions."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_ROOM = 0.05  # of the range, above and below the values
_LOG_RATIO = 20  # greatest value over median: beyond it a linear axis squeezes most values into a thin strip


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """Return where a value is: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round values on the axis, about ``most`` of them."""
        if self.log and self.high / self.low >= 10:
            return _log_ticks(self.low, self.high, most)
        span = self.high - self.low
        size = 10 ** math.floor(math.log10(span / most))
        step = next(factor * size for factor in (1, 2, 2.5, 5, 10, 20) if span / (factor * size) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def fit_axis(values: Iterable[float], include_zero: bool = False) -> Axis:
    """Return an axis that shows all values with some room; logarithmic where a few are far above the rest."""
    ranked = sorted(values)
    assert ranked, "an axis needs values"
    low, high = ranked[0], ranked[-1]
    if not include_zero and low > 0 and high / ranked[len(ranked) // 2] > _LOG_RATIO:
        return Axis(low / 1.1, high * 1.1, log=True)
    if include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * _ROOM or abs(high) * 0.1 or 1.0
    return Axis(low if include_zero and low == 0 else low - room, high + room)


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, math.ceil((last - first) / most)) if digits == (1,) else 1
    ticks = [digit * 10.0**power for power in range(first, last + 1, every) for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]
