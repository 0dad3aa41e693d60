"""The configs below the served folders, and plans of new projects, which are made one after the other in threads."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.config import LoadedConfig, load_config, load_dataset
from sd3_light.config.faults import ConfigFaults, Fault, UserError
from sd3_light.config.toml_file import read_toml
from sd3_light.config.validation import looks_like
from sd3_light.sources.listing import IMAGE_SUFFIXES
from sd3_light.system import Gpu, visible_gpus
from sd3_light.ui.background import Numbered, error_of
from sd3_light.ui.folders import Folders, Repeated, folder_id, project_folders, remembered
from sd3_light.ui.form_values import number_of
from sd3_light.ui.served_files import ServedFiles

if TYPE_CHECKING:
    from sd3_light.new.verb import NewProject

_MOST_CONFIGS = 2000
_MOST_PLANS = 20
_SCAN_SECONDS = 5.0


@dataclass
class ProjectFiles:
    """What a search has found: the kind of every config by its path, model folders, and folders of images."""

    configs: dict[Path, str] = field(default_factory=dict)
    models: list[Path] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)


class Projects:
    """The configs below the served folders, each by an id for URLs. Several threads may use it."""

    def __init__(self, folders: Folders) -> None:
        self.files = ServedFiles(folders.roots)
        self._kind = remembered(_MOST_CONFIGS, _kind_of)
        self._run = remembered(_MOST_CONFIGS, run_folder_of)
        self.listed = Repeated(self._search, _SCAN_SECONDS)
        """What is below the served folders."""

    def config(self, config_id: str) -> tuple[Path, str]:
        """Return the path and kind of a config. Raises UserError for an unknown id."""
        for path, kind in self.listed.get().configs.items():
            if folder_id(path) == config_id:
                return path, kind
        raise UserError(f"there is no config {config_id}; see the list of projects")

    def run_of(self, path: Path, kind: str) -> Path | None:
        """Return the run folder of a config if it exists."""
        try:
            run = self._run(path) if kind == "train" else None
        except OSError:  # removed meanwhile
            return None
        return run if run is not None and os.path.isdir(run) else None  # False also for names that are too long

    def _search(self) -> ProjectFiles:
        listed = ProjectFiles()
        for folder in project_folders(self.files.roots):
            if folder.is_model:
                listed.models.append(folder.path)
                continue
            if any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.files):
                listed.images.append(folder.path)
            for path in folder.tomls():
                with suppress(OSError):  # removed meanwhile
                    if len(listed.configs) < _MOST_CONFIGS and (kind := self._kind(path)):
                        listed.configs[path] = kind
        return listed


def _kind_of(path: Path) -> str:
    """Return the kind of a TOML by its tables; "" for those of other programs, and with faults of syntax.

    A config with such a fault is found by its name beside others: it is one that is being edited.
    """
    raw, _ = read_toml(path)
    if raw is None:
        return "dataset" if path.stem.endswith("data") else "train"
    return looks_like(raw) or ""


def run_folder_of(path: Path) -> Path | None:
    """Return the run folder of a config; None if it has faults there."""
    try:
        return load_config(path).train.output_dir
    except ConfigFaults as error:
        is_faulty = any(fault.key == "output_dir" for fault in error.faults)
        return error.partial.train.output_dir if isinstance(error.partial, LoadedConfig) and not is_faulty else None


def config_faults(path: Path, kind: str, text: str) -> list[Fault]:
    """Return the faults of a config with this text, as `check` finds them; nothing is downloaded."""
    if kind == "train":
        from sd3_light.check.verb import text_faults  # imports torch

        return text_faults(path, text)
    try:
        load_dataset(path, text)
    except ConfigFaults as error:
        return list(error.faults)
    return []


@dataclass(eq=False)
class ProjectPreview:
    """A project that is planned; the thread sets the results, others read them."""

    id: int
    form: Mapping[str, str]
    lines: list[str] = field(default_factory=list)
    conclusion: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""
    is_done: bool = False
    project: "NewProject | None" = None
    created: Path | None = None


class Planner:
    """Plans new projects with the code of `new` and `check`; ``prepare`` imports the libraries before."""

    def __init__(self, folders: Folders, prepare: Callable[[], object]) -> None:
        self.files = ServedFiles(folders.roots)
        self._prepare = prepare
        self.plans: Numbered[ProjectPreview] = Numbered("plan", _MOST_PLANS)
        self._creating = threading.Lock()
        self._working = threading.Lock()

    def submit(self, form: Mapping[str, str]) -> ProjectPreview:
        """Begin to plan a project of these form values. Raises UserError for values that are not valid."""
        arguments = _arguments(form, self.files)
        plan = self.plans.add(lambda number: ProjectPreview(number, dict(form)))
        threading.Thread(target=self._work, args=(plan, arguments), name="plan", daemon=True).start()
        return plan

    def create(self, number: int) -> Path:
        """Write the files of a plan and return the train TOML. Raises UserError; existing files are not changed."""
        plan = self.plans.get(number)
        if plan.project is None:
            raise UserError(plan.error or "the plan is not finished yet")
        from sd3_light.new.verb import files

        with self._creating:
            if plan.created is None:
                for path, text in reversed(files(plan.project)):  # the train TOML last: it names the other one
                    self.files.create(path, text.encode())
                plan.created = plan.project.train_toml
        return plan.created

    def _work(self, plan: ProjectPreview, arguments: "_Arguments") -> None:
        def make() -> None:
            self._prepare()
            _fill(plan, arguments)

        with self._working:
            plan.error = error_of(make)
            plan.is_done = True


@dataclass(frozen=True)
class _Arguments:
    """The arguments of `new`."""

    kind: str
    data: str
    model: str | None
    out: Path
    resolution: int | None
    gpus: tuple[Gpu, ...]
    validation: bool
    elsewhere: bool


def _arguments(form: Mapping[str, str], files: ServedFiles) -> _Arguments:
    values = {name: value.strip() for name, value in form.items()}
    if not values.get("data"):
        raise UserError("the folder of images is missing")
    if not values.get("out"):
        raise UserError("the folder of the project is missing")
    memory = number_of(values, "gpu_memory", 1, 4096)
    resolution = number_of(values, "resolution", 16, 16384)
    gpus = visible_gpus() if memory is None else [Gpu("the GPU", int(memory * 2**30))]
    return _Arguments(
        kind=values.get("kind", ""),
        data=values["data"],
        model=values.get("model") or None,
        out=files.require(Path(os.path.expanduser(values["out"]))),
        resolution=None if resolution is None else int(resolution),
        gpus=tuple(gpus[:1]),
        validation="validation" in form,
        elsewhere=memory is not None,
    )


def _fill(plan: ProjectPreview, arguments: _Arguments) -> None:
    """Plan a project, then check it; a plan that cannot be checked cannot be created."""
    from sd3_light.new import verb as new
    from sd3_light.new.summary import project_lines, size_line

    a = arguments
    project = new.prepare(a.kind, a.data, a.model, a.out, a.resolution, a.gpus, a.validation)
    plan.lines = [size_line(project), *project_lines(project)]
    plan.conclusion = new.conclude(project, a.elsewhere)
    plan.project = project
