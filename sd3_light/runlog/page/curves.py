"""Curves as inline SVG that fits any width: the drawing stretches, its words are HTML and do not."""

from collections.abc import Sequence
from dataclasses import dataclass

from sd3_light.runlog.page.axes import Axis, axis_of, label
from sd3_light.runlog.page.html import Html, tag

_FEW = 40  # points: so few are marked each
_GRID = 1000  # units of the drawing, each way

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A curve: what it is called, where it goes, and which colour (a class of the style) it has."""

    name: str
    points: Sequence[Point]
    colour: str = "c0"
    last: float | None = None
    """The value beside its name; None: none."""
    faint: bool = False


@dataclass(frozen=True)
class Mark:
    """A place on the x axis that is worth knowing."""

    x: float
    words: str
    kind: str = "resume"


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis. ``share`` values are shown in per cent; ``zero`` keeps zero on the y axis; ``span`` is
    on the x axis, so that charts of one page can be compared."""

    title: str
    lines: Sequence[Line]
    remark: str = ""
    marks: Sequence[Mark] = ()
    zero: bool = False
    share: bool = False
    span: Sequence[float] = ()
    x_name: str = "step"

    def draw(self) -> Html:
        """The chart with its legend; a note where there is nothing to draw."""
        lines = [line for line in self.lines if line.points]
        head = [tag("h3", self.title), *([tag("p", self.remark, class_="soft")] if self.remark else [])]
        if not lines:
            broken = any(mark.kind == "broken" for mark in self.marks)
            words = "No value was finite." if broken else "Nothing was logged."
            return tag("div", *head, tag("p", words, class_="soft"), class_="chart")
        x, y = _x_axis(self), axis_of([value for line in lines for _, value in line.points], self.zero)
        return tag("div", *head, _legend(lines, self), _plot(self, lines, x, y), class_="chart")

    def text(self, value: float) -> str:
        """A value of the y axis."""
        return f"{100 * value:.3g}%" if self.share else label(value)


def _x_axis(chart: Chart) -> Axis:
    """It ends where the data end, if they have a length."""
    places = [at for line in chart.lines for at, _ in line.points]
    places += [*chart.span, *(mark.x for mark in chart.marks)]
    low, high = min(places), max(places)
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def _legend(lines: Sequence[Line], chart: Chart) -> Html:
    entries = []
    for line in lines:
        value = [] if line.last is None else [" ", tag("b", chart.text(line.last))]
        swatch = tag("i", class_=f"{line.colour}{' faint' if line.faint else ''}")
        entries.append(tag("span", swatch, line.name, *value))
    names = {"resume": "resumed", "broken": "not finite"}
    kinds = dict.fromkeys(mark.kind for mark in chart.marks)
    entries += [tag("span", tag("i", class_=kind), names[kind]) for kind in kinds]
    return tag("div", *entries, class_="legend")


def _plot(chart: Chart, lines: Sequence[Line], x: Axis, y: Axis) -> Html:
    rows = [tag("span", chart.text(tick), style=f"bottom:{_percent(y.share(tick))}") for tick in y.ticks()]
    columns = [tag("span", label(tick), style=f"left:{_percent(x.share(tick))}") for tick in _x_ticks(x)]
    return tag(
        "div",
        tag("div", *rows, class_="ys", aria_hidden="true"),
        tag("div", _drawing(chart, lines, x, y), class_="area"),
        tag("div", *columns, class_="xs", aria_hidden="true"),
        tag("div", f"{chart.x_name}{', logarithmic y axis' if y.log else ''}", class_="axis"),
        class_="plot",
        data_x=f"{x.low!r} {x.high!r}",
        data_y=f"{y.low!r} {y.high!r}{' log' if y.log else ''}",
        data_share="1" if chart.share else None,
        data_name=chart.x_name,
    )


def _x_ticks(x: Axis) -> list[float]:
    whole = [tick for tick in x.ticks() if tick == round(tick)]
    return whole or [x.low]


def _drawing(chart: Chart, lines: Sequence[Line], x: Axis, y: Axis) -> Html:
    def at(point: Point) -> str:
        return f"{_GRID * x.share(point[0]):.1f},{_GRID * (1 - y.share(point[1])):.1f}"

    grid = [_level(_GRID * (1 - y.share(tick))) for tick in y.ticks()]
    marks = [_mark(_GRID * x.share(mark.x), mark) for mark in chart.marks]
    curves = []
    for line in lines:
        kind = f"{line.colour}{' faint' if line.faint else ''}"
        curves.append(tag("polyline", points=" ".join(map(at, line.points)), class_=kind, data_name=line.name))
        if len(line.points) <= _FEW:
            dots = "".join(f"M{at(point)}h0" for point in line.points)
            curves.append(tag("path", d=dots, class_=f"{kind} dots"))
    words = "; ".join(_describe(chart, line) for line in lines if not line.faint)
    about = [tag("title", chart.title), tag("desc", words)]
    box = f"0 0 {_GRID} {_GRID}"
    return tag("svg", *about, *grid, *marks, *curves, viewBox=box, preserveAspectRatio="none", role="img")


def _level(y: float) -> Html:
    return tag("line", x1=0, x2=_GRID, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid")


def _mark(x: float, mark: Mark) -> Html:
    # what was not finite is a tick at the top, a resume goes all the way
    low = _GRID if mark.kind == "resume" else 40
    return tag("line", tag("title", mark.words), x1=f"{x:.1f}", x2=f"{x:.1f}", y1=0, y2=low, class_=mark.kind)


def _describe(chart: Chart, line: Line) -> str:
    values = [value for _, value in line.points]
    first, last, low, high = map(chart.text, (values[0], values[-1], min(values), max(values)))
    return f"{line.name}: from {first} to {last}, least {low}, greatest {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
