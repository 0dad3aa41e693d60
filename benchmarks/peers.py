"""Fine-tuning steps of this package beside those of diffusers' own example scripts, on the same machine and model.

    python benchmarks/peers.py OUT --scripts FOLDER [--row NAME ...] [--steps 60] [--ours-steps 120] [--toy]
    python benchmarks/peers.py OUT --anchors [--ours-steps 30]

FOLDER has diffusers' scripts of `examples/dreambooth`, as they are published (`train_dreambooth_lora_sd3.py`,
`train_dreambooth_sd3.py`, ...; the reader downloads them); they need their version of diffusers, and torchvision. The
model and the 20 images of 1024 px are those of `real_size.py`: SD3.5 medium's or another family's shape, random
weights. Both sides train the same layers at the same resolution, batch, rank, text length and
dtype, from latents and texts that were encoded before (`train_dreambooth_sd3.py` encodes images in every step), without
validation and averages. Each row runs the script, then `sd3-light train`; both end after their last timed step, without
an export. A time is the median of the steps after the first third; `idle` is the share of our time in which the GPU
waits for the next step. On a GPU our blocks are compiled, as in a run of usual length; the time to the first step
contains that. Memory is PyTorch's peak of allocated bytes. Scripts are unchanged but for one cast: that for SD3's LoRA
gives pixels in bf16 to a VAE in float32 where it caches latents, and stops there. Prints each side as soon as it is
known, and writes OUT/peers.json. `--steps 30 --ours-steps 60` takes about two minutes per row of SD3, and four for the
other families, whose models are 12 to 41 GB on disk.

`--anchors` trains ours alone, in the rows that SimpleTuner publishes for an H100 (`SEGMENTED_CHECKPOINTING.md` of its
documentation, commit 363fbc3): time after the warm-up and peak memory, bf16. They are orientation, not a claim: another
GPU and torch, real weights and images; batch and rank are those of its example configs; its optimizer, lengths of text,
adapted layers and attention are not stated, and not whether its peak is of allocated or of reserved memory.
"""

import argparse
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common.basics import best_device, child_environment, device_name, parser_of, write_json
from common.models import Model, write_model
from PIL import Image
from real_size import PROMPT, captions, write_images

from sd3_light.cost.amount import GIB
from sd3_light.runlog import read_log

