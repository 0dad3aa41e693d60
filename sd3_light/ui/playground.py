"""The playground: draws images with several models, one after the other, in a thread of the server."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config.faults import UserError
from sd3_light.export.weights_fingerprint import file_fingerprint, model_fingerprint
from sd3_light.pages import data_uri, render_template
from sd3_light.runlog import set_main_process
from sd3_light.ui.background import Numbered
from sd3_light.ui.draw_request import AXES, DTYPES, SAMPLERS, DrawRequest, parse_request
from sd3_light.ui.folders import Folders, folder_id

if TYPE_CHECKING:
    from PIL import Image

    from sd3_light.engines import Launch
    from sd3_light.sample.verb import OpenModel, SampleOptions
    from sd3_light.sample.watch import Preview

MOST_DRAWINGS = 100
"""Drawings that wait for their turn or are drawn; more are refused. That many are kept when they are done."""

_MOST_RECENT = 48
_FROM_ROW = ("prompt", "negative_prompt", "steps", "guidance", "width", "height")
_GRID_FACTS = "sd3_light_grid"


Cells = dict[tuple[int, int], DrawRequest]
"""Images of a grid by column and row."""


@dataclass(eq=False)
class Drawing:
    """The progress of a request. The thread adds images; others read them."""

    id: int
    request: DrawRequest
    status: str = "waiting"
    error: str = ""
    grid: str = ""
    warnings: list[str] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    seen: dict[tuple[int, int], tuple[int, "Image.Image | None"]] = field(default_factory=dict)

    def finish(self) -> None:
        """Mark the drawing as done."""
        self.status = "stopped" if self.error or self.cancelled.is_set() else "done"
        self.seen.clear()
        self.is_done = True

    def warn(self, lines: Iterable[str]) -> None:
        """Add warnings that are not known yet."""
        self.warnings += [line for line in dict.fromkeys(lines) if line not in self.warnings]

    def as_json(self) -> dict[str, Any]:
        """Return the state for the page."""
        columns = self.request.columns.labels
        rows = self.request.rows.labels
        seen = [
            {"column": column, "row": row, "step": step, "preview": None if image is None else data_uri(image)}
            for (column, row), (step, image) in list(self.seen.items())
        ]
        return {
            "id": self.id,
            "status": self.status,
            "error": self.error,
            "done": self.is_done,
            "grid": self.grid,
            "total": len(columns) * len(rows),
            "columns": columns,
            "rows": rows,
            "images": list(self.images),
            "warnings": list(self.warnings),
            "seen": seen,
        }


class Playground:
    """Draws requests in the order in which they arrive. The last model stays loaded.

    ``prepare`` is called once before the first drawing; it imports the libraries and returns the device to use. Images
    are numbered files in ``out``, with their settings as metadata.
    """

    def __init__(self, folders: Folders, out: Path, models: Sequence[Path], prepare: Callable[[], "Launch"]) -> None:
        self.folders = folders
        self.out = out
        self._models = models
        self._prepare = prepare
        self.drawings: Numbered[Drawing] = Numbered("drawing", MOST_DRAWINGS)
        self._waiting: deque[Drawing] = deque()
        self._changed = threading.Condition()  # of the drawings
        self._launch: Launch | None = None
        self.imports = threading.Lock()  # two threads that import at once fail in peft and in diffusers
        self._open: tuple[object, OpenModel] | None = None
        self._preview: Preview | None = None
        self._thread: threading.Thread | None = None

    def models(self) -> dict[str, tuple[str, Path]]:
        """Return label and folder of every model by id: those that the user named, then the exports of the runs."""
        named = {folder_id(folder): (str(folder), folder) for folder in self._models}
        for run in self.folders.runs().values():
            for export in sorted((run / "exports").glob("step-*"), reverse=True):
                label = f"{run.name}/{export.name}"
                is_taken = any(label == other for other, _ in named.values())
                named[folder_id(export)] = (str(export) if is_taken else label, export)
        return named

    def submit(self, values: Mapping[str, Any]) -> Drawing:
        """Add a drawing of these form values to the queue. Raises UserError for values that are not valid."""
        request = parse_request(values, self.models(), self.folders.adapters())
        with self._changed:
            drawing = self.drawings.add(lambda number: Drawing(number, request))
            self._waiting.append(drawing)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="playground", daemon=True)
                self._thread.start()
        return drawing

    def cancel(self, number: int) -> Drawing:
        """Stop a drawing within an operation of its model, or at once while it waits. Raises UserError."""
        drawing = self.drawings.get(number)
        drawing.cancelled.set()
        with self._changed:
            if drawing in self._waiting:
                self._waiting.remove(drawing)
                drawing.finish()
        return drawing

    def recent(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the names of the newest images in the folder and their settings, the newest first."""
        from sd3_light.sample.png import read_png_facts

        images = []
        for path in sorted(self.out.glob("[0-9]*.png"), reverse=True)[:_MOST_RECENT]:
            try:
                images.append((path.name, read_png_facts(path)))
            except (OSError, ValueError, SyntaxError):  # not an image, or removed meanwhile
                continue
        return [(name, facts) for name, facts in images if "prompt" in facts]

    def settings_of(self, text: str) -> dict[str, Any]:
        """Return the form's values for the settings in a PNG, as its text chunk has them. Raises UserError.

        Model and LoRAs are found by their fingerprints among those of the page; ``notes`` name what is not there.
        """
        from sd3_light.sample.again import DrawnImage, drawn_image

        drawn: DrawnImage = drawn_image(text, "the image")
        model = self._model_of(drawn.fingerprint, [fingerprint for *_, fingerprint in drawn.loras])
        own = 0 if model is None else model[1]
        notes = [] if model else [f"none of the models here has the weights of {drawn.model} ({drawn.fingerprint})"]
        listed = {file_fingerprint(path): lora_id for lora_id, (_, path) in self.folders.adapters().items()}
        chosen = {}
        for name, strength, fingerprint in drawn.loras[own:]:
            if fingerprint in listed:
                chosen[listed[fingerprint]] = strength
            else:
                notes.append(f"the LoRA {name} ({fingerprint}) is not among the listed files; write FILE:{strength:g}")
        values = {name: getattr(drawn.row, name) for name in _FROM_ROW}
        values |= {name: getattr(drawn.options, name) for name in ("sampler", "dtype", "shift")}
        seeds = str(drawn.row.seed)  # JavaScript's numbers would round large ones
        return {**values, "seeds": seeds, "model": model and model[0], "chosen_loras": chosen, "notes": notes}

    def _model_of(self, fingerprint: str, loras: Sequence[str]) -> tuple[str, int] | None:
        """Return the id of the model with these weights, and how many of the LoRAs are its own; None if none has."""
        from sd3_light.export.chosen import choose_model

        fitting = []
        for model_id, (_, path) in self.models().items():
            try:
                chosen = choose_model(path)
                own = [file_fingerprint(lora.file) for lora in chosen.loras]
                if fingerprint == model_fingerprint(chosen.folder) and own == list(loras[: len(own)]):
                    fitting.append((model_id, len(own)))
            except (UserError, OSError):  # not complete, or removed meanwhile
                continue
        return max(fitting, key=lambda item: item[1], default=None)

    def prepare(self) -> "Launch":
        """Import the libraries, once, and return the device to use."""
        with self.imports:
            if self._launch is None:
                self._launch = self._prepare()
                import diffusers.pipelines.pipeline_utils  # noqa: F401

                import sd3_light.check.verb  # noqa: F401

                set_main_process(False)  # hides the stages' progress bars on the server's terminal
            return self._launch

    def page(self, run_id: str = "") -> str:
        """Return the page of the playground; the newest export of a run may be chosen already."""
        models = self.models()
        run = self.folders.runs().get(run_id)
        of_run = (key for key, (_, path) in models.items() if run in path.parents)
        return render_template(
            "playground.html",
            models=models,
            chosen=next(of_run, next(iter(models), "")),
            loras=self.folders.adapters(),
            axes=AXES,
            samplers=SAMPLERS,
            dtypes=DTYPES,
            recent=self.recent(),
            out=self.out,
            served="/playground",
        )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                drawing = self._waiting.popleft()
            try:
                self._draw(drawing)
            except UserError as error:
                drawing.error = str(error)
            except Exception as error:  # the page shows it, and the next drawing may succeed
                traceback.print_exc()
                drawing.error = f"{type(error).__name__}: {error}"
                self._open = None
            drawing.finish()

    def _draw(self, drawing: Drawing) -> None:
        drawing.status = "loading the libraries"
        self.prepare()
        from sd3_light.sample.verb import sweep_images
        from sd3_light.sample.watch import Cancelled

        sweep_images(self.out)
        groups: dict[tuple[str, object], Cells] = {}
        for place, request in drawing.request.cells():
            groups.setdefault((request.model, request.options()), {})[place] = request
        try:
            for _, cells in sorted(groups.items(), key=lambda item: list(drawing.request.folders).index(item[0][0])):
                self._draw_group(drawing, cells)
        except Cancelled:
            return
        if len(drawing.images) > 1:
            drawing.grid = _save_grid(drawing, self.out)

    def _draw_group(self, drawing: Drawing, cells: Cells) -> None:
        """Draw the cells of one model with the same options. Raises Cancelled."""
        from sd3_light.sample import verb as stage
        from sd3_light.sample.generate import drawing_note
        from sd3_light.sample.watch import Watch

        places = list(cells)
        first = cells[places[0]]
        drawing.status = f"loading {first.model}"
        model = self._load(first.folders[first.model], first.options(), drawing.cancelled)
        number = stage.first_free_number(self.out)
        requests = {number + at: model.request(cell.row(), cell.seed) for at, cell in enumerate(cells.values())}
        notes = {drawing_note(model.policy, cell.steps, cell.guidance) for cell in cells.values()} - {None}
        drawing.warn(f"{first.model}: {line}" for line in (*model.cut_prompts(requests.values()), *notes))
        drawing.status = f"drawing with {first.model}"

        def show(index: int, step: int, image: "Image.Image | None") -> None:
            drawing.seen[places[index]] = step, image

        watch = Watch(drawing.cancelled.is_set, show, self._preview_of(model) if first.preview else None)
        for files in model.draw(requests, self.out, renumber=True, watch=watch):
            for written, path in files.items():
                column, row = place = places[written - number]
                seed = str(cells[place].seed)  # JavaScript's numbers would round large ones
                facts = {"column": column, "row": row, "model": cells[place].model, "seed": seed}
                drawing.images.append({**facts, "name": path.name})
                drawing.seen.pop(place, None)

    def _preview_of(self, model: "OpenModel") -> "Preview":
        """Return the preview of the loaded model, which learns from every image."""
        from sd3_light.sample.watch import Preview

        if self._preview is None or self._preview.folder != model.chosen.folder:
            self._preview = Preview(model.chosen.folder)
        return self._preview

    def _load(self, folder: Path, options: "SampleOptions", cancelled: threading.Event) -> "OpenModel":
        from sd3_light.export.chosen import choose_model
        from sd3_light.sample import verb as stage
        from sd3_light.sample.watch import cancellable

        key = stage.weights_key(choose_model(folder), options)
        if self._open is None or self._open[0] != key:
            self._open = None  # the old model leaves memory before the new one is loaded
            with cancellable(cancelled.is_set):
                self._open = key, stage.open_model(folder, options, self.prepare())
        self._open = key, self._open[1].adjusted(options)
        return self._open[1]


def _save_grid(drawing: Drawing, out: Path) -> str:
    """Write all images of a drawing as one PNG with labels and settings; return its name."""
    from sd3_light.sample.grid import make_thumbnail_grid
    from sd3_light.sample.png import save_png

    request = drawing.request
    names = {(image["column"], image["row"]): image["name"] for image in drawing.images}
    places = [place for place, _ in request.cells()]
    files = [out / names[place] for place in places]
    captions = [f"{request.columns.labels[column]} · {request.rows.labels[row]}" for column, row in places]
    name = f"grid-{min(names.values())}"
    settings = {name: value for name, value in vars(request).items() if name != "folders"}
    settings |= {"columns": vars(request.columns), "rows": vars(request.rows), "images": sorted(names.values())}
    grid = make_thumbnail_grid(files, captions, len(request.columns.values), request.prompt)
    save_png(grid, out / name, {_GRID_FACTS: settings})
    return name
