"""The charts of the page: which curves of a run stand together, and what is said of them."""

from collections.abc import Sequence

from sd3_light.runlog.page.curves import Chart, Line, Mark
from sd3_light.runlog.page.html import Html, tag
from sd3_light.stages.report.gather import RunReport
from sd3_light.stages.report.thin import Curve
from sd3_light.stages.report.words import moment

_MOST_MARKS = 60
_RAMP = tuple(f"q{at}" for at in range(1, 11))
_COLOURS = tuple(f"c{at}" for at in range(6))


def losses(report: RunReport) -> list[Html]:
    """The loss, its parts, and the loss by timestep."""
    charts = [_single(report, "loss", "Loss")]
    parts = [(name, title) for name, title in _PARTS if name in report.steps]
    if len(parts) > 1:
        charts.append(_chart(report, "Its parts", _smoothed(report, parts), "Smoothed the same way."))
    bands = sorted(name for name in report.steps if name.startswith("band/"))
    if bands:
        names = [(name, f"t {name.removeprefix('band/')}") for name in bands]
        colours = [_ramp(name.removeprefix("band/").partition("-")[0], first=0) for name in bands]
        remark = "The flow loss of samples by their time t: near 0 hardly any noise, near 1 noise only. Smoothed."
        charts.append(_chart(report, "Loss by timestep", _smoothed(report, names, colours), remark))
    return _wide_first(charts)


def validation(report: RunReport) -> list[Html]:
    """The validation loss of every set: its mean by weights, then at each quantile of t."""
    charts = []
    for name in dict.fromkeys(name for name, _ in report.evals):
        kinds = {weights: curves for (of, weights), curves in report.evals.items() if of == name}
        lines = [
            _line(weights or "weights", curves["flow"], colour)
            for (weights, curves), colour in zip(kinds.items(), _COLOURS * len(kinds), strict=False)
            if "flow" in curves
        ]
        charts.append(_chart(report, f"{name or 'Validation'}: mean over all t", lines))
        for weights, curves in kinds.items():
            times = [key.removeprefix("flow@") for key in curves if key.startswith("flow@")]
            lines = [_line(f"t {time}", curves[f"flow@{time}"], _ramp(time)) for time in times]
            if lines:
                of = f" with {weights} weights" if weights else ""
                charts.append(_chart(report, f"{name or 'Validation'}: at each t,{of}".rstrip(","), lines))
    return [chart.draw() for chart in charts]


def learning(report: RunReport) -> list[Html]:
    """What moves the weights."""
    charts = []
    if "lr" in report.steps:
        charts.append(_chart(report, "Learning rate", [_line("lr", report.steps["lr"], "c0")], zero=True))
    if "grad_norm" in report.steps:
        charts.append(_single(report, "grad_norm", "Gradient norm", "Before clipping."))
    if "param_norm" in report.steps:
        charts.append(_chart(report, "Parameter norm", [_line("norm", report.steps["param_norm"], "c0")]))
    decays = sorted(name for name in report.steps if name.startswith("ema_decay/"))
    if decays:
        lines = [
            _line(name.removeprefix("ema_decay/"), report.steps[name], colour)
            for name, colour in zip(decays, _COLOURS * len(decays), strict=False)
        ]
        charts.append(_chart(report, "EMA decay", lines))
    return [chart.draw() for chart in charts]


def speed(report: RunReport) -> list[Html]:
    """How fast it goes, and what it waits for."""
    singles = (
        ("samples_per_second", "Samples a second", "All GPUs together.", True, False),
        ("data_wait", "Waiting for data", "Share of the time.", True, True),
        ("mfu", "Model FLOPs utilisation", "Of the device's peak.", True, True),
        ("tflops_per_gpu", "TFLOP/s a GPU", "", True, False),
    )
    return [_single(report, *each).draw() for each in singles if each[0] in report.steps]


def memory(report: RunReport) -> list[Html]:
    """GPU and host memory."""
    charts = []
    lines = [_peaks(title, report.steps[name], colour) for name, title, colour in _GPU if name in report.steps]
    if lines:
        charts.append(_chart(report, "GPU memory, GiB", lines, "Of the main process's GPU.", zero=True))
    if "host_memory_gib" in report.steps:
        lines = [_peaks("host", report.steps["host_memory_gib"], "c2")]
        charts.append(_chart(report, "Host memory, GiB", lines, zero=True))
    return [chart.draw() for chart in charts]


_PARTS = (("flow", "flow"), ("text_recon", "text reconstruction"))
_GPU = (("gpu_memory_gib", "allocated", "c0"), ("gpu_reserved_gib", "reserved", "c1"))


def _chart(
    report: RunReport,
    title: str,
    lines: Sequence[Line],
    remark: str = "",
    broken: Sequence[float] = (),
    zero: bool = False,
    share: bool = False,
) -> Chart:
    marks = [Mark(step, f"resumed {moment(time)}") for step, time in report.resumes[-_MOST_MARKS:]]
    marks += [Mark(x, "not finite", "broken") for x in broken]
    return Chart(title, lines, remark, marks, zero, share, report.span)


def _single(
    report: RunReport, name: str, title: str, remark: str = "", zero: bool = False, share: bool = False
) -> Chart:
    """One noisy curve: all values faint behind the smoothed ones, unless they are too few to be smoothed."""
    curve = report.steps.get(name, Curve())
    smooth, records = curve.smooth()
    lines = [Line("smoothed" if records > 1 else "logged", smooth, "c0", _last(smooth))]
    if records > 1:
        lines.insert(0, Line("logged", curve.extremes, "c0", faint=True))
        behind = "every one" if curve.per == 1 else f"the least and the greatest of each {curve.per:,}"
        remark += f" Bold: the mean of the {records:,} logged values around; faint: {behind}."
    return _chart(report, title, lines, remark.strip(), curve.broken, zero, share)


def _smoothed(
    report: RunReport, names: Sequence[tuple[str, str]], colours: Sequence[str] = ("c0", "c1", "c2")
) -> list[Line]:
    lines = []
    for (name, title), colour in zip(names, list(colours) * len(names), strict=False):
        smooth, _ = report.steps[name].smooth()
        lines.append(Line(title, smooth, colour, _last(smooth)))
    return lines


def _line(name: str, curve: Curve, colour: str) -> Line:
    return Line(name, curve.points, colour, _last(curve.points))


def _peaks(name: str, curve: Curve, colour: str) -> Line:
    """What must fit is the most of it, not its mean."""
    return Line(name, curve.extremes, colour, _last(curve.extremes))


def _ramp(time: str, first: int = 1) -> str:
    """The colour of a time t in tenths, the ``first`` of which is the coldest."""
    try:
        at = round(10 * float(time)) - first
    except ValueError:
        at = 0
    return _RAMP[min(len(_RAMP) - 1, max(0, at))]


def _last(points: Sequence[tuple[float, float]]) -> float | None:
    return points[-1][1] if points else None


def _wide_first(charts: Sequence[Chart]) -> list[Html]:
    first, *others = [chart.draw() for chart in charts]
    return [tag("div", first, class_="wide"), *others]
