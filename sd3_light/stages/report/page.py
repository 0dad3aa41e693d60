"""One self-contained page of a run: it asks the network for nothing, and reads without its script."""

import tomllib
from pathlib import Path

from sd3_light.files import write_atomically
from sd3_light.runlog.page.frame import document, links, make_room, notes, section, tile
from sd3_light.runlog.page.html import Html, tag
from sd3_light.stages.report import charts
from sd3_light.stages.report.gather import RunReport, read_run
from sd3_light.stages.report.grids import Grids, load_grids, show_grids
from sd3_light.stages.report.happenings import happenings
from sd3_light.stages.report.style import SCRIPT, STYLE
from sd3_light.stages.report.words import count, duration, moment, number, state

_LONGEST_CONFIG = 300_000  # letters


def write_page(folder: Path, out: Path) -> list[str]:
    """Write the page of a run to ``out``; returns notes of what could not be shown. No log, or no place to write to,
    raises UserError."""
    make_room(out)
    report = read_run(folder)
    told: list[str] = []
    grids = load_grids(report, told)
    config = _read_config(folder, told)
    # what cannot be written as UTF-8 must not cost the page
    write_atomically(out, render_page(report, grids, config, told).encode("utf-8", "backslashreplace"))
    return told


def render_page(report: RunReport, grids: list[Grids], config: str, told: list[str]) -> Html:
    """The whole page as text."""
    sections = [
        ("loss", "Loss", _charts(charts.losses(report))),
        ("validation", "Validation", _charts(charts.validation(report), "No evaluation is logged.")),
        ("learning", "Learning", _charts(charts.learning(report))),
        ("speed", "Speed", _charts(charts.speed(report))),
        ("memory", "Memory", _charts(charts.memory(report))),
        ("samples", "Samples", _samples(grids, config)),
        ("events", "Events", tag("div", happenings(report), class_="scroll", tabindex=0)),
        ("config", "Config", _config(config)),
    ]
    name = report.folder.resolve().name
    top = tag(
        "header",
        tag("h1", f"Run {name}"),
        tag("div", str(report.folder), class_="key soft"),
        links((place, title) for place, title, _ in sections),
        *notes(told),
    )
    body = tag("main", _tiles(report), _facts(report), *(section(*each) for each in sections))
    return document(f"{name}: a training run", STYLE, [top, body], SCRIPT)


def _tiles(report: RunReport) -> Html:
    step, loss = report.last.get("step", {}), report.steps.get("loss")
    begin = report.parts[-1].begin if report.parts else {}
    tiles = []
    if "step" in step:
        of = f" of {begin['total']:,}" if "total" in begin else ""
        tiles.append(tile(f"{step['step']:,}", f"steps{of}", ""))
    if "samples" in step:
        epoch = f"epoch {float(step['epoch']):.3g}" if "epoch" in step else ""
        tiles.append(tile(f"{step['samples']:,}", "samples seen", epoch))
    if loss is not None and loss.x:
        tiles.append(tile(number(loss.smooth()[0][-1][1]), "loss", "smoothed, at the end"))
    for (name, weights), curves in list(report.evals.items())[:4]:
        if "flow" in curves:
            tiles.append(tile(number(curves["flow"].last), "validation", ", ".join(filter(None, (name, weights)))))
    if "samples_per_second" in report.steps:
        rate = report.steps["samples_per_second"]
        tiles.append(tile(number(sum(rate.mean) / max(1, len(rate.mean)), 3), "samples a second", "on average"))
    tiles.append(tile(f"{report.skipped:,}", "steps skipped", "loss or gradient not finite"))
    return tag("section", *tiles, class_="tiles", id="counts")


def _facts(report: RunReport) -> Html:
    begin = report.parts[-1].begin if report.parts else {}
    facts = [("state", state(report))]
    if report.parts:
        last = max(part.end for part in report.parts)
        facts.append(("time", f"{moment(report.parts[0].begin['time'])} to {moment(last)}"))
        facts.append(("at work", f"{duration(report.seconds)}, with {count(len(report.resumes), 'resume')}"))
    where = [str(begin.get("device", "")), count(begin["world"], "process") if "world" in begin else ""]
    facts.append(("device", ", ".join(filter(None, [*where, str(begin.get("engine", ""))]))))
    lines = (tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in facts if value)
    return tag("table", tag("tbody", *lines), class_="facts")


def _charts(drawn: list[Html], none: str = "Nothing of it is logged.") -> Html:
    return tag("div", *drawn, class_="charts") if drawn else tag("p", none, class_="soft")


def _samples(grids: list[Grids], config: str) -> Html:
    shown = [show_grids(each) for each in grids if each.shown]
    if not shown:
        return tag("p", "No sample grid is there. The table [sampling] of the config asks for them.", class_="soft")
    return tag("div", *_prompts(config), *shown)


def _prompts(config: str) -> list[Html]:
    """What was asked for."""
    try:
        prompts = tomllib.loads(config).get("sampling", {}).get("prompts", [])
    except tomllib.TOMLDecodeError:
        return []
    if not prompts:
        return []
    asked = tag("ol", *(tag("li", str(prompt), dir="auto") for prompt in prompts[:200]), class_="prompts")
    return [tag("details", tag("summary", count(len(prompts), "prompt")), asked)]


def _config(config: str) -> Html:
    if not config:
        return tag("p", "The run folder has no config.toml.", class_="soft")
    return tag("details", tag("summary", "config.toml, as the run resolved it"), tag("pre", config, tabindex=0))


def _read_config(folder: Path, told: list[str]) -> str:
    """The run's own copy, which holds no secrets."""
    path = folder / "config.toml"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as fault:
        told.append(f"config.toml cannot be read: {fault.strerror}.")
        return ""
    return text if len(text) <= _LONGEST_CONFIG else f"{text[:_LONGEST_CONFIG]}\n…"
