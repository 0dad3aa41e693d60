"""The pages of runs: the list, one run, and several runs compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from sd3_light.checkpoint.lock import is_locked
from sd3_light.checkpoint.requests import SAVE_QUIT
from sd3_light.config.faults import UserError
from sd3_light.formats import number
from sd3_light.pages import READ_ONLY, Chart, ChartLine, render_template
from sd3_light.report.curves import Curve
from sd3_light.report.grids import load_grids
from sd3_light.report.run_page import render_run_page
from sd3_light.report.verb import RunReport
from sd3_light.ui.folders import Folders

_COLORS = 6  # of lines in `charts.css`
_STEP_CHARTS = {
    "loss": "Loss, smoothed",
    "grad_norm": "Gradient norm, smoothed",
    "lr": "Learning rate",
    "samples_per_second": "Samples per second, smoothed",
}
X_AXES = {"step": "step", "samples": "samples seen"}
"""The x axes of compared runs."""


@dataclass(frozen=True)
class RunRow:
    """A row in the list of runs; ``problem`` says why its log cannot be read."""

    id: str
    folder: Path
    report: RunReport
    problem: str = ""

    @property
    def status(self) -> str:
        """What the log says, and whether a process trains in the folder."""
        if self.report.is_running and "step" not in self.report.last:
            return "starting"
        return self.problem or self.report.status

    @property
    def share(self) -> float | None:
        """The share of the steps that are done."""
        step, total = self.report.last.get("step", {}).get("step", 0), self.report.begin.get("total", 0)
        return max(0.0, min(1.0, step / total)) if total else None

    @property
    def loss(self) -> str:
        """The smoothed loss at the end."""
        curve = self.report.steps.get("loss")
        return number(curve.smooth()[0][-1][1]) if curve is not None and curve.x else ""

    @property
    def validation(self) -> str:
        """The last validation loss of the first set, with the weights that were evaluated last."""
        curves = [each["flow"] for each in self.report.evals.values() if "flow" in each]
        return number(curves[-1].last) if curves else ""


@dataclass(frozen=True)
class RunControls:
    """What a reader can do with a run."""

    path: str
    is_running: bool
    is_stopping: bool
    can_resume: bool
    links: Sequence[tuple[str, str]]
    console: str = ""
    is_pending: bool = False


def run_row(folders: Folders, run_id: str) -> RunRow:
    """Return the row of a run; a log that cannot be read becomes the row's problem."""
    return row_of(folders, run_id, folders.run(run_id))


def row_of(folders: Folders, run_id: str, folder: Path) -> RunRow:
    """Return the row of a run folder."""
    problem = ""
    try:
        report = folders.report(folder)
    except (UserError, OSError) as error:
        report, problem = RunReport(folder), str(error)
    report.is_running = is_locked(folder)
    return RunRow(run_id, folder, report, problem)


def runs_page(folders: Folders, notes: Sequence[str] = ()) -> str:
    """Return the list of all runs."""
    rows = [row_of(folders, run_id, folder) for run_id, folder in folders.runs().items()]
    roots = ", ".join(map(str, folders.roots))
    return render_template("runs.html", rows=rows, roots=roots, notes=list(notes), served="/", live=True)


def run_page(
    folders: Folders, run_id: str, console: str = "", notes: Sequence[str] = (), is_pending: bool = False
) -> str:
    """Return the page of a run: that of `sd3-light report`, with links to the grids instead of the grids themselves."""
    row = run_row(folders, run_id)
    if row.problem:
        raise UserError(row.problem)
    path, own_notes = f"/runs/{run_id}", list(notes)
    links = [(f"/samples?{urlencode({'run': run_id})}", "Samples over steps")]
    links += [] if READ_ONLY.get() else [(f"/playground?run={run_id}", "Draw"), (f"/share?run={run_id}", "Share")]
    controls = RunControls(
        path,
        bool(row.report.is_running),
        (row.folder / SAVE_QUIT).exists(),
        any((row.folder / "checkpoints").glob("step-*")) and (row.folder / "config.toml").is_file(),
        links,
        console,
        is_pending,
    )
    grids = load_grids(row.report, own_notes, lambda file, _: f"{path}/sample?file={quote(file.as_posix())}")
    return render_run_page(row.report, grids, own_notes, served="/", live=True, controls=controls)


def compare_page(folders: Folders, run_ids: Sequence[str], x: str = "step") -> str:
    """Return the curves of several runs, each quantity in one chart."""
    if x not in X_AXES:
        raise UserError(f"unknown x axis {x!r}; use one of {', '.join(X_AXES)}")
    rows = [row for run_id in dict.fromkeys(run_ids) if not (row := run_row(folders, run_id)).problem]
    if not rows:
        raise UserError("no run is chosen; mark some in the list of runs")
    names = _names(rows)
    query = urlencode([("run", row.id) for row in rows])
    links = [(f"/compare?{query}&x={each}", f"by {title}", each == x) for each, title in X_AXES.items()]
    return render_template(
        "compare.html",
        rows=list(zip(names.values(), rows, strict=True)),
        charts=comparison_charts({names[row.id]: row.report for row in rows}, x),
        links=links,
        samples=f"/samples?{query}",
        notes=[],
        served="/",
        live=True,
    )


def comparison_charts(reports: Mapping[str, RunReport], x: str) -> list[Chart]:
    """Return one chart per quantity that a run has, with a line per run."""
    charts = []
    for field, title in _STEP_CHARTS.items():
        curves = {name: report.steps[field] for name, report in reports.items() if field in report.steps}
        zero = field in ("lr", "samples_per_second")
        charts += _chart(title, curves, reports, x, smooth=field != "lr", wide=field == "loss", include_zero=zero)
    keys = dict.fromkeys(key for report in reports.values() for key in report.evals)
    for key in keys:
        for field, span in (("flow", "all t"), ("fixed", "t = 0.1 to 0.9")):
            curves = {
                name: report.evals[key][field] for name, report in reports.items() if field in report.evals.get(key, {})
            }
            title = f"{key[0] or 'Validation'}, {key[1] or 'all'} weights: mean over {span}"
            charts += _chart(title, curves, reports, x)
    return charts


def _chart(
    title: str,
    curves: Mapping[str, Curve],
    reports: Mapping[str, RunReport],
    x: str,
    smooth: bool = False,
    wide: bool = False,
    include_zero: bool = False,
) -> list[Chart]:
    """Return the chart of a quantity, none where no run has values; a run has the same color in all charts."""
    lines = []
    for index, (name, report) in enumerate(reports.items()):
        if name in curves:
            factor = _samples_per_step(report) if x == "samples" else 1.0
            points = curves[name].smooth()[0] if smooth else curves[name].points
            scaled = [(step * factor, value) for step, value in points]
            last = scaled[-1][1] if scaled else None
            lines.append(ChartLine(name, scaled, f"c{index % _COLORS}", last))
    has_points = any(line.points for line in lines)
    return [Chart(title, lines, x_name=X_AXES[x], wide=wide, include_zero=include_zero)] if has_points else []


def _samples_per_step(report: RunReport) -> float:
    step = report.last.get("step", {})
    return float(step["samples"]) / step["step"] if step.get("samples") and step.get("step") else 1.0


def _names(rows: Sequence[RunRow]) -> dict[str, str]:
    """Return a name per run: its folder's, with its parents' where two are equal."""
    for levels in range(1, 10):
        names = {row.id: "/".join(row.folder.absolute().parts[-levels:]) for row in rows}
        if len(set(names.values())) == len(rows):
            break
    return names
