"""The charts of the page: which curves share a chart, and their hints."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sd3_light.formats import utc_time
from sd3_light.pages import Chart, ChartLine, ChartMark
from sd3_light.report.curves import Curve
from sd3_light.report.run_log import RunReport
from sd3_light.runlog.log import LOSS_TERMS

Points = Sequence[tuple[float, float]]

_MOST_MARKS = 60
_MOST_ROWS = 300  # of a table of x values
_QUANTILE = 1.96  # of a 95% interval, in standard errors
_COLORS = tuple(f"c{index}" for index in range(6))
_RAMP = tuple(f"q{index}" for index in range(1, 11))  # from low t (blue) to high t (red)
_MEANS = (
    ("flow", "all t", ""),
    ("fixed", "t = 0.1 to 0.9", "Comparable between runs with different distributions of t."),
)
_METRICS = {"frechet": "Frechet distance", "kid": "KID", "distance": "distance to truth"}
_METRICS |= {name: name for name in ("precision", "recall", "retrieval")}
_GPU_MEMORY = {"gpu_memory_gib": "allocated", "gpu_reserved_gib": "reserved"}


def loss_charts(report: RunReport) -> list[Chart]:
    """Return the loss, its terms, and the loss by timestep."""
    charts = [_noisy_chart(report, "loss", "Loss", wide=True)]
    terms = {name: title for name, title in LOSS_TERMS.items() if name in report.steps}
    if len(terms) > 1:
        lines = [
            smooth_line(title, report.steps[name], ("", name), _COLORS[index % len(_COLORS)])
            for index, (name, title) in enumerate(terms.items())
        ]
        charts.append(_chart(report, "Loss terms", lines, "Smoothed like the loss."))
    bands = _group(report, "band")
    if bands:
        # bands are named by their range of t: "0.0-0.1" is the first
        lines = [
            smooth_line(f"t {band}", curve, ("", f"band/{band}"), _ramp_color(band.partition("-")[0], first=0))
            for band, curve in bands.items()
        ]
        hint = "The flow loss of samples by their timestep t: little noise near 0, pure noise near 1. Smoothed."
        charts.append(_chart(report, "Loss by timestep", lines, hint))
    return charts


def validation_charts(report: RunReport) -> list[Chart]:
    """Return the validation loss of every set: its mean over t for all weights, then at each t."""
    charts = []
    for name in dict.fromkeys(name for name, _ in report.evals):
        by_weights = {weights: curves for (of, weights), curves in report.evals.items() if of == name}
        for field, span, hint in _MEANS:
            means = {weights or "weights": each for weights, each in by_weights.items() if field in each}
            if means or field == "flow":
                lines = [
                    validation_line(weights, each, field, ("", ""), _COLORS[index % len(_COLORS)])
                    for index, (weights, each) in enumerate(means.items())
                ]
                band = " Band: 95% interval over the samples." if any(line.interval for line in lines) else ""
                charts.append(_chart(report, f"{name or 'Validation'}: mean over {span}", lines, (hint + band).strip()))
        for weights, curves in by_weights.items():
            times = [key.removeprefix("flow@") for key in curves if key.startswith("flow@")]
            if times:
                lines = _lines({f"t {t}": curves[f"flow@{t}"].points for t in times}, [_ramp_color(t) for t in times])
                suffix = f", {weights} weights" if weights else ""
                charts.append(_chart(report, f"{name or 'Validation'}: at each t{suffix}", lines))
    return [*charts, *_metric_charts(report)]


def _metric_charts(report: RunReport) -> Iterator[Chart]:
    """Yield the measurements against true images, each with its interval."""
    for (name, weights), curves in report.metrics.items():
        for metric, title in _METRICS.items():
            if f"{metric}/value" in curves:
                line = _line(title, curves[f"{metric}/value"].points, "c0")
                ends = [
                    dict(curves[f"{metric}/{end}"].points) for end in ("low", "high") if f"{metric}/{end}" in curves
                ]
                shared = [x for x, _ in line.points if all(x in each for each in ends)] if len(ends) == 2 else []
                line = replace(line, interval=[(x, ends[0][x], ends[1][x]) for x in shared])
                hint = "Against true images." + (" Band: 95% interval." if shared else "")
                yield _chart(report, f"{name}: {title}, {weights} weights", [line], hint)


def reward_charts(report: RunReport) -> list[Chart]:
    """Return the score of the images that the run drew, their diversity, and the share of time that drawing took."""
    titles = {
        "reward": ("Score of drawn images", "Mean over all images of a draw."),
        "diversity": ("Diversity", "Mean distance of two images of a prompt, in latents."),
        "distance": ("Distance from the start", "Squared difference of the predictions at drawn images."),
        "draw_share": ("Drawing", "Share of the time, with scoring."),
    }
    return [
        _chart(report, title, _lines({"value": curve.points}), hint, percent=name == "draw_share")
        for name, (title, hint) in titles.items()
        if (curve := report.rewards.get(name)) is not None and curve.points
    ]


def optimization_charts(report: RunReport) -> list[Chart]:
    """Return the learning rate, the norms and the EMA decays."""
    charts = []
    if "lr" in report.steps:
        line = plain_line("lr", report.steps["lr"], ("", "lr"), "c0")
        charts.append(_chart(report, "Learning rate", [line], include_zero=True))
    if "grad_norm" in report.steps:
        charts.append(_noisy_chart(report, "grad_norm", "Gradient norm", "Before clipping."))
    if "param_norm" in report.steps:
        line = plain_line("norm", report.steps["param_norm"], ("", "param_norm"), "c0")
        charts.append(_chart(report, "Parameter norm", [line]))
    decays = _group(report, "ema_decay")
    if decays:
        charts.append(_chart(report, "EMA decay", _lines({name: curve.points for name, curve in decays.items()})))
    return charts


def speed_charts(report: RunReport) -> list[Chart]:
    """Return throughput, data wait and utilization."""
    on_cpu = any(segment.begin.get("device") == "CPU" for segment in report.segments)
    device, devices = ("process", "processes") if on_cpu else ("GPU", "GPUs")
    charts = (
        ("samples_per_second", "Samples per second", f"All {devices} together.", False),
        (
            "data_wait",
            "Data wait",
            f"Share of the time in which the {device} waited for {'data' if on_cpu else 'the host'}.",
            True,
        ),
        ("mfu", "Model FLOPs utilization", "Share of the device's peak.", True),
        ("tflops_per_gpu", f"TFLOP/s per {device}", "", False),
    )
    return [
        _noisy_chart(report, name, title, hint, include_zero=True, percent=percent)
        for name, title, hint, percent in charts
        if name in report.steps
    ]


def memory_charts(report: RunReport) -> list[Chart]:
    """Return GPU and host memory: the extremes, because the peak is what must fit."""
    charts = []
    gpu = {title: report.steps[name].extremes for name, title in _GPU_MEMORY.items() if name in report.steps}
    if gpu:
        hint = "GPU of the main process."
        charts.append(_chart(report, "GPU memory, GiB", _lines(gpu), hint, include_zero=True))
    if "host_memory_gib" in report.steps:
        lines = _lines({"host": report.steps["host_memory_gib"].extremes}, ["c2"])
        charts.append(_chart(report, "Host memory, GiB", lines, include_zero=True))
    return charts


def x_table(report: RunReport, run_id: str = "") -> dict[str, Any]:
    """Return how steps become samples and hours since the start, and whether a server has finer curves."""
    times = report.steps["time"].extremes if "time" in report.steps else []
    samples = dict(report.steps["samples"].extremes) if "samples" in report.steps else {}
    begin = report.segments[0].begin if report.segments else {}
    start = begin.get("time", times[0][1] if times else 0.0)
    rows = [(begin.get("step", 0), begin.get("samples", 0) if samples else begin.get("step", 0), 0.0)]
    for step, time in _even(times, _MOST_ROWS):
        seen = samples.get(step, rows[-1][1]) if samples else step
        rows.append((max(step, rows[-1][0]), max(seen, rows[-1][1]), max(round((time - start) / 3600, 6), rows[-1][2])))
    rows = rows[1:] or rows  # the axis begins where the curves do
    reduced = any(curve.bin_size > 1 for curve in report.steps.values())
    return {"id": run_id, "reduced": reduced, "rows": rows}


def _even(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return evenly chosen points, with the last one."""
    chosen = list(points[:: max(1, len(points) // most)])
    return chosen if not points or chosen[-1] == points[-1] else [*chosen, points[-1]]


def _group(report: RunReport, group: str) -> dict[str, Curve]:
    names = sorted(name for name in report.steps if name.startswith(f"{group}/"))
    return {name.removeprefix(f"{group}/"): report.steps[name] for name in names}


def _chart(
    report: RunReport,
    title: str,
    lines: Sequence[ChartLine],
    hint: str = "",
    nonfinite: Iterable[float] = (),
    **options: Any,
) -> Chart:
    """Return a chart over the steps of the run; ``options`` are other fields of `Chart`."""
    marks = [ChartMark(step, f"resumed {utc_time(time)}") for step, time in report.resumes[-_MOST_MARKS:]]
    marks += [ChartMark(x, "not finite", "nonfinite") for x in nonfinite]
    return Chart(title, lines, hint, marks, x_range=report.step_range, **options)


def _noisy_chart(report: RunReport, name: str, title: str, hint: str = "", **options: bool) -> Chart:
    """Return a chart of one curve: all values faint behind the smoothed ones, unless they are too few to smooth."""
    curve = report.steps.get(name, Curve())
    _, window = curve.smooth()
    lines = [smooth_line("smoothed" if window > 1 else "logged", curve, ("", name), "c0")]
    if window > 1:
        lines.insert(0, ChartLine("logged", curve.extremes, "c0", faint=True, source=("", name, "extremes")))
        faint = "all values" if curve.bin_size == 1 else f"the lowest and highest of each {curve.bin_size:,}"
        hint += f" Bold: moving mean of {window:,} logged values; faint: {faint}."
    return _chart(report, title, lines, hint.strip(), curve.nonfinite, **options)


def smooth_line(name: str, curve: Curve, source: tuple[str, str], color: str) -> ChartLine:
    """Return the smoothed line of a curve; ``source`` is its run and its name."""
    return replace(_line(name, curve.smooth()[0], color), raw=curve.points, source=(*source, "mean"))


def plain_line(name: str, curve: Curve, source: tuple[str, str], color: str) -> ChartLine:
    """Return the line of a curve that is not smoothed; see `smooth_line`."""
    return replace(_line(name, curve.points, color), source=(*source, "mean"))


def validation_line(
    name: str, curves: Mapping[str, Curve], field: str, source: tuple[str, str], color: str
) -> ChartLine:
    """Return the line of a validation loss with its 95% interval, where its standard error was logged."""
    errors = dict(curves.get(f"{field}_se", Curve()).points)
    points = [(x, y, _QUANTILE * errors[x]) for x, y in curves[field].points if x in errors]
    line = plain_line(name, curves[field], source, color)
    return replace(line, interval=[(x, y - width, y + width) for x, y, width in points])


def _line(name: str, points: Points, color: str) -> ChartLine:
    return ChartLine(name, points, color, last=points[-1][1] if points else None)


def _lines(points: Mapping[str, Points], colors: Sequence[str] = _COLORS) -> list[ChartLine]:
    return [_line(name, line, colors[index % len(colors)]) for index, (name, line) in enumerate(points.items())]


def _ramp_color(t: str, first: int = 1) -> str:
    """Return the color of a time t in tenths; ``first`` is the number of tenths of the first color."""
    try:
        index = round(10 * float(t)) - first
    except (ValueError, OverflowError):  # OverflowError: infinity
        index = 0
    return _RAMP[min(len(_RAMP) - 1, max(0, index))]
