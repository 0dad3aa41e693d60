"""The pages of runs: the list, one run, and several runs compared."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from sd3_light.checkpoint.lock import is_locked
from sd3_light.checkpoint.requests import SAVE_QUIT
from sd3_light.config.faults import UserError
from sd3_light.pages import READ_ONLY, Chart, render_template
from sd3_light.report.grids import load_grids
from sd3_light.report.run_charts import plain_line, smooth_line, validation_line, x_table
from sd3_light.report.run_log import QUICK_BYTES
from sd3_light.report.run_page import PREVIEW_NOTE, render_run_page
from sd3_light.report.verb import RunReport
from sd3_light.ui.config_diff import differing_keys
from sd3_light.ui.folders import Folders
from sd3_light.ui.run_queue import can_resume

# of lines in `charts.css`
_COLORS = 6
_DASHES = 5
_MOST_IN_LEGEND = 8  # lines; the list of the runs is a legend too
_STEP_CHARTS = {
    "loss": "Loss, smoothed",
    "grad_norm": "Gradient norm, smoothed",
    "lr": "Learning rate",
    "samples_per_second": "Samples per second, smoothed",
}

SORTINGS: dict[str, tuple[str, Callable[["RunRow"], object]]] = {
    "newest": ("last logged", lambda row: 0),  # as they are found
    "name": ("name", lambda row: (row.folder.name.lower(), row.folder)),
    "loss": ("loss", lambda row: row.loss),
    "validation": ("validation loss", lambda row: row.validation),
    "state": ("running first", lambda row: not row.report.is_running),
}
"""How the list of runs can be sorted: title and key."""


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
        step = self.report.last.get("step", {}).get("step", 0)
        total = self.report.begin.get("total", 0)
        return max(0.0, min(1.0, step / total)) if total else None

    @property
    def loss(self) -> float:
        """The smoothed loss at the end; infinite where none was logged, which sorts it to the end."""
        curve = self.report.steps.get("loss")
        return curve.smooth()[0][-1][1] if curve is not None and curve.x else math.inf

    @property
    def validation(self) -> float:
        """The validation loss that was logged last; infinite without one."""
        curves = [each["flow"] for each in self.report.evals.values() if "flow" in each]
        return curves[-1].last if curves and math.isfinite(curves[-1].last) else math.inf


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


def run_row(folders: Folders, run_id: str, quick_bytes: int = QUICK_BYTES) -> RunRow:
    """Return the row of a run; a log that cannot be read becomes the row's problem."""
    folder = folders.run(run_id)
    return _row(run_id, folder, lambda: folders.report(folder, quick_bytes))


def row_of(folders: Folders, run_id: str, folder: Path) -> RunRow:
    """Return the row of a run folder in a list, for which only the ends of its log are read."""
    return _row(run_id, folder, lambda: folders.ends(folder))


def _row(run_id: str, folder: Path, read: Callable[[], RunReport]) -> RunRow:
    try:
        report = read()
        problem = ""
    except (UserError, OSError) as error:
        report = RunReport(folder)
        problem = str(error)
    report.is_running = is_locked(folder)
    return RunRow(run_id, folder, report, problem)


def runs_page(folders: Folders, text: str = "", sort: str = "newest") -> str:
    """Return the list of all runs whose path contains a text."""
    if sort not in SORTINGS:
        raise UserError(f"unknown order {sort!r}; use one of {', '.join(SORTINGS)}")
    matching = {run_id: folder for run_id, folder in folders.runs().items() if text.lower() in str(folder).lower()}
    rows = [row_of(folders, run_id, folder) for run_id, folder in matching.items()]
    return render_template(
        "runs.html",
        rows=sorted(rows, key=SORTINGS[sort][1]),  # type: ignore[arg-type]
        roots=folders.roots,
        sortings=SORTINGS,
        text=text,
        sort=sort,
        served="/",
        live=True,
    )


