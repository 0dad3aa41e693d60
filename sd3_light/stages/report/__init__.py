"""The report stage: a run on one screen (`run`, `render`) or as a page (`write_page`), from its log."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from sd3_light.stages.report.gather import RunReport, read_run
from sd3_light.stages.report.page import write_page
from sd3_light.stages.report.words import count, duration, moment, number, state

__all__ = ["RunReport", "render", "run", "write_page"]


def run(folder: Path) -> RunReport:
    """Read a run's log.jsonl. Steps that a resumed run repeated count once, as last logged."""
    return read_run(folder)


def render(report: RunReport) -> Table:
    """State, loss along the run, validation, speed, and where its last checkpoint and export are."""
    table = Table("what", "value", title=Text(str(report.folder)))
    for part in (_state, _losses, _evals, _speed, _files):
        part(report, table)
    return table


def _state(report: RunReport, table: Table) -> None:
    table.add_row("state", state(report))
    if report.parts:
        table.add_row("started", moment(report.parts[0].begin["time"]))
        if "trains" in report.parts[0].begin:
            table.add_row("trains", Text(str(report.parts[0].begin["trains"])))
        times = f"{duration(report.seconds)} at work, {count(len(report.resumes), 'resume')}"
        table.add_row("time", times)


def _losses(report: RunReport, table: Table) -> None:
    loss = report.steps.get("loss")
    if loss is None or not loss.x:
        return
    size = len(loss.x)
    places = dict.fromkeys(round(share * (size - 1)) for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    for at in places:
        # the mean over a twentieth of the run: single steps are noisy
        width = max(1, size // 20)
        start = min(at, size - width)
        near = loss.mean[start : start + width]
        table.add_row(f"loss near step {loss.x[at]:,.0f}", f"{sum(near) / len(near):.4f}")


def _evals(report: RunReport, table: Table) -> None:
    for (name, weights), curves in report.evals.items():
        if "flow" in curves:
            title = ", ".join(filter(None, (name, weights)))
            table.add_row(Text(f"validation loss ({title})"), number(curves["flow"].last))


def _speed(report: RunReport, table: Table) -> None:
    step = report.last.get("step", {})
    if "samples" in step:
        table.add_row("samples seen", f"{step['samples']:,}")
    if "samples_per_second" in step:
        speed = f"{float(step['samples_per_second']):,.1f} samples/s"
        wait = f", data wait {float(step['data_wait']):.0%}" if "data_wait" in step else ""
        table.add_row("speed", speed + wait)
    if "mfu" in step:
        table.add_row("model FLOPs utilisation", f"{float(step['mfu']):.1%}")
    if step:
        table.add_row("steps skipped (not finite)", str(report.skipped))


def _files(report: RunReport, table: Table) -> None:
    for kind in ("checkpoint", "export", "sample"):
        if kind in report.last:
            table.add_row(f"last {kind}", Text(str(report.last[kind].get("file", ""))))
    for kind in ("checkpoint_failed", "export_failed"):
        if kind in report.last:
            last = report.last[kind]
            table.add_row(kind.replace("_", " "), Text(f"at step {last.get('step')}: {last.get('reason', '')}"))
