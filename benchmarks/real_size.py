"""Every command of a LoRA project at the size of SD3.5 medium: does it work, how long does it take, how large is it?

    python benchmarks/real_size.py OUT [--family flux] [--journey NAME ...] [--lanes 2] [--minutes 7.5] [--toy]

Makes a model of SD3.5 medium's published shape from random weights on the GPU (2.24 B parameters in bf16, SD3's VAE,
text encoders of the real widths with two layers) and 20 captioned images of 1024 px. Then runs `new lora`, `check`,
`cache`, `train` with LoRA, DoRA, LoKr and LoHa (each with its export and proof), a stop by SIGTERM and the resume,
`export`, `sample --lora`, `lora merge`, and `convert` to a single file and back. Prints one table and writes it to
OUT/table.json and OUT/table.md after every journey; the output of each command is in OUT/NAME.txt. Exits with 1 if a
journey failed.

With `--family` the model is one of `real_families.py`: its published widths and VAE, fewer blocks. The journeys are
then `new`, `check`, `cache`, `train`, a stop and the resume, the same run without a stop, whose LoRA is compared,
`export`, `sample` and `lora merge`; `PYTHONPATH` must name the root of the repository.

`--journey` runs these and what they need. Up to `--lanes` journeys run at the same time, which makes each of them a
little slower; use `--lanes 1` to time them. Journeys that have not started after `--minutes` are left out and listed.
`--toy` does the same with a tiny model, on a CPU too. Peak host memory is that of the process and its children, without
mapped files; peak GPU memory is the driver's, or else what the run logged. Model, cache, runs and results of the
commands take 30 GB in `--work` (default: a temporary folder, which is removed).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from sd3_light.config.faults import RESUMABLE
from sd3_light.parts.text_encoders import build_clip, build_t5, num_heads
from sd3_light.parts.tokenizers import learn_tokenizers, save_tokenizers
from sd3_light.runlog import read_log

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
NUM_IMAGES = 20
WORD = "sks"
PROMPT = f"a photo of a red {WORD} toy on a table"
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black", "pink", "brown")
SHAPES = ("ellipse", "rectangle")
TRAIN_STEPS, STOPPED_STEPS = 6, 80
CLIP_TOKENS, T5_TOKENS = 77, 512
ADAPTERS = {
    "lora": ['adapter.type="lora"'],
    "dora": ['adapter.type="lora"', "adapter.use_dora=true"],
    "lokr": ['adapter.type="lokr"'],
    "loha": ['adapter.type="loha"'],
}


@dataclass(frozen=True)
class Shape:
    """The widths of a model's parts, the size of the images, and the options that fit them."""

    layers: int
    heads: int
    dual: int
    clip_l: int
    clip_g: int
    t5: int
    t5_inner: int
    vae: tuple[int, ...]
    positions: int
    side: int  # of an image, in pixels
    timeout: int  # of a command, in seconds
    new: tuple[str, ...] = ()
    sample: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The width of the denoiser."""
        return 64 * self.heads


MEDIUM = Shape(24, 24, 13, 768, 1280, 4096, 10240, (128, 256, 512, 512), 384, 1024, 240, sample=("--dtype", "bfloat16"))
TOY = Shape(
    2, 2, 1, 64, 64, 128, 256, (8, 8, 8, 8), 24, 128, 1800, ("--resolution", "64"), ("--width", "64", "--height", "64")
)


# --- the model and its images -----------------------------------------------------------------


def captions() -> list[str]:
    """Return a caption per image."""
    return [
        f"a photo of a {COLOURS[n % len(COLOURS)]} {WORD} toy on a table, {SHAPES[n % 2]} number {n}"
        for n in range(NUM_IMAGES)
    ]


def write_images(folder: Path, side: int) -> None:
    """Draw images of two aspect ratios, each with its caption."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number, caption in enumerate(captions()):
        size = (side, side) if number % 2 else (side * 5 // 4, side * 4 // 5)
        coarse = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        corner = random.uniform(0.1, 0.4, 2) * size
        box = [*corner, *(corner + random.uniform(0.3, 0.5, 2) * size)]
        getattr(ImageDraw.Draw(image), SHAPES[number % 2])(box, fill=COLOURS[number % len(COLOURS)])
        image.save(folder / f"{number:02}.jpg", quality=95)
        (folder / f"{number:02}.txt").write_text(caption, encoding="utf-8")


def write_model(folder: Path, shape: Shape, device: torch.device) -> int:
    """Write a complete diffusers folder of random weights in bf16; return the denoiser's parameters."""
    torch.manual_seed(0)
    tokenizers = learn_tokenizers([*captions(), PROMPT], 1000)
    for name, tokenizer in tokenizers.items():
        tokenizer.model_max_length = T5_TOKENS if name == "tokenizer_3" else CLIP_TOKENS
    save_tokenizers(tokenizers, folder)
    first, second, third = tokenizers.values()
    side = shape.side // 8
    with torch.device(device):
        denoiser = SD3Transformer2DModel(
            sample_size=side, patch_size=2, in_channels=16, out_channels=16, num_layers=shape.layers,
            attention_head_dim=64, num_attention_heads=shape.heads, joint_attention_dim=shape.t5,
            caption_projection_dim=shape.width, pooled_projection_dim=shape.clip_l + shape.clip_g,
            pos_embed_max_size=shape.positions, dual_attention_layers=tuple(range(shape.dual)), qk_norm="rms_norm",
        )  # fmt: skip
        vae = AutoencoderKL(
            in_channels=3, out_channels=3, latent_channels=16, layers_per_block=2, block_out_channels=shape.vae,
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            norm_num_groups=min(32, shape.vae[0]), scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False,
            use_post_quant_conv=False, sample_size=shape.side,
        )  # fmt: skip
        encoders = {
            "text_encoder": build_clip(first, shape.clip_l, 2, num_heads(shape.clip_l), "quick_gelu"),
            "text_encoder_2": build_clip(second, shape.clip_g, 2, num_heads(shape.clip_g), "gelu"),
            "text_encoder_3": build_t5(third, shape.t5, 2, shape.t5 // 64, shape.t5_inner),
        }
    for name, part in {"transformer": denoiser, "vae": vae, **encoders}.items():
        part.to(torch.bfloat16).save_pretrained(folder / name)
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    index: dict[str, Any] = {
        "_class_name": "StableDiffusion3Pipeline",
        **{name: ["transformers", type(part).__name__] for name, part in encoders.items()},
        "tokenizer": ["transformers", "CLIPTokenizerFast"],
        "tokenizer_2": ["transformers", "CLIPTokenizerFast"],
        "tokenizer_3": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return sum(parameter.numel() for parameter in denoiser.parameters())


# --- one command ------------------------------------------------------------------------------


@dataclass
class Peaks:
    """The most host and GPU memory that a process and its children held, in bytes."""

    host: int = 0
    gpu: int = 0
    looks: int = 0

    def look(self, process: int) -> None:
        """Look once; at the GPU, which takes longer, every tenth time."""
        tree = list(_tree(process))
        self.host = max(self.host, sum(map(_anonymous, tree)))
        if self.looks % 10 == 0 and shutil.which("nvidia-smi"):
            self.gpu = max(self.gpu, sum(used for owner, used in _gpu_users() if owner in tree))
        self.looks += 1


def _tree(root: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield root
    for tasks in Path(f"/proc/{root}/task").glob("*/children"):
        for child in _read(tasks).split():
            yield from _tree(int(child))


def _anonymous(process: int) -> int:
    lines = _read(Path(f"/proc/{process}/status")).splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the process has just ended
        return ""


def _gpu_users() -> Iterator[tuple[int, int]]:
    """Yield (process, bytes) of all processes on the GPU; in a container their numbers may be the host's."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
        process, _, mebibytes = line.partition(",")
        if process.strip().isdecimal() and mebibytes.strip().isdecimal():
            yield int(process), int(mebibytes) << 20


@dataclass
class Result:
    """A journey's row of the table."""

    journey: str
    command: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    gpu_gib: float | None = None
    host_gib: float | None = None
    failure: str = ""
    last_lines: list[str] = field(default_factory=list)


def run_command(
    words: Sequence[object], output: Path, timeout: int, stop_when: Callable[[], bool] = lambda: False
) -> Result:
    """Run ``sd3-light WORDS`` and return its row; send SIGTERM once ``stop_when`` returns True."""
    arguments = [str(word) for word in words]
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    command = [sys.executable, "-P", "-m", "sd3_light", *arguments]
    started, peaks, stopped = time.monotonic(), Peaks(), False
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None:
            peaks.look(process.pid)
            if not stopped and stop_when():
                process.send_signal(signal.SIGTERM)
                stopped = True
            if time.monotonic() - started > timeout:
                for owned in _tree(process.pid):
                    os.kill(owned, signal.SIGKILL)
            time.sleep(0.1)
    result = Result("", " ".join(map(_short, arguments)), round(time.monotonic() - started, 1), process.returncode)
    result.gpu_gib = round(peaks.gpu / GIB, 1) if peaks.gpu else None
    result.host_gib = round(peaks.host / GIB, 1)
    result.last_lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
    return result


def _short(argument: str) -> str:
    return Path(argument).name if argument.startswith(os.sep) else argument


# --- the journeys -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Journey:
    """One command of the table: its words, the journeys it needs, and the paths that it must leave behind."""

    name: str
    needs: tuple[str, ...]
    words: tuple[object, ...]
    leaves: tuple[str, ...] = ()  # patterns below the working folder
    run: Path | None = None  # whose log has the GPU memory
    exit_code: int = 0
    stop: bool = False


_OF_SD3 = ("train dora", "train lokr", "train loha", "to file", "from file")


def journeys(work: Path, shape: Shape, family: str = "sd3") -> list[Journey]:
    """Return the journeys in the order in which they start."""
    model, project, toml = work / "model", work / "project", work / "project" / "lora.toml"
    lora, merged, file = work / "runs" / "lora", work / "merged", work / "merged.safetensors"

    def train(name: str, *settings: str, more: Sequence[str] = ()) -> tuple[object, ...]:
        run = f'output_dir="{work / "runs" / name}"'
        return ("train", toml, *more, *(word for setting in (run, *settings) for word in ("--set", setting)))

    def adapter(name: str) -> Journey:
        leaves = (f"runs/{name}/exports/step-*/proof.json", f"runs/{name}/checkpoints/step-*")
        words = train(name, f"max_steps={TRAIN_STEPS}", "warmup_steps=0", "logging_steps=1", *ADAPTERS[name])
        return Journey(f"train {name}", ("cache",), words, leaves, work / "runs" / name)

    stopped = [f"max_steps={STOPPED_STEPS}", "logging_steps=1"]
    proven = ("runs/stopped/exports/step-*/proof.json",)
    every = [
        Journey("new", (), ("new", "lora", "--data", work / "images", "--model", model, "--out", project, *shape.new)),
        Journey("check", ("new",), ("check", toml)),
        Journey("cache", ("new",), ("cache", toml), ("project/**/manifest.json",)),
        adapter("lora"),
        Journey("merge", ("train lora",), ("lora", "merge", model, merged, lora), ("merged/proof.json",)),
        adapter("dora"),
        Journey("to file", ("merge",), ("convert", merged, file), ("merged.safetensors",)),
        Journey(
            "from file",
            ("to file",),
            ("convert", file, work / "back", "--base", model),
            ("back/transformer/config.json",),
        ),
        adapter("lokr"),
        Journey("export", ("train lora",), ("export", lora, work / "again"), ("again/proof.json",)),
        adapter("loha"),
        Journey(
            "sample",
            ("train lora",),
            ("sample", model, PROMPT, "--lora", lora, "--steps", 8, *shape.sample, "--out", work / "samples"),
            ("samples/00000.png",),
        ),
        Journey(
            "stop",
            ("cache",),
            train("stopped", *stopped),
            ("runs/stopped/checkpoints/step-*",),
            work / "runs" / "stopped",
            exit_code=RESUMABLE,
            stop=True,
        ),
        Journey("resume", ("stop",), train("stopped", *stopped, more=["--resume"]), proven, work / "runs" / "stopped"),
        Journey("whole", ("cache",), train("whole", *stopped), (), work / "runs" / "whole"),
    ]
    return every if family == "sd3" else [journey for journey in every if journey.name not in _OF_SD3]


def logged(run: Path, key: str) -> list[Any]:
    """Return the values of a key in a run's log."""
    log = run / "log.jsonl"
    return [event[key] for event in read_log(log) if key in event] if log.is_file() else []


def travel(journey: Journey, work: Path, out: Path, timeout: int) -> Result:
    """Run a journey's command, and check its exit code and what it left."""
    run, output = journey.run, out / f"{journey.name.replace(' ', '_')}.txt"
    stop_when = (lambda: journey.stop and bool(logged(run, "loss"))) if run is not None else (lambda: False)
    result = run_command(journey.words, output, timeout, stop_when)
    result.journey = journey.name
    missing = [pattern for pattern in journey.leaves if not any(work.glob(pattern))]
    if result.exit_code != journey.exit_code:
        result.failure = f"exit code {result.exit_code} instead of {journey.exit_code} after {result.seconds:.0f} s"
    elif missing:
        result.failure = f"it left no {', '.join(missing)}"
    else:
        result.last_lines = []
    if run is not None and result.gpu_gib is None:
        result.gpu_gib = round(max(logged(run, "gpu_reserved_gib"), default=0), 1) or None
    return result


def selected(all_journeys: Sequence[Journey], names: Sequence[str]) -> list[Journey]:
    """Return the journeys of these names and those that they need."""
    by_name = {journey.name: journey for journey in all_journeys}
    chosen, todo = set[str](), list(names or by_name)
    while todo:
        name = todo.pop()
        chosen.add(name)
        todo += [need for need in by_name[name].needs if need not in chosen]
    return [journey for journey in all_journeys if journey.name in chosen]


class Table:
    """The results so far, printed and written after every journey."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        self.out, self.facts = out, facts
        self.results: list[Result] = []
        self._lock = threading.Lock()

    def add(self, result: Result) -> None:
        """Add a row."""
        with self._lock:
            self.results.append(result)
            content = {**self.facts, "journeys": [asdict(row) for row in self.results]}
            (self.out / "table.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            (self.out / "table.md").write_text(self.text() + "\n", encoding="utf-8")
        print(f"{result.journey}: {result.failure or 'passed'} ({result.seconds:.0f} s)", flush=True)

    def text(self) -> str:
        """Return the table as Markdown, and the last lines of failed commands."""
        lines = ["| journey | seconds | exit code | GPU GiB | host GiB | result |", "|---|---:|---:|---:|---:|---|"]
        for row in self.results:
            cells = [row.journey, row.seconds, row.exit_code, row.gpu_gib, row.host_gib, row.failure or "passed"]
            lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
        for row in self.results:
            if row.last_lines:
                lines += ["", f"{row.journey}: sd3-light {row.command}", *(f"    {line}" for line in row.last_lines)]
        return "\n".join(lines)


def run_all(todo: list[Journey], work: Path, table: Table, timeout: int, deadline: float) -> None:
    """Run the journeys, each when those that it needs have passed."""
    passed, failed = set[str](), set[str]()
    running: dict[Future[Result], Journey] = {}
    lanes: int = table.facts["lanes"]
    with ThreadPoolExecutor(lanes) as pool:
        while todo or running:
            for journey in list(todo):
                reason = ""
                if lost := failed & set(journey.needs):
                    reason = f"not run: {', '.join(sorted(lost))} failed"
                elif time.monotonic() > deadline:
                    reason = "not run: out of time"
                if reason:
                    todo.remove(journey)
                    failed.add(journey.name)
                    table.add(Result(journey.name, failure=reason))
                elif len(running) < lanes and passed >= set(journey.needs):
                    todo.remove(journey)
                    running[pool.submit(travel, journey, work, table.out, timeout)] = journey
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                journey, result = running.pop(future), future.result()
                (failed if result.failure else passed).add(journey.name)
                table.add(result)


def make_model(family: str, folder: Path, shape: Shape, device: torch.device) -> int:
    """Write the model of a family; return the denoiser's parameters."""
    if family == "sd3":
        return write_model(folder, shape, device)
    from real_families import write_family

    return write_family(family, folder, device, shape is TOY)


def compared(stopped: Path, whole: Path) -> str:
    """Say how the last LoRA of a run that was stopped and resumed differs from that of the same run in one go."""
    files = [next(iter(sorted(run.glob("exports/step-*/*.safetensors"))[-1:]), None) for run in (stopped, whole)]
    if None in files:
        return "resumed and whole runs: not both ran"
    one, other = (load_file(file) for file in files if file is not None)
    largest = max(float((one[name].float() - other[name].float()).abs().max()) for name in one)
    return f"resumed and whole runs: {len(one)} tensors, largest difference {largest:.1e}"


def main() -> None:
    """Run the benchmark."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--journey", nargs="+", metavar="NAME", default=[], help="only these, and what they need")
    parser.add_argument("--lanes", type=int, default=2, help="journeys at the same time")
    parser.add_argument("--minutes", type=float, default=7.5, help="start no journey after this time")
    parser.add_argument("--work", type=Path, help="new folder of the model, caches and runs")
    parser.add_argument("--family", default="sd3", help="sd3, or a family of real_families.py")
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    args = parser.parse_args()
    names = [journey.name for journey in journeys(Path("work"), TOY, args.family)]
    if unknown := sorted(set(args.journey) - set(names)):
        parser.error(f"unknown journey {unknown[0]}; choose from: {', '.join(names)}")
    shape, device = TOY if args.toy else MEDIUM, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.toy:
        parser.error("the real size needs a GPU; try --toy")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary) / "work").absolute()
        work.mkdir(parents=True)
        write_images(work / "images", shape.side)
        parameters = make_model(args.family, work / "model", shape, device)
        seconds = time.monotonic() - started
        torch.cuda.empty_cache()
        device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        facts = {"parameters": parameters, "device": device_name, "torch": torch.__version__, "lanes": args.lanes}
        print(f"{parameters:,} parameters on {device_name}: model and images written in {seconds:.0f} s", flush=True)
        table = Table(args.out.absolute(), facts)
        run_all(
            selected(journeys(work, shape, args.family), args.journey),
            work,
            table,
            shape.timeout,
            started + 60 * args.minutes,
        )
        for proof in sorted(work.glob("runs/*/exports/step-*/proof.json")):
            record = json.loads(proof.read_text(encoding="utf-8"))
            print(f"proof of {proof.parents[2].name}: {record['seconds']} s, difference {record['max_difference']:.1e}")
        print(compared(work / "runs" / "stopped", work / "runs" / "whole"))
    print(f"\n{table.text()}\n\n{time.monotonic() - started:.0f} s in all")
    sys.exit(any(result.failure for result in table.results))


if __name__ == "__main__":
    main()
