"""Every command of a project at a model's published size: does it work, how long does it take, how large is it?

    python benchmarks/real_size.py FAMILY OUT [--depth third] [--encoders deep] [--journey NAME ...] [--lanes 2] [--toy]

FAMILY is one of sd3 (SD3.5 medium), sd3_large, sd3_medium (of 2024), flux, flux2 (klein 4B), qwen_image, z_image, sana
and wan (1.3B). The model has its published shape and random weights, made on the GPU and written in bf16, and text
encoders of their real width: with two layers, or with `--encoders deep` with all of them. There are 20 captioned images
of 1024 px.

The journeys are `new`, `check`, `cache`, `train` with adapters and with all weights (each with its export and proof), a
stop by SIGTERM and the resume, the same run without a stop, `export`, `sample`, `lora merge`, and for SD3 `convert` to
a single file and back. Above 10 B parameters merge, convert and all weights run with `--depth third`, a third of the
blocks. The weights of text encoders of the real depth are deleted there after `cache` and `sample`, since the disk
cannot hold more: their files keep header and size.

Prints one table and writes it to OUT/table.json and OUT/table.md after every journey: seconds, GPU memory, host memory
and disk, each beside the estimate of `check` where it has one. `!` marks what differs by more than 8% (GPU memory) or
15% (host memory and disk). The output of each command is in OUT/NAME.txt. Exits with 1 if a journey failed. Journeys
that the model or the machine is too large for are listed with the reason.

`--journey` runs these and what they need. Up to `--lanes` journeys run at the same time, which makes each of them a
little slower; use `--lanes 1` to time them. Journeys that have not started after `--minutes` are left out and listed.
`--toy` does the same with a tiny model, on a CPU too. Peak host memory is that of the process and its children, without
mapped files. Peak GPU memory of `train` is what torch reserved by the run's log, otherwise the driver's. Model, cache,
runs and results of the commands are in `--work` (default: a temporary folder, which is removed).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.basics import best_device, device_name, parser_of, write_json
from common.models import FAMILIES, SD3, Model, denoiser_parameters, write_model
from common.processes import Ran, run_command
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from sd3_light.config.faults import RESUMABLE
from sd3_light.cost.amount import GIB
from sd3_light.runlog import read_log

NUM_IMAGES = 20
WORD = "sks"
PROMPT = f"a photo of a red {WORD} toy on a table"
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black", "pink", "brown")
SHAPES = ("ellipse", "rectangle")
TRAIN_STEPS = 6
STOPPED_STEPS = 80
LARGE = 10_000_000_000
"""Parameters above which a model of all blocks is neither merged nor trained as a whole."""
TOLERANCES = {"gpu": 0.08, "host": 0.15, "disk": 0.15}
ADAPTERS = {
    "lora": ('adapter.type="lora"',),
    "dora": ('adapter.type="lora"', "adapter.use_dora=true"),
    "lokr": ('adapter.type="lokr"',),
    "loha": ('adapter.type="loha"',),
}
_OF_SD3 = ("train dora", "train loha", "to file", "from file")
_OF_SMALL = ("merge", "to file", "from file", "new all", "cache all", "train all", "export all")


# --- images -------------------------------------------------------------------------------------


def captions(count: int = NUM_IMAGES) -> list[str]:
    """Return a caption per image."""
    return [
        f"a photo of a {COLOURS[n % len(COLOURS)]} {WORD} toy on a table, {SHAPES[n % 2]} number {n}"
        for n in range(count)
    ]


def write_images(folder: Path, side: int, count: int = NUM_IMAGES) -> None:
    """Draw images of two aspect ratios, each with its caption."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number, caption in enumerate(captions(count)):
        size = (side, side) if number % 2 else (side * 5 // 4, side * 4 // 5)
        coarse = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        corner = random.uniform(0.1, 0.4, 2) * size
        box = [*corner, *(corner + random.uniform(0.3, 0.5, 2) * size)]
        getattr(ImageDraw.Draw(image), SHAPES[number % 2])(box, fill=COLOURS[number % len(COLOURS)])
        image.save(folder / f"{number:02}.jpg", quality=95)
        (folder / f"{number:02}.txt").write_text(caption, encoding="utf-8")


# --- the journeys -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Journey:
    """One command of the table: its words, the journeys it needs, and the paths that it must leave behind.

    ``checked`` are the words of the `check` that estimates it, ``part`` the command in that estimate. ``written`` is a
    folder or file whose bytes count. ``frees`` is deleted afterwards; the files of ``forgets`` lose their values. A
    journey without words only deletes.
    """

    name: str
    needs: tuple[str, ...]
    words: tuple[object, ...] = ()
    leaves: tuple[str, ...] = ()  # patterns below the working folder
    run: Path | None = None  # whose log has the GPU memory
    exit_code: int = 0
    stop: bool = False
    checked: tuple[object, ...] = ()
    part: str = ""
    written: Path | None = None
    frees: tuple[str, ...] = ()  # patterns below the working folder
    forgets: tuple[str, ...] = ()  # patterns of safetensors files below it


@dataclass(frozen=True)
class Plan:
    """The working folder, the model in it, and the size of its denoiser."""

    work: Path
    model: Model
    parameters: int

    @property
    def forgets_encoders(self) -> bool:
        """Whether the text encoders are deleted before training."""
        return self.model.encoders == "deep" and self.parameters > LARGE

    def left_out(self, name: str) -> str:
        """Return why a journey is not made with this model; "" if it is."""
        if name in _OF_SMALL and self.parameters > LARGE:
            return f"left out: {self.parameters / 1e9:.1f} B parameters; see --depth third"
        return ""

    def journeys(self) -> list[Journey]:
        """Return the journeys in the order in which they start."""
        journeys = [*self._adapter_journeys(), *self._all_weights()]
        if self.model.family not in SD3:
            journeys = [journey for journey in journeys if journey.name not in _OF_SD3]
        return journeys

    def _sizes(self, *names: str) -> tuple[object, ...]:
        """Return the options for the size of a toy's images."""
        return tuple(word for name in names for word in (name, 64)) if self.model.toy else ()

    def _new(self, kind: str, project: Path) -> tuple[object, ...]:
        words = ("new", kind, "--data", self.work / "images", "--model", self.work / "model", "--out", project)
        return (*words, *(self._sizes("--resolution") or ("--resolution", 512)))

    def _train(self, toml: Path, folder: str, settings: Sequence[str], **fields: Any) -> Journey:
        run = self.work / "runs" / folder
        words = [word for setting in (f'output_dir="{run}"', *settings) for word in ("--set", setting)]
        more = ("--resume",) if folder == "stopped" and not fields.get("stop") else ()
        journey = Journey(
            f"train {folder}",
            ("forget encoders" if self.forgets_encoders else "cache",),
            ("train", toml, *more, *words),
            (f"runs/{folder}/exports/step-*/proof.json", f"runs/{folder}/checkpoints/step-*"),
            run,
            checked=("check", toml, "--json", *words),
            part="train",
            written=run,
        )
        return replace(journey, **fields)

    def _adapter_journeys(self) -> Iterator[Journey]:
        work = self.work
        model = work / "model"
        toml = work / "project" / "lora.toml"
        lora = work / "runs" / "lora"
        file = work / "merged.safetensors"
        checked = ("check", toml, "--json")
        few = (f"max_steps={TRAIN_STEPS}", "warmup_steps=0", "logging_steps=1")
        long = (f"max_steps={STOPPED_STEPS}", "logging_steps=1")
        sizes = self._sizes("--width", "--height")
        drawn = ("sample", model, PROMPT, "--steps", 8, *sizes, "--dtype", "bfloat16", "--out", work / "samples")
        with_lora = () if self.forgets_encoders else ("--lora", lora)
        needs = ("new",) if self.forgets_encoders else ("train lora",)
        sample = Journey("sample", needs, (*drawn, *with_lora), ("samples/00000.png",), checked=checked, part="sample")
        yield Journey("new", (), self._new("lora", work / "project"))
        yield Journey("check", ("new",), ("check", toml))
        cache = work / "project" / "lora_data.cache"
        yield Journey(
            "cache",
            ("new",),
            ("cache", toml),
            ("project/**/manifest.json",),
            checked=checked,
            part="cache",
            written=cache,
        )
        if self.forgets_encoders:
            yield sample
            yield Journey("forget encoders", ("cache", "sample"), forgets=("model/text_encoder*/*.safetensors",))
        yield self._train(toml, "lora", (*few, *ADAPTERS["lora"]))
        after = () if self.model.family in SD3 else ("merged",)
        merge = ("lora", "merge", model, work / "merged", lora)
        yield Journey("merge", ("train lora",), merge, ("merged/proof.json",), written=work / "merged", frees=after)
        yield self._train(toml, "dora", (*few, *ADAPTERS["dora"]))
        to_file = ("convert", work / "merged", file)
        yield Journey("to file", ("merge",), to_file, ("merged.safetensors",), written=file, frees=("merged",))
        back = ("convert", file, work / "back", "--base", model)
        leaves = ("back/transformer/config.json",)
        yield Journey("from file", ("to file",), back, leaves, written=work / "back", frees=("merged.*", "back"))
        yield self._train(toml, "lokr", (*few, *ADAPTERS["lokr"]))
        again = ("export", lora, work / "again")
        yield Journey(
            "export",
            ("train lora",),
            again,
            ("again/proof.json",),
            checked=checked,
            part="export",
            written=work / "again",
        )
        yield self._train(toml, "loha", (*few, *ADAPTERS["loha"]))
        if not self.forgets_encoders:
            yield sample
        stopped = ("runs/stopped/checkpoints/step-*",)
        yield self._train(
            toml, "stopped", long, name="stop", leaves=stopped, exit_code=RESUMABLE, stop=True, checked=(), written=None
        )
        # `check` does not know of the first part and its checkpoint
        yield self._train(toml, "stopped", long, name="resume", needs=("stop",), checked=())
        yield self._train(toml, "whole", long, name="whole")

    def _all_weights(self) -> Iterator[Journey]:
        work = self.work
        toml = work / "all" / "finetune.toml"
        settings = ("epochs=1000", "save_every_n_epochs=1000", f"max_steps={TRAIN_STEPS}", "warmup_steps=0")
        settings += ("logging_steps=1", "micro_batch_size_per_gpu=4", "gradient_accumulation_steps=1")
        settings += ("ema.enable=false",)
        train = self._train(toml, "all", settings, needs=("cache all",))
        yield Journey("new all", (), self._new("finetune", work / "all"))
        yield Journey("cache all", ("new all",), ("cache", toml))
        yield train
        words = ("export", work / "runs" / "all", work / "again_all")
        leaves = ("again_all/proof.json",)
        frees = ("runs/all/checkpoints", "again_all")
        yield Journey(
            "export all",
            ("train all",),
            words,
            leaves,
            checked=train.checked,
            part="export",
            written=work / "again_all",
            frees=frees,
        )


def selected(every: Sequence[Journey], names: Sequence[str]) -> list[Journey]:
    """Return the journeys of these names and those that they need."""
    by_name = {journey.name: journey for journey in every}
    chosen = set[str]()
    todo = list(names or by_name)
    while todo:
        name = todo.pop()
        chosen.add(name)
        todo += [need for need in by_name[name].needs if need not in chosen]
    return [journey for journey in every if journey.name in chosen]


# --- one journey --------------------------------------------------------------------------------


@dataclass
class Result:
    """A journey's row of the table. Measured numbers and estimates are GiB, by "gpu", "host" and "disk".

    ``gpu_by_step`` are the peaks up to each step of a run, allocated and reserved: they show what the most belongs to.
    """

    journey: str
    command: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    measured: dict[str, float] = field(default_factory=dict)
    estimated: dict[str, float] = field(default_factory=dict)
    gpu_by_step: list[tuple[float, float]] = field(default_factory=list)
    proof_seconds: float | None = None
    estimated_proof_seconds: float | None = None
    left_out: str = ""
    failure: str = ""
    last_lines: list[str] = field(default_factory=list)

    def deviates(self, kind: str) -> bool:
        """Return whether a number is farther from its estimate than is allowed."""
        if kind not in self.measured or kind not in self.estimated:
            return False
        return abs(self.estimated[kind] / self.measured[kind] - 1) > TOLERANCES[kind] if self.measured[kind] else True


def travel(journey: Journey, work: Path, out: Path, timeout: float) -> Result:
    """Run a journey's command beside the estimate of `check`, and look at its exit code and at what it left."""
    result = Result(journey.name, " ".join(map(_short, journey.words)))
    estimate: dict[str, Any] = {}
    if journey.checked:
        estimate = _estimate(journey, out, timeout)
        if estimate["does_not_fit"] and journey.part == "train":
            result.left_out = f"left out: {', '.join(estimate['does_not_fit'])} does not fit, by check"
            return result
    if journey.words:
        _run(journey, work, out, timeout, result)
        figures = estimate.get(journey.part, {})
        bytes_by_kind = {kind: figures.get(f"{kind}_bytes") for kind in TOLERANCES}
        result.estimated = {kind: count / GIB for kind, count in bytes_by_kind.items() if count}
        _add_proof(journey, work, result, figures if journey.part == "export" else estimate.get("export", {}))
    for pattern in journey.frees if not result.failure else ():
        for path in work.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for pattern in journey.forgets if not result.failure else ():
        for path in work.glob(pattern):
            forget_values(path)
    return result


def forget_values(path: Path) -> None:
    """Free the disk space of a safetensors file: its values become zeros, which take none; the rest stays as it is."""
    before = path.stat()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(8 + length)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the cache knows the file by size and time


def _estimate(journey: Journey, out: Path, timeout: float) -> dict[str, Any]:
    """Return what `check` estimates; one that does not fit ends with an error after its numbers."""
    output = out / f"{_file(journey)}_check.txt"
    run_command([str(word) for word in journey.checked], output, timeout)
    text = output.read_text(encoding="utf-8", errors="replace")
    assert "{" in text, f"check failed: {text}"
    figures: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return figures


def _run(journey: Journey, work: Path, out: Path, timeout: float, result: Result) -> None:
    run = journey.run
    output = out / f"{_file(journey)}.txt"
    stop_when = (lambda: journey.stop and bool(logged(run, "loss"))) if run is not None else (lambda: False)
    ran = run_command([str(word) for word in journey.words], output, timeout, stop_when, journey.written)
    result.seconds = ran.seconds
    result.exit_code = ran.exit_code
    missing = [pattern for pattern in journey.leaves if not any(work.glob(pattern))]
    if ran.exit_code != journey.exit_code:
        result.failure = f"exit code {ran.exit_code} instead of {journey.exit_code} after {ran.seconds:.0f} s"
    elif missing:
        result.failure = f"it left no {', '.join(missing)}"
    if result.failure:
        result.last_lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
    result.measured = {kind: value for kind, value in _measured(journey, ran).items() if value}
    if run is not None:
        result.gpu_by_step = list(zip(logged(run, "gpu_memory_gib"), logged(run, "gpu_reserved_gib"), strict=True))


def _measured(journey: Journey, ran: Ran) -> dict[str, float]:
    gpu = ran.gpu / GIB
    if journey.run is not None and (reserved := logged(journey.run, "gpu_reserved_gib")):
        gpu = max(reserved)
    return {"gpu": gpu, "host": ran.host / GIB, "disk": ran.disk / GIB}


def _add_proof(journey: Journey, work: Path, result: Result, figures: dict[str, Any]) -> None:
    """Add how long the proof of the last export took, and was estimated to take."""
    proofs = [path for pattern in journey.leaves if "proof" in pattern for path in sorted(work.glob(pattern))]
    if proofs and not result.failure:
        result.proof_seconds = json.loads(proofs[-1].read_text(encoding="utf-8"))["seconds"]
        result.estimated_proof_seconds = figures.get("seconds")


def logged(run: Path, key: str) -> list[Any]:
    """Return the values of a key in a run's log."""
    log = run / "log.jsonl"
    return [event[key] for event in read_log(log) if key in event] if log.is_file() else []


def _file(journey: Journey) -> str:
    return journey.name.replace(" ", "_")


def _short(word: object) -> str:
    text = str(word)
    return Path(text).name if text.startswith(os.sep) else text


# --- all of them --------------------------------------------------------------------------------


class Table:
    """The results so far, printed and written after every journey."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        self.out = out
        self.facts = facts
        self.results: list[Result] = []
        self._lock = threading.Lock()

    def add(self, result: Result) -> None:
        """Add a row."""
        with self._lock:
            self.results.append(result)
            content = {**self.facts, "journeys": [asdict(row) for row in self.results]}
            write_json(self.out / "table.json", content)
            (self.out / "table.md").write_text(self.text() + "\n", encoding="utf-8")
        outcome = result.failure or result.left_out or "passed"
        print(f"{result.journey}: {outcome} ({result.seconds:.0f} s)", flush=True)

    def text(self) -> str:
        """Return the table as Markdown, and the last lines of failed commands."""
        names = [name for kind in TOLERANCES for name in (f"{kind} GiB", "check")]
        lines = [f"| journey | seconds | {' | '.join(names)} | proof s | check | result |"]
        lines.append("|---|---:|" + "---:|" * (len(names) + 2) + "---|")
        lines += [_line(row) for row in self.results]
        for row in self.results:
            if row.last_lines:
                lines += ["", f"{row.journey}: sd3-light {row.command}", *(f"    {line}" for line in row.last_lines)]
        return "\n".join(lines)


def _line(row: Result) -> str:
    cells: list[Any] = [row.journey, row.seconds]
    for kind in TOLERANCES:
        mark = " !" if row.deviates(kind) else ""
        cells.append(_digits(row.measured.get(kind)))
        cells.append(_digits(row.estimated.get(kind)) + mark)
    cells += [row.proof_seconds, row.estimated_proof_seconds, row.failure or row.left_out or "passed"]
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def run_all(todo: list[Journey], plan: Plan, table: Table, timeout: float, deadline: float) -> None:
    """Run the journeys, each when those that it needs have passed."""
    passed = set[str]()
    missed: dict[str, str] = {}
    running: dict[Future[Result], Journey] = {}
    lanes: int = table.facts["lanes"]
    with ThreadPoolExecutor(lanes) as pool:
        while todo or running:
            for journey in list(todo):
                row = Result(journey.name, left_out=plan.left_out(journey.name))
                lost = sorted(missed.keys() & set(journey.needs))
                if lost and not row.left_out:
                    row.left_out = missed[lost[0]] if missed[lost[0]].startswith("left out") else ""
                    row.failure = "" if row.left_out else f"not run: {', '.join(lost)} failed"
                elif time.monotonic() > deadline and not row.left_out:
                    row.failure = "not run: out of time"
                if row.failure or row.left_out:
                    todo.remove(journey)
                    missed[journey.name] = row.left_out
                    table.add(row)
                elif len(running) < lanes and passed >= set(journey.needs):
                    todo.remove(journey)
                    running[pool.submit(travel, journey, plan.work, table.out, timeout)] = journey
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                journey = running.pop(future)
                result = future.result()
                if result.failure or result.left_out:
                    missed[journey.name] = result.left_out
                else:
                    passed.add(journey.name)
                table.add(result)


def compared(stopped: Path, whole: Path) -> str:
    """Say how the last LoRA of a run that was stopped and resumed differs from that of the same run in one go."""
    files = [next(iter(sorted(run.glob("exports/step-*/*.safetensors"))[-1:]), None) for run in (stopped, whole)]
    if None in files:
        return "resumed and whole runs: not both ran"
    one, other = (load_file(file) for file in files if file is not None)
    largest = max(float((one[name].float() - other[name].float()).abs().max()) for name in one)
    return f"resumed and whole runs: {len(one)} tensors, largest difference {largest:.1e}"


def rehearse(args: argparse.Namespace, model: Model, device: torch.device, work: Path) -> Table:
    """Make the model and its images in ``work``, and run the chosen journeys; return their table."""
    started = time.monotonic()
    work.mkdir(parents=True)
    write_images(work / "images", 128 if model.toy else 1024, args.images)
    parameters = write_model(model, work / "model", [*captions(), PROMPT], device)
    seconds = time.monotonic() - started
    torch.cuda.empty_cache()
    name = device_name()
    facts = {**asdict(model), "parameters": parameters, "device": name, "torch": torch.__version__, "lanes": args.lanes}
    print(f"{parameters:,} parameters on {name}: model and images written in {seconds:.0f} s", flush=True)
    table = Table(args.out.absolute(), facts)
    plan = Plan(work, model, parameters)
    timeout = 1800 if model.toy else args.timeout
    run_all(selected(plan.journeys(), args.journey), plan, table, timeout, started + 60 * args.minutes)
    print(compared(work / "runs" / "stopped", work / "runs" / "whole"))
    return table


def main() -> None:
    """Run the benchmark."""
    started = time.monotonic()
    parser = parser_of(__doc__)
    parser.add_argument("family", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument(
        "--depth", default="full", help="blocks of the denoiser: full, third, or their number (SD3: 2 or more)"
    )
    parser.add_argument("--encoders", choices=("wide", "deep"), default="wide", help="two layers, or all of them")
    parser.add_argument("--journey", nargs="+", metavar="NAME", default=[], help="only these, and what they need")
    parser.add_argument("--images", type=int, default=NUM_IMAGES, help="number of images")
    parser.add_argument("--lanes", type=int, default=2, help="journeys at the same time")
    parser.add_argument("--minutes", type=float, default=7.5, help="start no journey after this time")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a command")
    parser.add_argument("--work", type=Path, help="new folder of the model, caches and runs")
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    args = parser.parse_args()
    if args.depth not in ("full", "third") and not args.depth.isdecimal():
        parser.error(f"--depth {args.depth}: choose full, third or a number of blocks")
    model = Model(args.family, args.depth, args.encoders, args.toy)
    names = [journey.name for journey in Plan(Path("work"), model, denoiser_parameters(model)).journeys()]
    if unknown := sorted(set(args.journey) - set(names)):
        parser.error(f"unknown journey {unknown[0]}; choose from: {', '.join(names)}")
    device = best_device()
    if device.type == "cpu" and not args.toy:
        parser.error("the real size needs a GPU; try --toy")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        table = rehearse(args, model, device, (args.work or Path(temporary) / "work").absolute())
    print(f"\n{table.text()}\n\n{time.monotonic() - started:.0f} s in all")
    sys.exit(any(result.failure for result in table.results))


if __name__ == "__main__":
    main()
