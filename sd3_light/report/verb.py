"""The report stage: a run as a table (`run`, `render`) or as an HTML page (`write_run_page`), from its log."""

from pathlib import Path

from rich.text import Text

from sd3_light.formats import duration, number, plural, utc_time
from sd3_light.report.curves import Curve
from sd3_light.report.run_log import RunReport, read_run
from sd3_light.report.run_page import write_run_page
from sd3_light.runlog import ResultTable

__all__ = ["RunReport", "render", "run", "write_run_page"]


def run(folder: Path) -> RunReport:
    """Read the log.jsonl of a run. Steps that a resumed run repeated count once, as last logged."""
    return read_run(folder)


def render(report: RunReport) -> ResultTable:
    """Return a table with status, loss along the run, validation, speed, and the last checkpoint and export."""
    table = ResultTable("field", "value", title=Text(str(report.folder)))
    table.add_row("status", report.status)
    if report.segments:
        begin = report.segments[0].begin
        table.add_row("started", utc_time(begin["time"]))
        if "trains" in begin:
            table.add_row("trains", Text(str(begin["trains"])))
        if report.earlier_runs:
            table.add_row("earlier runs", f"{report.earlier_runs}, not shown")
        table.add_row("running time", f"{duration(report.seconds)}, {plural(len(report.resumes), 'resume')}")
    loss = report.steps.get("loss", Curve())
    size = len(loss.x)
    shares = (0.0, 0.25, 0.5, 0.75, 1.0) if size else ()
    for index in dict.fromkeys(round(share * (size - 1)) for share in shares):
        # the mean over a twentieth of the run, as single steps are noisy
        width = max(1, size // 20)
        start = min(index, size - width)
        values = loss.mean[start : start + width]
        table.add_row(f"loss near step {loss.x[index]:,.0f}", f"{sum(values) / len(values):.4f}")
    for names, curves in report.evals.items():
        if "flow" in curves:
            table.add_row(Text(f"validation loss ({', '.join(filter(None, names))})"), number(curves["flow"].last))
    step = report.last.get("step", {})
    if "samples" in step:
        table.add_row("samples seen", f"{step['samples']:,}")
    if "samples_per_second" in step:
        speed = f"{float(step['samples_per_second']):,.1f} samples/s"
        wait = f", data wait {float(step['data_wait']):.0%}" if "data_wait" in step else ""
        table.add_row("speed", speed + wait)
    if "mfu" in step:
        table.add_row("model FLOPs utilization", f"{float(step['mfu']):.1%}")
    if step:
        table.add_row("steps skipped (not finite)", str(report.skipped))
    for kind in ("checkpoint", "export", "sample"):
        if kind in report.last:
            table.add_row(f"last {kind}", Text(str(report.last[kind].get("file", ""))))
    for kind in ("checkpoint_failed", "export_failed"):
        if kind in report.last:
            last = report.last[kind]
            table.add_row(kind.replace("_", " "), Text(f"at step {last.get('step')}: {last.get('reason', '')}"))
    return table