def run_page(
    folders: Folders, run_id: str, console: str = "", notes: Sequence[str] = (), is_pending: bool = False
) -> str:
    """Return the page of a run: that of `sd3-light report`, with links to the grids instead of the grids themselves."""
    row = run_row(folders, run_id)
    if row.problem:
        raise UserError(row.problem)
    path = f"/runs/{run_id}"
    own_notes = list(notes)
    links = [(f"/samples?{urlencode({'run': run_id})}", "Samples over steps")]
    links += [] if READ_ONLY.get() else [(f"/playground?run={run_id}", "Draw"), (f"/share?run={run_id}", "Share")]
    controls = RunControls(
        path,
        bool(row.report.is_running),
        (row.folder / SAVE_QUIT).exists(),
        can_resume(row.folder) and (row.folder / "config.toml").is_file(),
        links,
        console,
        is_pending,
    )
    grids = load_grids(row.report, own_notes, lambda file, _: f"{path}/sample?file={quote(file.as_posix())}")
    return render_run_page(row.report, grids, own_notes, run_id, served="/", live=True, controls=controls)


def compare_page(folders: Folders, run_ids: Sequence[str]) -> str:
    """Return the curves of several runs, each quantity in one chart, and the keys of their configs that differ."""
    chosen = list(dict.fromkeys(run_ids))
    quick = QUICK_BYTES // max(1, len(chosen))  # of a log, so that the page opens soon
    rows = [row for run_id in chosen if not (row := run_row(folders, run_id, quick)).problem]
    if not rows:
        raise UserError("no run is chosen; mark some in the list of runs")
    names = _names(rows)
    notes: list[str] = [PREVIEW_NOTE] if any(row.report.is_preview for row in rows) else []
    return render_template(
        "compare.html",
        rows=[(names[row.id], row, _color(index)) for index, row in enumerate(rows)],
        charts=comparison_charts({names[row.id]: row.report for row in rows}),
        x_tables={names[row.id]: x_table(row.report, row.id) for row in rows},
        differing=differing_keys({names[row.id]: row.folder / "config.toml" for row in rows}, notes),
        samples=f"/samples?{urlencode([('run', row.id) for row in rows])}",
        notes=notes,
        served="/",
        live=True,
    )


def comparison_charts(reports: Mapping[str, RunReport]) -> list[Chart]:
    """Return one chart per quantity that a run has, with a line per run, which has the same color in all of them."""
    has_legend = len(reports) <= _MOST_IN_LEGEND
    colors = {name: _color(index) for index, name in enumerate(reports)}
    charts = []
    for field, title in _STEP_CHARTS.items():
        make_line = plain_line if field == "lr" else smooth_line
        lines = [
            make_line(name, report.steps[field], (name, field), colors[name])
            for name, report in reports.items()
            if field in report.steps
        ]
        zero = field in ("lr", "samples_per_second")
        charts.append(Chart(title, lines, include_zero=zero, wide=field == "loss", has_legend=has_legend))
    for key in dict.fromkeys(key for report in reports.values() for key in report.evals):
        for field, span in (("flow", "all t"), ("fixed", "t = 0.1 to 0.9")):
            evals = {name: report.evals[key] for name, report in reports.items() if field in report.evals.get(key, {})}
            lines = [validation_line(name, each, field, (name, ""), colors[name]) for name, each in evals.items()]
            title = f"{key[0] or 'Validation'}, {key[1] or 'all'} weights: mean over {span}"
            charts.append(Chart(title, lines, has_legend=has_legend))
    return [chart for chart in charts if chart.drawn_lines]


def _color(index: int) -> str:
    """Return the classes of the run with this number: a color and, of more runs than colors, dashes."""
    return f"c{index % _COLORS} d{index // _COLORS % _DASHES}"


def _names(rows: Sequence[RunRow]) -> dict[str, str]:
    """Return a name per run: its folder's, with its parents' where two are equal."""
    for levels in range(1, 10):
        names = {row.id: "/".join(row.folder.absolute().parts[-levels:]) for row in rows}
        if len(set(names.values())) == len(rows):
            break
    return names
