"""Axes have round marks on them, charts hold every point and say in words what they show."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sd3_light.runlog.page.axes import Axis, axis_of, label
from sd3_light.runlog.page.curves import Chart, Line, Mark

NUMBERS = st.floats(-1e12, 1e12).filter(lambda value: value == 0 or abs(value) > 1e-12)


@given(st.lists(NUMBERS, min_size=1), st.booleans())
def test_an_axis_holds_its_values_and_a_few_marks(values: list[float], zero: bool) -> None:
    axis = axis_of(values, zero)
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in values)
    ticks = axis.ticks()
    assert 0 < len(ticks) <= 10
    assert all(-1e-6 <= axis.share(tick) <= 1 + 1e-6 for tick in ticks)
    if zero:
        assert -1e-9 <= axis.share(0.0) <= 1 + 1e-9


def test_marks_are_round() -> None:
    assert Axis(0, 10_000).ticks() == [0, 2000, 4000, 6000, 8000, 10_000]
    assert Axis(0.43, 1.31).ticks() == pytest.approx([0.6, 0.8, 1.0, 1.2])
    assert Axis(0.2, 300, log=True).ticks() == [1, 10, 100]
    assert [label(value) for value in (0, 0.55, 1e-4, 2500, 12_500, 3e6)] == [
        *("0", "0.55", "1e-4", "2,500", "12.5k", "3M")
    ]


def test_a_curve_with_a_far_spike_gets_a_logarithmic_axis() -> None:
    assert axis_of([1.0, 1.1, 0.9, 400.0]).log
    assert not axis_of([1.0, 1.1, 0.9, 4.0]).log
    assert not axis_of([0.0, 1.0, 400.0]).log, "zero has no logarithm"
    assert not axis_of([1.0, 1.1, 0.9, 400.0], zero=True).log


def drawn(chart: Chart) -> ET.Element:
    return ET.fromstring(chart.draw())


def test_a_chart_holds_every_point_where_it_belongs() -> None:
    root = drawn(Chart("Loss", [Line("raw", [(10, 3.0), (20, 1.0), (30, 2.0)])]))
    polyline = root.find(".//polyline")
    assert polyline is not None
    points = [tuple(map(float, pair.split(","))) for pair in polyline.attrib["points"].split()]
    assert [x for x, _ in points] == [0, 500, 1000]
    # 5% of room above 3 and below 1, and y goes downwards
    assert [y for _, y in points] == pytest.approx([45.5, 954.5, 500], abs=0.1)


def test_charts_of_one_span_have_one_x_axis() -> None:
    root = drawn(Chart("Loss", [Line("raw", [(10, 3.0), (20, 1.0)])], span=(0, 40)))
    polyline = root.find(".//polyline")
    assert polyline is not None
    assert [float(pair.split(",")[0]) for pair in polyline.attrib["points"].split()] == [250, 500]


def test_a_chart_says_what_it_shows() -> None:
    root = drawn(Chart("A & B", [Line("<raw>", [(1, 0.25), (2, 0.125)], last=0.125)], share=True))
    assert root.findtext(".//title") == "A & B"
    assert root.findtext(".//desc") == "<raw>: from 25% to 12.5%, least 12.5%, greatest 25%"
    legend = root.find(".//div[@class='legend']")
    assert legend is not None
    assert "".join(legend.itertext()) == "<raw> 12.5%"


def test_marks_stand_where_things_happened_and_are_in_the_legend() -> None:
    marks = [Mark(20, "resumed then"), Mark(40, "not finite", "broken")]
    root = drawn(Chart("Loss", [Line("raw", [(0, 1.0), (30, 2.0)])], marks=marks))
    lines = {line.attrib["class"]: line for line in root.iter("line") if line.attrib["class"] != "grid"}
    assert {kind: line.attrib["x1"] for kind, line in lines.items()} == {"resume": "500.0", "broken": "1000.0"}
    assert lines["resume"].findtext("title") == "resumed then"
    assert "resumed" in "".join(root.itertext())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9])
def test_a_single_point_is_a_dot(value: float) -> None:
    root = drawn(Chart("Loss", [Line("raw", [(1, value)])]))
    dots = root.find(".//path")
    assert dots is not None
    assert re.fullmatch(r"M500\.0,[\d.]+h0", dots.attrib["d"])


@pytest.mark.parametrize(("marks", "words"), [([], "Nothing was logged."), ([Mark(1, "", "broken")], "finite")])
def test_nothing_to_draw_is_said(marks: list[Mark], words: str) -> None:
    root = drawn(Chart("Loss", [Line("raw", [])], marks=marks))
    assert words in "".join(root.itertext())
    assert root.find(".//svg") is None


def test_axes_of_equal_values_have_a_length() -> None:
    axis = axis_of([5.0, 5.0])
    assert axis.low < 5 < axis.high
    assert math.isclose(axis.share(5.0), 0.5)