LORA = ("--rank", "16", "--lora_alpha", "16")
SD3_TEXT = ("--max_sequence_length", "256")
FLUX_FLAGS = (*LORA, "--max_sequence_length", "512", "--guidance_scale", "1")
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
BOTH_STREAMS = (*(f"attn.{name}" for name in ATTENTION), "attn.add_[kqv]_proj", "attn.to_add_out")
FLUX_LAYERS = (*BOTH_STREAMS, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


@dataclass(frozen=True)
class Row:
    """Work that both sides do. ``flags`` are the script's own, ``keys`` those of the train TOML.

    ``targets`` are the layers to which the script adds a LoRA, ``overrides`` are passed to our command. Clips have
    ``frames`` frames of ``resolution`` lines. ``published`` are seconds per step and GiB. A row without a script has
    our side only.
    """

    script: str
    resolution: int
    batch: int
    family: str = "sd3"
    targets: tuple[str, ...] = BOTH_STREAMS
    flags: tuple[str, ...] = LORA
    cudnn: bool = True
    """Whether the script may use cuDNN's attention, whose backward pass fails on Flux (H200, torch 2.11)."""
    keys: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    rank: int = 16
    frames: int = 0
    published: tuple[float, float] | None = None


CHECKPOINTING = {"activation_checkpointing": True}
SMALL = ('optimizer.type="adamw8bit"', "gradient_release=true", "gradient_clipping=0.0")
EIGHT_BITS = ("adapter.base_bits=8",)
ROWS = {
    "lora-512-4": Row("train_dreambooth_lora_sd3.py", 512, 4, flags=(*LORA, *SD3_TEXT)),
    "lora-1024-1": Row("train_dreambooth_lora_sd3.py", 1024, 1, flags=(*LORA, *SD3_TEXT)),
    "lora-1024-4-checkpointing": Row(
        "train_dreambooth_lora_sd3.py",
        1024,
        4,
        flags=(*LORA, *SD3_TEXT, "--gradient_checkpointing"),
        keys=CHECKPOINTING,
    ),
    "lora-1024-4-half": Row(
        "train_dreambooth_lora_sd3.py",
        1024,
        4,
        flags=(*LORA, *SD3_TEXT, "--gradient_checkpointing"),
        keys={"activation_checkpointing": 0.5},
    ),
    # a quarter of the blocks is recomputed: recorded steps hold more than the script otherwise
    "all-512-4": Row(
        "train_dreambooth_sd3.py", 512, 4, targets=(), flags=SD3_TEXT, keys={"activation_checkpointing": 0.25}
    ),
    "all-512-4-small": Row("", 512, 4, targets=(), overrides=SMALL),  # the script of `all-512-4` has no such form
    "flux-1024-1": Row("train_dreambooth_lora_flux.py", 1024, 1, "flux", FLUX_LAYERS, FLUX_FLAGS, cudnn=False),
    "qwen-1024-1": Row("train_dreambooth_lora_qwen_image.py", 1024, 1, "qwen_image", ATTENTION),
    # beside the scripts' rows without these words: products with frozen weights in 8 bits
    "flux-1024-1-8bit": Row("", 1024, 1, "flux", FLUX_LAYERS, overrides=EIGHT_BITS),
    "qwen-1024-1-8bit": Row("", 1024, 1, "qwen_image", ATTENTION, overrides=EIGHT_BITS),
    "z-image-1024-1": Row("train_dreambooth_lora_z_image.py", 1024, 1, "z_image", ATTENTION),
    "anchor-sd3": Row("", 1024, 3, "sd3_medium", rank=128, published=(0.529, 34.59)),
    "anchor-sd3-checkpointing": Row("", 1024, 3, "sd3_medium", rank=128, keys=CHECKPOINTING, published=(0.721, 7.67)),
    "anchor-z-image": Row("", 1024, 1, "z_image", ATTENTION, rank=64, published=(0.243, 21.3)),
    # with checkpointing: without it the published run does not fit into 80 GB
    "anchor-qwen": Row("", 1024, 1, "qwen_image", ATTENTION, rank=8, keys=CHECKPOINTING, published=(1.202, 41.04)),
    "anchor-wan": Row("", 480, 1, "wan", ATTENTION, frames=81, published=(1.407, 71.9)),
    "anchor-wan-checkpointing": Row(
        "", 480, 1, "wan", ATTENTION, keys=CHECKPOINTING, frames=81, published=(2.099, 4.73)
    ),
}
ANCHORS = [name for name, row in ROWS.items() if row.published]
TRAIN = """
output_dir = "{work}/runs/{name}"
dataset = "{work}/{name}_data.toml"
seed = 1
max_steps = {last}
micro_batch_size_per_gpu = {batch}
logging_steps = {logging}
gradient_clipping = 1.0
checkpoint_every_n_steps = {last}
{keys}
[model]
diffusers_path = "{model}"
dtype = "bfloat16"
transformer_dtype = "bfloat16"

[optimizer]
type = "adamw"
lr = 1e-4
{adapter}
[ema]
enable = false
"""
DATA = """
{sizes}
[[directory]]
path = "{images}"
"""
ADAPTER = """
[adapter]
type = "lora"
rank = {rank}
alpha = {rank}
target_modules = {targets}
"""


@dataclass
class Side:
    """What one side needed."""

    seconds: float | None = None
    gib: float | None = None
    first_step: float | None = None
    idle: float | None = None
    failure: str = ""


# --- the script, in another process --------------------------------------------------------


class Enough(Exception):
    """The last timed step is done."""


def run_script(script: str, results: Path, steps: int, cudnn: bool, arguments: list[str]) -> None:
    """Run a script as it is; record when its progress bar moves, and end it after ``steps`` of them."""
    from diffusers import AutoencoderKL
    from tqdm.auto import tqdm

    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    encode = AutoencoderKL.encode
    AutoencoderKL.encode = lambda vae, pixels, *rest, **more: encode(vae, pixels.to(vae.dtype), *rest, **more)
    times: list[float] = []
    update = tqdm.update

    def recorded(bar: Any, n: float | None = 1) -> Any:
        if bar.desc == "Steps":
            times.append(time.perf_counter())
        if len(times) == steps:
            raise Enough
        return update(bar, n)

    tqdm.update = recorded
    started = time.perf_counter()
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    finally:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        content = {"started": started, "times": times, "peak": peak}
        results.write_text(json.dumps(content), encoding="utf-8")


def peer(name: str, row: Row, work: Path, out: Path, args: argparse.Namespace) -> Side:
    """Run the script of a row."""
    results = work / f"{name}_peer.json"
    arguments = [
        "--pretrained_model_name_or_path", str(work / "model"), "--instance_data_dir", str(work / "only_images"),
        "--instance_prompt", PROMPT, "--output_dir", str(work / f"{name}_peer"), "--resolution", str(row.resolution),
        "--train_batch_size", str(row.batch), "--max_train_steps", str(2 * args.steps), "--mixed_precision", "bf16",
        "--learning_rate", "1e-4", "--lr_scheduler", "constant", "--lr_warmup_steps", "0", "--report_to", "tensorboard",
        "--checkpointing_steps", str(10 * args.steps), "--seed", "0", "--gradient_accumulation_steps", "1",
        "--cache_latents", "--allow_tf32", "--skip_final_inference", *row.flags,
    ]  # fmt: skip
    script = (args.scripts / row.script).absolute()
    if not script.is_file():
        return Side(failure=f"there is no {row.script} in {args.scripts}")
    arguments = known_flags(arguments, script.read_text(encoding="utf-8"))
    facts = [str(script), str(results), str(args.steps), str(int(row.cudnn))]
    command = [sys.executable, __file__, "--script", *facts, *arguments]
    _run(command, out / f"{name}_peer.txt", args.timeout)
    if not results.is_file():
        return Side(failure="it did not end; see its output")
    record = json.loads(results.read_text(encoding="utf-8"))
    return _side(record["times"], record["started"], record["peak"] / GIB, args.steps)


def known_flags(arguments: list[str], script: str) -> list[str]:
    """Return the flags, with their values, that a script's text names."""
    kept: list[str] = []
    known = True
    for word in arguments:
        if word.startswith("--"):
            known = f'"{word}"' in script
        if known:
            kept.append(word)
    return kept


def ours(name: str, row: Row, work: Path, out: Path, args: argparse.Namespace) -> Side:
    """Run the training stage of a row."""
    settings = {**row.keys, **({"compile": True} if torch.cuda.is_available() else {})}
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    steps = args.ours_steps
    logging = max(1, min(5, steps // 6))
    adapter = ADAPTER.format(rank=row.rank, targets=json.dumps(row.targets)) if row.targets else ""
    text = TRAIN.format(
        work=work,
        name=name,
        last=100 * steps,
        batch=row.batch,
        keys=keys,
        model=work / "model",
        adapter=adapter,
        logging=logging,
    )
    toml = work / f"{name}.toml"
    toml.write_text(text, encoding="utf-8")
    sizes = f"resolutions = [{row.resolution}]"
    if row.frames:
        sizes = f"frames = {row.frames}\nsize_buckets = [{list(clip_size(row))}]"
        write_clips(work / "clips", row)
    data = DATA.format(sizes=sizes, images=work / ("clips" if row.frames else "images"))
    (work / f"{name}_data.toml").write_text(data, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "sd3_light"]
    _run([*command, "cache", str(toml)], out / f"{name}_cache.txt", args.timeout)
    started = time.time()
    overrides = [word for setting in (*row.overrides, *args.set) for word in ("--set", setting)]
    log = work / "runs" / name / "log.jsonl"
    words = [*command, "train", str(toml), *overrides]
    _run(words, out / f"{name}_ours.txt", args.timeout, lambda: len(steps_of(log)) * logging >= steps)
    events = steps_of(log)
    if not events:
        return Side(failure="no step was logged; see its output")
    times = [(event["step"], event["time"]) for event in events]
    warm = [pair for pair in times if pair[0] > steps // 3]
    spans = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(warm)]
    peak = max(event.get("gpu_memory_gib", 0.0) for event in events)
    idle = round(statistics.median(event.get("data_wait", 0.0) for event in events[len(events) // 3 :]), 4)
    return Side(round(statistics.median(spans), 4), round(peak, 2), round(times[0][1] - started, 1), idle)


def clip_size(row: Row) -> tuple[int, int]:
    """Return width and height of a row's clips."""
    return row.resolution * 26 // 15 // 16 * 16, row.resolution


def write_clips(folder: Path, row: Row) -> None:
    """Write captioned clips of a moving square, unless they exist."""
    if folder.exists():
        return
    folder.mkdir()
    width, height = clip_size(row)
    for number, caption in enumerate(captions(4)):
        frames = [Image.new("RGB", (width, height), (40 * number, 90, 120)) for _ in range(row.frames)]
        for step, frame in enumerate(frames):
            left = step * (width // 2) // row.frames
            frame.paste((230, 200, step), (left, height // 4, left + width // 4, height // 2))
        frames[0].save(folder / f"{number}.gif", save_all=True, append_images=frames[1:], duration=60)
        (folder / f"{number}.txt").write_text(caption, encoding="utf-8")


def steps_of(log: Path) -> list[dict[str, Any]]:
    """Return the steps that a run has logged so far."""
    return [event for event in read_log(log) if event["event"] == "step"] if log.is_file() else []


def _side(times: list[float], started: float, gib: float, steps: int) -> Side:
    warm = times[steps // 3 :]
    if len(warm) < 3:
        return Side(failure=f"{len(times)} steps")
    spans = [b - a for a, b in pairwise(warm)]
    return Side(round(statistics.median(spans), 4), round(gib, 2), round(times[0] - started, 1))


def _run(command: list[str], output: Path, timeout: int, done: Callable[[], bool] = lambda: False) -> None:
    """Run a command until it ends, the time is over, or ``done`` is true."""
    end = time.monotonic() + timeout
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True
        )
        try:
            while process.poll() is None and not done() and time.monotonic() < end:
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# --- the table -----------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--script"]:
        script, results, steps, cudnn, *arguments = sys.argv[2:]
        run_script(script, Path(results), int(steps), cudnn == "1", arguments)
        return
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--scripts", type=Path, help="folder of diffusers' scripts")
    parser.add_argument("--row", nargs="+", choices=ROWS, default=["lora-512-4", "lora-1024-1"])
    parser.add_argument("--anchors", action="store_true", help="the rows with published numbers")
    parser.add_argument("--steps", type=int, default=60, help="of a script")
    parser.add_argument("--ours-steps", type=int, default=120)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for `sd3-light train`")
    parser.add_argument("--only", choices=("ours", "script"), help="one side")
    parser.add_argument("--timeout", type=int, default=300, help="of a command, in seconds")
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    args = parser.parse_args()
    if args.anchors:
        args.row = ANCHORS
    needs_scripts = args.only != "ours" and any(ROWS[name].script for name in args.row)
    if needs_scripts and args.scripts is None:
        parser.error("--scripts FOLDER is missing: it has diffusers' scripts")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # what it started ends with it
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.absolute()
    device = best_device()
    side = 128 if args.toy else 1024
    table: dict[str, Any] = {"device": device_name(), "rows": {}}
    for family in dict.fromkeys(ROWS[name].family for name in args.row):
        with tempfile.TemporaryDirectory() as temporary:
            work = Path(temporary)
            write_images(work / "images", side)
            (work / "only_images").mkdir()
            for image in (work / "images").glob("*.jpg"):
                (work / "only_images" / image.name).hardlink_to(image)
            table[f"parameters of {family}"] = write_model(
                Model(family, toy=args.toy), work / "model", [*captions(), PROMPT], device
            )
            torch.cuda.empty_cache()
            for name in (name for name in args.row if ROWS[name].family == family):
                row = replace(ROWS[name], resolution=min(ROWS[name].resolution, side))
                if args.toy:
                    row = replace(row, published=None)
                if args.toy and row.frames:
                    row = replace(row, resolution=64, frames=5)
                sides: dict[str, Side] = {}
                for kind, run in {"script": peer, "ours": ours}.items():
                    if args.only not in (None, kind) or (kind == "script" and not row.script):
                        continue
                    sides[kind] = run(name, row, work, args.out, args)
                    print(f"{name}: {kind} {sides[kind]}", flush=True)
                    table["rows"][name] = _result(row, sides)
                    write_json(args.out / "peers.json", table)
                print(f"{name}: ratio {table['rows'][name]['ratio']}", flush=True)


def _result(row: Row, sides: dict[str, Side]) -> dict[str, Any]:
    if row.published is not None:
        sides = {"published": Side(row.published[0], row.published[1]), **sides}
    times = [sides[name].seconds if name in sides else None for name in (next(iter(sides)), "ours")]
    ratio = round(times[0] / times[1], 2) if len(sides) == 2 and times[0] and times[1] else None
    return {**{name: asdict(side) for name, side in sides.items()}, "ratio": ratio}


if __name__ == "__main__":
    main()
