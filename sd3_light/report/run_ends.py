"""What the ends of a log say about a run, for lists of many runs."""

from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.report.curves import Curve, make_bin
from sd3_light.report.log_lines import STEP_PREFIX, LogEvent, ends_of, scan_step
from sd3_light.report.run_log import QUICK_BYTES, RunReport, RunSegment, parse_line, read_run

LAST_LOSSES = 20
"""The loss of a run is the mean of this many logged losses at the end."""


def read_ends(folder: Path) -> RunReport:
    """Return what the first line and the last 256 KiB of a log say; the curves are one bin of the last values.

    Raises UserError.
    """
    path = folder / "log.jsonl"
    first, lines = ends_of(path, LAST_LOSSES, ("start", "resume", "eval"))
    report = RunReport(folder)
    if first.endswith(b"\n"):
        _add(report, parse_line(path, 1, first))
    losses: dict[float, float] = {}
    try:
        for line in lines:
            event = (scan_step(line) if line.startswith(STEP_PREFIX) else None) or parse_line(path, 0, line)
            _add(report, event)
            if "loss" in event:
                losses[event["step"]] = event["loss"]
        steps = [line for line in lines if line.startswith(STEP_PREFIX)]
        if steps:
            report.last["step"] = parse_line(path, 0, steps[-1])
    except UserError as error:  # the number of the line is not known
        if path.stat().st_size <= QUICK_BYTES:
            return read_run(folder)  # raises an error with the number
        raise UserError(f"{path}: a line near its end is damaged; `sd3-light report` says which") from error
    if losses:
        report.steps["loss"] = _one_bin(losses)
    return report


def _add(report: RunReport, event: LogEvent) -> None:
    kind = event["event"]
    report.last[kind] = event
    if kind in ("start", "resume"):
        report.segments.append(RunSegment(event, event["time"]))
        if report.last.get("eval", event).get("step", 0) > event.get("step", 0):  # it is repeated
            report.evals.clear()
            del report.last["eval"]
    elif kind == "eval" and "flow" in event:
        key = str(event.get("set", "")), str(event.get("weights", ""))
        report.evals.pop(key, None)
        report.evals[key] = {"flow": _one_bin({event.get("step", 0): event["flow"]})}


def _one_bin(values: dict[float, float]) -> Curve:
    return Curve(1, [make_bin(0, list(values), list(values.values()))])
