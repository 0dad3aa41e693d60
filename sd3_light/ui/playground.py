"""The playground: draws images with several models, one after the other, in a thread of the server."""

import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config.faults import UserError
from sd3_light.pages import render_template
from sd3_light.runlog import set_main_process
from sd3_light.ui.folders import Folders, folder_id

if TYPE_CHECKING:
    from sd3_light.engines import Launch
    from sd3_light.sample.verb import OpenModel, SampleOptions

MOST_IMAGES = 256
"""Images of one drawing."""
MOST_WAITING = 100
"""Drawings that wait for their turn; more are refused."""
SAMPLERS = ("euler", "heun", "dpm++")
DTYPES = ("float32", "bfloat16")

_MOST_RECENT = 48
_KEPT_DRAWINGS = 100  # of those that are done
_LONGEST_SEED = 19  # digits of 2**63


@dataclass(frozen=True)
class DrawRequest:
    """What to draw: the prompt with every seed and every model; steps and guidance that are None are the model's."""

    models: Mapping[str, Path]
    prompt: str
    seeds: tuple[int, ...]
    negative_prompt: str = ""
    loras: tuple[str, ...] = ()
    steps: int | None = None
    guidance: float | None = None
    width: int = 0
    height: int = 0
    sampler: str = "euler"
    dtype: str = "float32"

    def options(self) -> "SampleOptions":
        """Return the options of the sample stage."""
        from sd3_light.export.lora_stack import Lora
        from sd3_light.sample.verb import SampleOptions

        names = ("negative_prompt", "steps", "guidance", "width", "height", "sampler", "dtype")
        loras = tuple(map(Lora.parse, self.loras))
        return SampleOptions(**{name: getattr(self, name) for name in names}, loras=loras, batch=4)


@dataclass(eq=False)
class Drawing:
    """The progress of a request. The thread adds images; others read them."""

    id: int
    request: DrawRequest
    status: str = "waiting"
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    def finish(self) -> None:
        """Mark the drawing as done."""
        self.status = "stopped" if self.error or self.cancelled.is_set() else "done"
        self.is_done = True

    def as_json(self) -> dict[str, Any]:
        """Return the state for the page."""
        seeds = list(map(str, self.request.seeds))  # JavaScript's numbers would round large ones
        total = len(self.request.models) * len(seeds)
        facts = {"id": self.id, "status": self.status, "error": self.error, "done": self.is_done, "total": total}
        return {**facts, "seeds": seeds, "images": list(self.images), "warnings": list(self.warnings)}


