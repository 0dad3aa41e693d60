"""Axes have round ticks; charts draw every point and describe themselves in text."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd3_light.formats import tick_label
from sd3_light.pages import Chart, ChartLine, ChartMark
from sd3_light.pages.charts import Axis, fit_axis
from sd3_light.pages.html import environment

NUMBERS = st.floats(-1e38, 1e38)


@settings(deadline=None)  # the time of one example says nothing on a busy machine
@given(st.lists(NUMBERS, min_size=1), st.booleans())
def test_an_axis_covers_its_values_and_has_a_few_ticks(values: list[float], include_zero: bool) -> None:
    axis = fit_axis(values, include_zero)
    assert all(-1e-9 <= axis.position(value) <= 1 + 1e-9 for value in values)
    ticks = axis.ticks()
    assert 0 < len(ticks) <= 10
    assert all(-1e-6 <= axis.position(tick) <= 1 + 1e-6 for tick in ticks)
    if include_zero:
        assert -1e-9 <= axis.position(0.0) <= 1 + 1e-9


def test_ticks_are_round_and_their_labels_differ() -> None:
    chart = Chart("norm", [ChartLine("norm", [(0.0, 123.11), (1.0, 123.14)])])
    labels = [label for label, _ in chart.y_ticks]
    assert len(set(labels)) == len(labels) > 1
    assert Axis(0, 10_000).ticks() == [0, 2000, 4000, 6000, 8000, 10_000]
    assert Axis(0.43, 1.31).ticks() == pytest.approx([0.6, 0.8, 1.0, 1.2])
    assert Axis(0.2, 300, log=True).ticks() == [1, 10, 100]
    labels = ["0", "0.55", "1e-4", "2,500", "12.5k", "3M"]
    assert [tick_label(value) for value in (0, 0.55, 1e-4, 2500, 12_500, 3e6)] == labels


def test_the_axis_of_a_far_spike_is_logarithmic_and_of_equal_values_has_a_length() -> None:
    assert fit_axis([1.0, 1.1, 0.9, 400.0]).log
    assert not fit_axis([1.0, 1.1, 0.9, 4.0]).log
    assert not fit_axis([0.0, 1.0, 400.0]).log, "zero has no logarithm"
    assert not fit_axis([1.0, 1.1, 0.9, 400.0], include_zero=True).log
    axis = fit_axis([5.0, 5.0])
    assert axis.low < 5 < axis.high
    assert math.isclose(axis.position(5.0), 0.5)


def draw(chart: Chart) -> ET.Element:
    macros = environment().get_template("components/chart.html").module
    return ET.fromstring(macros.chart(chart))  # type: ignore[attr-defined]


def text_of(element: ET.Element | None) -> str:
    assert element is not None
    return " ".join("".join(element.itertext()).split())


def polyline_points(root: ET.Element) -> list[tuple[float, ...]]:
    polyline = root.find(".//polyline")
    assert polyline is not None
    return [tuple(map(float, pair.split(","))) for pair in polyline.attrib["points"].split()]


def test_a_chart_draws_every_point_at_its_position() -> None:
    points = polyline_points(draw(Chart("Loss", [ChartLine("raw", [(10, 3.0), (20, 1.0), (30, 2.0)])])))
    assert [x for x, _ in points] == [0, 500, 1000]
    # 5% of room above 3 and below 1, and y points down
    assert [y for _, y in points] == pytest.approx([45.5, 954.5, 500], abs=0.1)
    points = polyline_points(draw(Chart("Loss", [ChartLine("raw", [(10, 3.0), (20, 1.0)])], x_range=(0, 40))))
    assert [x for x, _ in points] == [250, 500], "of charts with the same range"


def test_a_chart_describes_itself_for_screen_readers() -> None:
    root = draw(Chart("A & B", [ChartLine("<raw>", [(1, 0.25), (2, 0.125)], last=0.125)], percent=True))
    svg = root.find(".//svg")
    assert svg is not None
    assert svg.attrib["role"] == "img"
    assert svg.findtext("title") == "A & B"
    assert svg.findtext("desc") == "<raw>: from 25% to 12.5%, min 12.5%, max 25%"
    assert text_of(root.find(".//div[@class='legend']")) == "<raw> 12.5%"


def test_the_plot_carries_the_values_and_the_scale_that_the_script_reads() -> None:
    points = [(0, 1.0), (4, 1.0), (12345678, 100.123456)]
    root = draw(Chart("Loss", [ChartLine("raw", points, source=("run", "loss", "mean"))], percent=True))
    plot, line = root.find(".//div[@class='plot']"), root.find(".//polyline")
    assert plot is not None
    assert line is not None
    assert line.attrib["data-values"] == "0,1 4,1 12345678,100.12346"
    assert [line.attrib[f"data-{name}"] for name in ("run", "curve", "part")] == ["run", "loss", "mean"]
    assert (plot.attrib["data-x"], plot.attrib["data-title"]) == ("0 12345678", "Loss")
    assert [float(value) for value in plot.attrib["data-y"].split()] == pytest.approx([1 / 1.1, 110.1358016])
    assert (plot.attrib["data-log"], plot.attrib["data-percent"]) == ("1", "1")


def test_marks_are_at_their_step_and_in_the_legend() -> None:
    marks = [ChartMark(20, "resumed then"), ChartMark(40, "not finite", "nonfinite")]
    root = draw(Chart("Loss", [ChartLine("raw", [(0, 1.0), (30, 2.0)])], marks=marks))
    lines = {line.attrib["class"]: line for line in root.iter("line") if line.attrib["class"] != "grid"}
    places = {kind: line.attrib["x1"] for kind, line in lines.items()}
    assert places == {"mark resume": "500.0", "mark nonfinite": "1000.0"}
    assert lines["mark resume"].findtext("title") == "resumed then"
    assert text_of(root.find(".//div[@class='legend']")) == "raw resumed not finite"


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9])
def test_a_single_point_is_a_dot(value: float) -> None:
    dots = draw(Chart("Loss", [ChartLine("raw", [(1, value)])])).find(".//path[@class='c0 dots']")
    assert dots is not None
    assert re.fullmatch(r"M500\.0,[\d.]+h0", dots.attrib["d"])


@pytest.mark.parametrize(
    ("marks", "text"), [([], "Nothing was logged."), ([ChartMark(1, "", "nonfinite")], "No value is finite.")]
)
def test_a_chart_without_points_says_so(marks: list[ChartMark], text: str) -> None:
    root = draw(Chart("Loss", [ChartLine("raw", [])], marks=marks))
    assert text in text_of(root)
    assert root.find(".//svg") is None


def test_an_interval_is_a_band_inside_the_axis() -> None:
    line = ChartLine("loss", [(0, 1.0), (1, 2.0)], interval=[(0, 0.5, 1.5), (1, 1.0, 5.0)])
    chart = Chart("Loss", [line])
    assert chart.y_axis.low < 0.5
    assert chart.y_axis.high > 5
    band = draw(chart).find(".//polygon")
    assert band is not None
    assert band.attrib["data-values"] == "0,0.5,1.5 1,1,5"
    ys = [float(pair.split(",")[1]) for pair in band.attrib["points"].split()]
    assert ys == [pytest.approx(1000 * (1 - chart.y_axis.position(y)), abs=0.1) for y in (0.5, 1.0, 5.0, 1.5)]
