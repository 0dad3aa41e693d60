"""The report stage: a run on one screen, from its log."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from sd3_light.runlog import read_log


@dataclass
class RunReport:
    """The last of each kind of event, and the loss along the way."""

    folder: Path
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0


def run(folder: Path) -> RunReport:
    """Read a run's log.jsonl. Steps that a resumed run repeated count once, as last logged."""
    report = RunReport(folder)
    steps: dict[int, float] = {}
    for event in read_log(folder / "log.jsonl"):
        report.last[event["event"]] = event
        if event["event"] == "step":
            steps[event["step"]] = float(event["loss"])
            report.skipped = event["skipped"]
    report.losses = sorted(steps.items())
    return report


def render(report: RunReport) -> Table:
    """Loss along the run, speed, and where its last checkpoint and export are."""
    table = Table("what", "value", title=str(report.folder))
    size = len(report.losses)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        if size:
            # the mean over a twentieth of the run: single steps are noisy
            at, width = round(share * (size - 1)), max(1, size // 20)
            start = min(at, size - width)
            near = [loss for _, loss in report.losses[start : start + width]]
            table.add_row(f"loss near step {report.losses[at][0]}", f"{sum(near) / len(near):.4f}")
    if step := report.last.get("step"):
        table.add_row("samples seen", f"{step['samples']:,}")
        table.add_row("speed", f"{step['samples_per_second']:,.1f} samples/s, data wait {step['data_wait']:.0%}")
        table.add_row("steps skipped (not finite)", str(report.skipped))
    if evaluation := report.last.get("eval"):
        table.add_row(f"validation loss ({evaluation['set']})", f"{evaluation['flow']:.4f}")
    for kind in ("checkpoint", "export", "sample"):
        if kind in report.last:
            table.add_row(f"last {kind}", str(report.last[kind]["file"]))
    return table