class Playground:
    """Draws requests in the order in which they arrive. The last model stays loaded.

    ``prepare`` is called once before the first drawing; it imports the libraries and returns the device to use. Images
    are numbered files in ``out``, with their settings as metadata.
    """

    def __init__(self, folders: Folders, out: Path, models: Sequence[Path], prepare: Callable[[], "Launch"]) -> None:
        self.folders, self.out, self._models, self._prepare = folders, out, models, prepare
        self._drawings: dict[int, Drawing] = {}
        self._ids = itertools.count(1)
        self._waiting: deque[Drawing] = deque()
        self._changed = threading.Condition()  # of the drawings
        self._launch: Launch | None = None
        self._lock = threading.Lock()
        self._open: tuple[object, OpenModel] | None = None
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
        request = parse_request(values, self.models())
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                raise UserError(f"{MOST_WAITING} drawings wait already; draw again when one of them is done")
            drawing = Drawing(next(self._ids), request)
            self._drawings[drawing.id] = drawing
            for old in [number for number, each in self._drawings.items() if each.is_done][:-_KEPT_DRAWINGS]:
                del self._drawings[old]
            self._waiting.append(drawing)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="playground", daemon=True)
                self._thread.start()
        return drawing

    def drawing(self, number: int) -> Drawing:
        """Return a drawing. Raises UserError for an unknown number."""
        drawing = self._drawings.get(number)
        if drawing is None:
            raise UserError(f"there is no drawing {number}; draw again")
        return drawing

    def cancel(self, number: int) -> Drawing:
        """Stop a drawing after its current denoising step, or at once while it waits. Raises UserError."""
        drawing = self.drawing(number)
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

    def prepare(self) -> "Launch":
        """Import the libraries, once, and return the device to use."""
        with self._lock:
            if self._launch is None:
                self._launch = self._prepare()
                set_main_process(False)  # hides the stages' progress bars on the server's terminal
            return self._launch

    def page(self, run_id: str = "") -> str:
        """Return the page of the playground; the newest export of a run may be chosen already."""
        models = [(model_id, label) for model_id, (label, _) in self.models().items()]
        run = self.folders.runs().get(run_id)
        chosen = next((key for key, (_, path) in self.models().items() if run and run in path.parents), "")
        return render_template(
            "playground.html",
            models=models,
            chosen=chosen or next((model_id for model_id, _ in models), ""),
            samplers=SAMPLERS,
            dtypes=DTYPES,
            recent=self.recent(),
            out=self.out,
            notes=[],
            served="/playground",
            live=False,
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
        launch = self.prepare()
        from sd3_light.sample.generate import Cancelled, drawing_note
        from sd3_light.sample.image_requests import PromptRow
        from sd3_light.sample.verb import first_free_number, sweep_images

        sweep_images(self.out)
        request, options = drawing.request, drawing.request.options()
        for label, folder in request.models.items():
            if drawing.cancelled.is_set():
                return
            drawing.status = f"loading {label}"
            model = self._load(folder, options, launch)
            first = first_free_number(self.out)
            row = PromptRow(request.prompt)
            requests = {first + at: model.request(row, seed) for at, seed in enumerate(request.seeds)}
            cut = model.cut_prompts(requests.values())
            drawing.warnings += [f"{label}: {line}" for line in cut]
            note = drawing_note(model.policy, request.steps, request.guidance)
            drawing.warnings += [f"{label}: {note}"] if note else []
            drawing.status = f"drawing with {label}"
            try:
                for files in model.draw(requests, self.out, renumber=True, is_cancelled=drawing.cancelled.is_set):
                    for number, path in files.items():
                        seed = str(requests[number].seed)
                        drawing.images.append({"model": label, "seed": seed, "name": path.name})
            except Cancelled:
                return

    def _load(self, folder: Path, options: "SampleOptions", launch: "Launch") -> "OpenModel":
        from sd3_light.export.chosen import choose_model
        from sd3_light.sample.verb import open_model

        key = (choose_model(folder), options.loras, options.sampler, options.dtype)
        if self._open is None or self._open[0] != key:
            self._open = None  # the old model leaves memory before the new one is loaded
            self._open = key, open_model(folder, options, launch)
        return replace(self._open[1], options=options)


def parse_request(values: Mapping[str, Any], models: Mapping[str, tuple[str, Path]]) -> DrawRequest:
    """Return the request of a form's values. Raises UserError for values that are not valid."""
    for name, value in values.items():
        if isinstance(value, str) and not _is_utf8(value):
            raise UserError(f"{name} contains half of a surrogate pair, which is not a character; remove it")
    chosen = {label: path for key in _strings(values, "models") if key in models for label, path in [models[key]]}
    if not chosen:
        raise UserError("no model is chosen; mark at least one")
    prompt = str(values.get("prompt", "")).strip()
    if not prompt:
        raise UserError("the prompt is empty; write what to draw")
    seeds = _seeds(str(values.get("seeds", "0")))
    if len(chosen) * len(seeds) > MOST_IMAGES:
        raise UserError(f"{len(chosen) * len(seeds)} images are too many at once; draw at most {MOST_IMAGES}")
    sampler, dtype = (str(values.get(name, default)) for name, default in (("sampler", "euler"), ("dtype", "float32")))
    if sampler not in SAMPLERS or dtype not in DTYPES:
        raise UserError(f"unknown sampler or dtype {sampler!r}, {dtype!r}; choose one of the list")
    return DrawRequest(
        chosen,
        prompt,
        seeds,
        negative_prompt=str(values.get("negative_prompt", "")).strip(),
        loras=tuple(line.strip() for line in str(values.get("loras", "")).splitlines() if line.strip()),
        steps=None if (steps := _number(values, "steps", 1, 1000)) is None else int(steps),
        guidance=_number(values, "guidance", 0, 1000),
        width=int(_number(values, "width", 0, 2**16) or 0),
        height=int(_number(values, "height", 0, 2**16) or 0),
        sampler=sampler,
        dtype=dtype,
    )


def _strings(values: Mapping[str, Any], name: str) -> list[str]:
    value = values.get(name, [])
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _seeds(text: str) -> tuple[int, ...]:
    """Parse `0, 1, 5-8`."""
    seeds: list[int] = []
    for part in text.replace(",", " ").split():
        first, _, last = part.partition("-")
        ends = [int(end) for end in (first, last or first) if end.isdecimal() and len(end) <= _LONGEST_SEED]
        if len(ends) < 2 or not 0 <= ends[1] - ends[0] < MOST_IMAGES:
            raise UserError(f"seeds: {part[:60]!r} is not a seed; write integers from 0, such as 0, 1, 5-8")
        seeds += range(ends[0], ends[1] + 1)
    if not seeds or max(seeds) >= 2**63:
        raise UserError("seeds: write at least one integer from 0 to 2**63 - 1")
    return tuple(dict.fromkeys(seeds))


def _number(values: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """Return a number of the form; None if its field is empty."""
    text = str(values.get(name, "")).strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UserError(f"{name} is {text!r}; it must be a number from {least:g} to {most:g}")
    return value
