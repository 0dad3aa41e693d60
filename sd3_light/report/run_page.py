"""The HTML page of a run."""

import tomllib
from pathlib import Path
from typing import Any

from sd3_light.formats import duration, number, plural, utc_time
from sd3_light.inputs import read_limited
from sd3_light.pages import check_output_path, render_template, save_page
from sd3_light.report.events import event_rows
from sd3_light.report.grids import GridSeries, load_grids
from sd3_light.report.run_charts import (
    loss_charts,
    memory_charts,
    optimization_charts,
    reward_charts,
    speed_charts,
    validation_charts,
    x_table,
)
from sd3_light.report.run_log import RunReport, read_run

PREVIEW_NOTE = (
    "The log is long and is still being read. The curves show a few of its lines, without evaluations and resumes in "
    "between; the page completes itself."
)
"""What a page says about a report that is a preview."""
_LONGEST_CONFIG = 300_000  # characters
_MOST_EVAL_TILES = 4


def write_run_page(folder: Path, out: Path) -> list[str]:
    """Write the page of a run to ``out`` and return notes about what cannot be shown."""
    check_output_path(out)
    report = read_run(folder)
    notes: list[str] = []
    grids = load_grids(report, notes)
    save_page(out, render_run_page(report, grids, notes))
    return notes


def render_run_page(
    report: RunReport, grids: list[GridSeries], notes: list[str], run_id: str = "", **values: Any
) -> str:
    """Return the page of a run; ``run_id`` and ``values`` are those of pages that `sd3-light ui` serves."""
    folder = report.folder
    config = _read_config(folder, notes)
    if report.earlier_runs:
        notes.append(f"The log also has {plural(report.earlier_runs, 'earlier run')}: only the last one is shown.")
    if report.is_preview:
        notes.append(PREVIEW_NOTE)
    events, omitted = event_rows(report)
    return render_template(
        "report.html",
        name=folder.resolve().name,
        folder=folder,
        notes=notes,
        tiles=_tiles(report),
        facts=_facts(report),
        charts={
            "loss": loss_charts(report),
            "rewards": reward_charts(report),
            "validation": validation_charts(report),
            "optimization": optimization_charts(report),
            "speed": speed_charts(report),
            "memory": memory_charts(report),
        },
        x_tables={"": x_table(report, run_id)},
        prompts=_prompts(config),
        grids=grids,
        events=events,
        omitted=omitted,
        config=config,
        **values,
    )


def _tiles(report: RunReport) -> list[tuple[str, str, str]]:
    """Return the value, name and hint of each number at the top."""
    step = report.last.get("step", {})
    loss = report.steps.get("loss")
    tiles = []
    if "step" in step:
        total = f" of {report.begin['total']:,}" if "total" in report.begin else ""
        tiles.append((f"{step['step']:,}", f"steps{total}", ""))
    if report.seconds_left is not None:
        tiles.append((duration(report.seconds_left), "left", "at the speed since the last start"))
    if "samples" in step:
        epoch = f"epoch {float(step['epoch']):.3g}" if "epoch" in step else ""
        tiles.append((f"{step['samples']:,}", "samples seen", epoch))
    if loss is not None and loss.x:
        tiles.append((number(loss.smooth()[0][-1][1]), "loss", "smoothed, at the end"))
    for names, curves in list(report.evals.items())[:_MOST_EVAL_TILES]:
        if "flow" in curves:
            tiles.append((number(curves["flow"].last), "validation loss", ", ".join(filter(None, names))))
    if "samples_per_second" in report.steps:
        rates = report.steps["samples_per_second"].mean
        tiles.append((number(sum(rates) / max(1, len(rates)), 3), "samples per second", "on average"))
    tiles.append((f"{report.skipped:,}", "steps skipped", "loss or gradient not finite"))
    return tiles


def _facts(report: RunReport) -> list[tuple[str, str, str]]:
    """Return the rows of the table below the tiles."""
    begin = report.begin
    facts = [("status", report.status)]
    if report.segments:
        start = report.segments[0].begin["time"]
        end = max(segment.end for segment in report.segments)
        separator = " to" if report.has_ended else "; last log entry"
        facts.append(("time", f"{utc_time(start)}{separator} {utc_time(end)}"))
        facts.append(("running time", f"{duration(report.seconds)}, with {plural(len(report.resumes), 'resume')}"))
    processes = plural(begin["world"], "process") if "world" in begin else ""
    device = filter(None, (str(begin.get("device", "")), processes, str(begin.get("engine", ""))))
    facts.append(("device", ", ".join(device)))
    return [(name, text, "") for name, text in facts if text]


def _prompts(config: str) -> list[str]:
    """Return the sampling prompts of the config; none where it cannot be parsed."""
    try:
        sampling = tomllib.loads(config).get("sampling")
    except (ValueError, RecursionError):  # ValueError also for an integer of very many digits
        return []
    prompts = sampling.get("prompts") if isinstance(sampling, dict) else None
    return [str(prompt) for prompt in prompts] if isinstance(prompts, list) else []


def _read_config(folder: Path, notes: list[str]) -> str:
    """Return the run's config.toml, which holds no secrets; "" where it is missing."""
    if (folder / "config.toml").is_symlink():
        notes.append("config.toml is a link, which may lead to another file; it is not shown.")
        return ""
    try:
        text = read_limited(folder / "config.toml").decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"config.toml cannot be read: {error.strerror}.")
        return ""
    return text if len(text) <= _LONGEST_CONFIG else f"{text[:_LONGEST_CONFIG]}\n…"
