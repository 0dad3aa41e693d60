"""Line charts: the data, and the geometry that `components/chart.html` draws.

The SVG stretches to any width; labels are HTML on top of it and keep their size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sd3_light.pages.axes import Axis, fit_axis
from sd3_light.pages.formats import tick_label

VIEW = 1000
"""Width and height of the SVG's coordinates."""

_MOST_DOTS = 40  # a line with at most this many points has a dot on each

Point = tuple[float, float]


@dataclass(frozen=True)
class ChartLine:
    """A curve; ``color`` is a class of `charts.css`, ``last`` the value beside its name in the legend."""

    name: str
    points: Sequence[Point]
    color: str = "c0"
    last: float | None = None
    faint: bool = False

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

    @cached_property
    def drawn_lines(self) -> list[ChartLine]:
        """The lines that have points."""
        return [line for line in self.lines if line.points]

    @cached_property
    def x_axis(self) -> Axis:
        """The x axis; it ends exactly where the data end."""
        values = [x for line in self.lines for x, _ in line.points]
        values += [*self.x_range, *(mark.x for mark in self.marks)]
        low, high = min(values), max(values)
        return Axis(low, high) if high > low else Axis(low - 1, high + 1)

    @cached_property
    def y_axis(self) -> Axis:
        """The y axis."""
        return fit_axis([y for line in self.lines for _, y in line.points], self.include_zero)

    @property
    def x_ticks(self) -> list[tuple[str, float]]:
        """Label and position (0 to 1) of whole x values."""
        ticks = [tick for tick in self.x_axis.ticks() if tick == round(tick)] or [self.x_axis.low]
        return [(tick_label(tick), self.x_axis.position(tick)) for tick in ticks]

    @property
    def y_ticks(self) -> list[tuple[str, float]]:
        """Label and position (0 to 1) of round y values."""
        return [(self.format_value(tick), self.y_axis.position(tick)) for tick in self.y_axis.ticks()]

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
        return [f"{self.svg_x(x)},{VIEW * (1 - self.y_axis.position(y)):.1f}" for x, y in line.points]

    def has_dots(self, line: ChartLine) -> bool:
        """Return whether each point of the line is marked."""
        return len(line.points) <= _MOST_DOTS

    def _describe(self, line: ChartLine) -> str:
        values = [value for _, value in line.points]
        first, last, low, high = map(self.format_value, (values[0], values[-1], min(values), max(values)))
        return f"{line.name}: from {first} to {last}, min {low}, max {high}"
