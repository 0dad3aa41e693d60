"""Line charts: the data, their axes, and the geometry that `components/chart.html` draws.

The SVG stretches to any width; labels are HTML on top of it and keep their size.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sd3_light.formats import tick_label

VIEW = 1000
"""Width and height of the SVG's coordinates."""

_MOST_DOTS = 40  # a line with at most this many points has a dot on each
_MOST_DIGITS = 12  # of a label

_ROOM = 0.05  # of the range, above and below the values
_LEAST = 1e-45  # of a range and of a value on a logarithmic axis: the least positive number of fp32
_LEAST_SHARE = 1e-12  # of a range in its values: in a narrower one ticks are rounding errors
_LOG_RATIO = 20  # greatest value over median: beyond it a linear axis squeezes most values into a thin strip

Point = tuple[float, float]
Interval = tuple[float, float, float]


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
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def fit_axis(values: Iterable[float], include_zero: bool = False) -> Axis:
    """Return an axis that shows all values with some room; logarithmic where a few are far above the rest."""
    ranked = sorted(values)
    assert ranked, "an axis needs values"
    low = ranked[0]
    high = ranked[-1]
    if not include_zero and low >= _LEAST and high / ranked[len(ranked) // 2] > _LOG_RATIO:
        return Axis(low / 1.1, high * 1.1, log=True)
    if include_zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    room = (high - low) * _ROOM
    if _is_narrow(low, high):
        room = abs(high) * 0.1 if abs(high) >= _LEAST else 1.0
    return Axis(low if include_zero and low == 0 else low - room, high + room)


def _is_narrow(low: float, high: float) -> bool:
    return high - low < max(_LEAST, _LEAST_SHARE * max(abs(low), abs(high)))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, math.ceil((last - first) / most)) if digits == (1,) else 1
    ticks = [digit * 10.0**power for power in range(first, last + 1, every) for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


@dataclass(frozen=True)
class ChartLine:
    """A curve; ``color`` has classes of `charts.css`, ``last`` is the value beside its name in the legend.

    Of smoothed ``points``, ``raw`` has the values that `charts.js` smooths again. ``source`` says where it finds finer
    ones: the run, the curve, and "mean" or "extremes".
    """

    name: str
    points: Sequence[Point]
    color: str = "c0"
    last: float | None = None
    faint: bool = False
    raw: Sequence[Point] = ()
    source: tuple[str, str, str] = ("", "", "")
    interval: Sequence[Interval] = ()
    """x, low and high of a band around the line."""

    @property
    def css_class(self) -> str:
        """The classes of its elements."""
        return f"{self.color} faint" if self.faint else self.color


@dataclass(frozen=True)
class ChartMark:
    """A marked x value; ``kind`` is "resume" or "nonfinite"."""

    x: float
    label: str
    kind: str = "resume"


@dataclass(frozen=True)
class Chart:
    """Lines over one x axis. The x axis covers at least ``x_range``, so that the charts of a page can be compared."""

    title: str
    lines: Sequence[ChartLine]
    hint: str = ""
    marks: Sequence[ChartMark] = ()
    include_zero: bool = False
    percent: bool = False
    x_range: Sequence[float] = ()
    x_name: str = "step"
    wide: bool = False
    has_legend: bool = True

    @cached_property
    def drawn_lines(self) -> list[ChartLine]:
        """The lines that have points."""
        return [line for line in self.lines if line.points]

    @cached_property
    def x_axis(self) -> Axis:
        """The x axis; it ends exactly where the data end."""
        values = [x for line in self.lines for x, _ in line.points]
        values += [*self.x_range, *(mark.x for mark in self.marks)]
        low = min(values)
        high = max(values)
        return Axis(low - 1, high + 1) if _is_narrow(low, high) else Axis(low, high)

    @cached_property
    def y_axis(self) -> Axis:
        """The y axis."""
        values = [y for line in self.lines for _, y in line.points]
        values += [y for line in self.lines for _, *ends in line.interval for y in ends]
        return fit_axis(values, self.include_zero)

    @property
    def x_ticks(self) -> list[tuple[str, float]]:
        """Label and position (0 to 1) of whole x values."""
        ticks = [tick for tick in self.x_axis.ticks() if tick == round(tick)] or [self.x_axis.low]
        return [(tick_label(tick), self.x_axis.position(tick)) for tick in ticks]

    @property
    def y_ticks(self) -> list[tuple[str, float]]:
        """Label and position (0 to 1) of round y values."""
        ticks = self.y_axis.ticks()
        labels = [self.format_value(tick) for tick in ticks]
        digits = 5
        while len(set(labels)) < len(ticks) and digits <= _MOST_DIGITS:  # a narrow range far from zero
            labels = [f"{tick:.{digits}g}" for tick in ticks]
            digits = digits + 1
        return [(label, self.y_axis.position(tick)) for label, tick in zip(labels, ticks, strict=True)]

    @property
    def mark_kinds(self) -> list[str]:
        """The kinds of marks, each once."""
        return list(dict.fromkeys(mark.kind for mark in self.marks))

    @property
    def description(self) -> str:
        """The chart in one sentence per line, for screen readers."""
        return "; ".join(self._describe(line) for line in self.drawn_lines if not line.faint)

    def format_value(self, value: float) -> str:
        """Return the text of a y value."""
        return f"{100 * value:.3g}%" if self.percent else tick_label(value)

    def svg_x(self, x: float) -> str:
        """Return the SVG coordinate of an x value."""
        return f"{VIEW * self.x_axis.position(x):.1f}"

    def svg_points(self, line: ChartLine) -> list[str]:
        """Return the SVG coordinates of a line's points."""
        return [self._svg_point(x, y) for x, y in line.points]

    def svg_band(self, line: ChartLine) -> list[str]:
        """Return the SVG coordinates of the outline of a line's interval."""
        lows = [self._svg_point(x, low) for x, low, _ in line.interval]
        return lows + [self._svg_point(x, high) for x, _, high in reversed(line.interval)]

    def _svg_point(self, x: float, y: float) -> str:
        return f"{self.svg_x(x)},{VIEW * (1 - self.y_axis.position(y)):.1f}"

    def has_dots(self, line: ChartLine) -> bool:
        """Return whether each point of the line is marked."""
        return len(line.points) <= _MOST_DOTS

    @staticmethod
    def values(rows: Sequence[Sequence[float]]) -> str:
        """Return points or intervals as `charts.js` reads them: steps whole, other values with the digits of fp32."""
        return " ".join(",".join((f"{x:.12g}", *(f"{y:.8g}" for y in ys))) for x, *ys in rows)

    def _describe(self, line: ChartLine) -> str:
        values = [value for _, value in line.points]
        first, last, low, high = map(self.format_value, (values[0], values[-1], min(values), max(values)))
        return f"{line.name}: from {first} to {last}, min {low}, max {high}"
