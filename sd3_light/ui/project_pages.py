"""The pages of projects: the list of configs, a plan, and the editor of a config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.config.faults import MOST_SHOWN, ConfigFaults
from sd3_light.config.toml_file import read_toml
from sd3_light.config.toml_text import line_of, toml_entries
from sd3_light.new.kinds import KINDS
from sd3_light.pages import render_template
from sd3_light.ui.config_form import form_groups
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.playground import Playground
from sd3_light.ui.projects import ProjectPreview, Projects, config_faults
from sd3_light.ui.run_pages import RunRow, row_of
from sd3_light.ui.run_queue import RunQueue, can_resume


@dataclass(frozen=True)
class ConfigRow:
    """A config in the list; ``row`` is its run if it has begun."""

    id: str
    path: Path
    kind: str
    row: RunRow | None = None


def projects_page(folders: Folders, projects: Projects, playground: Playground) -> str:
    """Return the list of configs, with the form of a new project."""
    listed = projects.listed.get()
    rows = [
        ConfigRow(folder_id(path), path, kind, _row(folders, projects, path, kind))
        for path, kind in listed.configs.items()
    ]
    return render_template(
        "projects.html",
        rows=rows,
        kinds=KINDS,
        models=[*listed.models, *(path for _, path in playground.models().values())],
        images=listed.images,
        root=folders.roots[0],
        roots=folders.roots,
        served="/projects",
    )


def plan_page(plan: ProjectPreview) -> str:
    """Return the page of a plan, which updates itself until the plan is made."""
    files: list[tuple[Path, str]] = []
    if plan.project is not None:
        from sd3_light.new.verb import files as files_of  # imports torch

        files = files_of(plan.project)
    notes = [plan.error] if plan.error else []
    return render_template("plan.html", plan=plan, files=files, notes=notes, served="/projects", live=not plan.is_done)


def editor_page(folders: Folders, projects: Projects, queue: RunQueue, config_id: str) -> str:
    """Return the editor of a config."""
    path, kind = projects.config(config_id)
    text, version = projects.files.read_config(path)
    row = _row(folders, projects, path, kind)
    run = None if row is None else row.folder
    return render_template(
        "editor.html",
        config=ConfigRow(config_id, path, kind, row),
        text=text,
        version=version,
        can_resume=run is not None and can_resume(run),
        is_pending=run is not None and queue.is_pending(run),
        notes=[] if run is None else queue.notes(run),
        served="/projects",
    )


def review_text(projects: Projects, config_id: str, text: str) -> dict[str, Any]:
    """Return the faults of a text with their lines, the lines of its keys, and its form."""
    path, kind = projects.config(config_id)
    entries = toml_entries(text)
    raw, _ = read_toml(path, text)
    faults = []
    for fault in config_faults(path, kind, text)[:MOST_SHOWN]:
        is_here = fault.file == str(path)
        line = line_of(fault.key, entries) if is_here else 0
        other = "" if is_here else Path(fault.file).name
        remedy = str(fault).removeprefix(f"{fault.file}: {fault.key}: ")
        faults.append({"line": line, "key": fault.key, "text": remedy, "file": other})
    form = render_template("config_form.html", groups=form_groups(kind, {} if raw is None else raw))
    keys = [{"line": entry.line, "key": entry.key} for entry in entries if not entry.is_header]
    return {"faults": faults, "keys": keys, "form": form if raw is not None else ""}


def review_resume(path: Path) -> dict[str, Any]:
    """Return what a config that is saved changes for its run when it is resumed. Raises UserError for its faults."""
    from sd3_light.check import verb as check  # imports torch, as training does
    from sd3_light.train.resume import review_changes

    try:
        loaded = check.load(path)
    except ConfigFaults as error:
        return {"lines": [f"It cannot be resumed: the config has {len(error.faults)} faults."]}
    review = review_changes(loaded, check.require(loaded))
    if review is None:
        return {"lines": []}
    lines = [f"Applies on resume: {change}" for change in review.applied]
    lines += [f"The run keeps its own value: {change}" for change in review.kept if not review.refusal]
    lines += [f"Resuming is refused: {review.refusal}"] if review.refusal else []
    if any(change.startswith(("model.", "adapter.")) for change in review.applied):
        lines.append("Weights of another shape are refused when the run is resumed.")
    return {"lines": lines or ["Nothing differs from the run."]}


def _row(folders: Folders, projects: Projects, path: Path, kind: str) -> RunRow | None:
    """Return the run of a config; None where there is none yet, or the config has faults."""
    run = projects.run_of(path, kind)
    if run is None:
        return None
    folders.add_run(run)
    return row_of(folders, folder_id(run), run)
