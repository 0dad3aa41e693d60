"""Compare what this version computes with what another one computed, bit for bit, on the same machine.

    python scripts/same.py record FILE [--only NAME ...] [--keep FOLDER]
    python scripts/same.py compare FILE [--only NAME ...] [--keep FOLDER]

Before a change that must not change results: `record`. After it: `compare`, which prints what differs and exits with 1.
A case is a few commands in an empty project: caches (hashes of their shards: of the header, and of the tensors' bytes)
and trainings of five steps in every layout (losses, hashes of weights and averages, and of the exported files). It uses
the command line only, so files and names inside the package may change. Two versions must run on the same machine with
the same libraries: sums of floating-point numbers depend on both. All cases take about ten minutes on two free cores.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 5
NOT_COMPARED = ("proof.json", "config.toml", "README.md", "model_card.md")  # durations, dates, folders
TRAIN = """
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
seed = 3
max_steps = 5
micro_batch_size_per_gpu = 8
checkpoint_every_n_steps = 5
keep_last_n_checkpoints = 0
save_dtype = "bfloat16"
caching_batch_size = 8
caching_num_workers = 1
num_dataloader_workers = 0
sd3_shard_size = 8
logging_steps = 1
eval_datasets = ["eval.toml"]
eval_every_n_steps = 5
eval_micro_batch_size_per_gpu = 4
gradient_clipping = 0.1

[model]
train_type = "sd3_light_pretrain"
diffusers_path = "model"
init = "random"
size = "tiny2"
t5_max_length = 16
dtype = "float32"
uncond_text = "empty"
enable_uncond_text_dropout = true

[optimizer]
lr = 1e-3

[ema]
enable = true
decay = 0.9
update_every = 1
"""
DATA = """
size_buckets = [[64, 64], [80, 48], [48, 80]]

[[directory]]
path = "images"
mask_path = "masks"
flip = true
"""
EVAL = """
resolutions = [64]

[[directory]]
path = "held_out"
"""
REAL = ('model.text_tokens="real"', "model.text_recon_gamma=0.25", "pseudo_huber_c=0.1", 'cache_dir="cache-real"')
CONTINUED = ('model.init="run-padded/exports/step-00000005"',)
LORA = (*CONTINUED, 'adapter.type="lora"', "adapter.rank=4", "adapter.dropout=0.1")


@dataclass(frozen=True)
class Case:
    """A training run: overrides of the config, and how it is launched."""

    keys: tuple[str, ...] = ()
    processes: int = 1
    deepspeed: bool = False
    resumes_at: int | None = None


def half(*keys: str, accumulation: int = 1) -> tuple[str, ...]:
    """Return the keys of a run whose batch is divided among two processes and some micro-batches."""
    size = 4 // accumulation
    return (f"micro_batch_size_per_gpu={size}", f"gradient_accumulation_steps={accumulation}", *keys)


CASES = {
    "padded": Case(),
    "real": Case(REAL),
    "accumulated": Case((*REAL, "micro_batch_size_per_gpu=2", "gradient_accumulation_steps=4")),
    "joint": Case(('model.uncond_text_dropout="joint"', 'model.timestep_sample_method="uniform"', "model.shift=3.0")),
    "zeros": Case((*REAL, 'model.uncond_text="zero"')),
    "workers": Case((*REAL, "num_dataloader_workers=2")),
    "host": Case((*REAL, 'cache_residence="host"')),
    "host-padded": Case(('cache_residence="host"', "num_dataloader_workers=2")),
    "crops": Case(("model.position_crop_side=4",)),
    "routed": Case((*REAL, 'model.size="tiny3"', "model.routing.share=0.5", "model.layer_sync.weight=0.5")),
    "checkpointed": Case(("activation_checkpointing=true",)),
    "resumed": Case(REAL, resumes_at=2),
    "ddp": Case(half(*REAL), 2),
    "fsdp2": Case(half(*REAL, 'parallel="fsdp2"', accumulation=2), 2),
    "zero1": Case(half(*REAL, "zero_stage=1"), 2, deepspeed=True),
    "zero2": Case(half(*REAL, "zero_stage=2", accumulation=2), 2, deepspeed=True),
    "zero3": Case(half("zero_stage=3"), 2, deepspeed=True),
    "full": Case(CONTINUED),
    "lora": Case(LORA),
    "lora-ddp": Case(half(*LORA), 2),
    "pipe": Case((*REAL, "pipeline_stages=2", "micro_batch_size_per_gpu=2", "gradient_accumulation_steps=4"), 2, True),
}


def sha256(path: Path) -> str:
    """Return the first half of a file's hash."""
    return short_hash(path.read_bytes())


def short_hash(data: bytes) -> str:
    """Return the first half of a hash."""
    return hashlib.sha256(data).hexdigest()[:32]


def shard_facts(path: Path) -> dict[str, str]:
    """Return the hashes of a safetensors file's header and of its tensors' bytes."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return {"header": short_hash(data[:start]), "tensors": short_hash(data[start:])}


def run(project: Path, words: Sequence[str], processes: int = 1) -> None:
    """Run train.py in a project's folder."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, str(ROOT / "train.py"), "--config", "train.toml", *words]
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=project, env={**os.environ, **threads}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {project} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def make_project(folder: Path) -> None:
    """Write images, masks, a small model and the config files."""
    import torch
    from diffusers import AutoencoderKL
    from PIL import Image

    from sd3_light.assets import DEMO
    from sd3_light.world import write_dataset

    shutil.copytree(DEMO, folder / "model", ignore=shutil.ignore_patterns("transformer", "*.md"))
    config = {**AutoencoderKL.load_config(folder / "model" / "vae"), "block_out_channels": [8] * 4}
    torch.manual_seed(0)
    vae = AutoencoderKL.from_config({**config, "norm_num_groups": 4})
    vae.save_pretrained(folder / "model" / "vae")
    write_dataset(folder / "images", 40, seed=1)
    write_dataset(folder / "held_out", 6, seed=2, held_out=True)
    (folder / "masks").mkdir()
    for number, path in enumerate(sorted((folder / "images").glob("*.png"))[::2]):
        with Image.open(path) as image:
            mask = Image.new("L", image.size, 0)
        mask.paste(255, (0, 0, 16 + 4 * (number % 8), mask.height))
        mask.save(folder / "masks" / path.name)
    for name, text in (("train.toml", TRAIN), ("data.toml", DATA), ("eval.toml", EVAL)):
        (folder / name).write_text(text, encoding="utf-8")


def overrides(keys: Sequence[str]) -> list[str]:
    """Return the command-line options that set config keys."""
    return [word for key in keys for word in ("--set", key)]


def caches(project: Path) -> dict[str, Any]:
    """Build the caches, one of them in two processes, and return the hashes of their shards."""
    builds = {"cache": (), "cache-real": REAL, "cache-two": ('cache_dir="cache-two"',)}
    for name, keys in builds.items():
        processes = 2 if name == "cache-two" else 1
        run(project, ["--cache-only", *overrides(keys)], processes)
    facts = {}
    for name in builds:
        for path in sorted((project / name).rglob("*.safetensors")):
            for part, digest in shard_facts(path).items():
                facts[f"{name}/{path.relative_to(project / name)}: {part}"] = digest
    return facts


def train(project: Path, name: str, case: Case) -> dict[str, Any]:
    """Run a case and return its losses and the hashes of what it saved."""
    keys = [*case.keys, f'output_dir="run-{name}"']
    flags = ["--deepspeed"] if case.deepspeed else []
    if case.resumes_at is not None:
        run(project, overrides([*keys, f"max_steps={case.resumes_at}"]))
        flags.append("--resume")
    run(project, [*overrides(keys), *flags], case.processes)
    return run_facts(project / f"run-{name}", name)


def run_facts(folder: Path, name: str) -> dict[str, Any]:
    """Return the logged numbers of a run, and the hashes of its last checkpoint and export."""
    facts: dict[str, Any] = {}
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            fields = ("loss", "flow", "text_recon", "grad_norm", "param_norm", "band", "samples")
            facts[f"{name}: step {event['step']}"] = {field: event[field] for field in fields if field in event}
        if event["event"] == "eval":
            facts[f"{name}: eval {event['weights']} {event['step']}"] = event["flow"]
    saved = [*(folder / "checkpoints").glob(f"step-*{STEPS}/*"), *(folder / "exports").rglob("*")]
    for path in sorted(saved):
        is_data = path.suffix == ".safetensors" or (path.suffix == ".json" and "exports" in path.parts)
        if is_data and path.is_file() and path.name not in NOT_COMPARED:
            facts[f"{name}: {path.relative_to(folder)}"] = sha256(path)
    return facts


def facts_of(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the facts of all cases that can run here, two at a time."""
    make_project(folder)
    facts = caches(folder)
    has_deepspeed = find_spec("deepspeed") is not None
    cases = {name: CASES[name] for name in names if has_deepspeed or not CASES[name].deepspeed}
    facts |= train(folder, "padded", CASES["padded"])  # others continue from its export
    with ThreadPoolExecutor(2) as pool:
        others = [name for name in cases if name != "padded"]
        for results in pool.map(lambda name: train(folder, name, cases[name]), others):
            facts |= results
            print(f"{len(facts)} facts", file=sys.stderr, flush=True)
    return facts


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line per fact that differs, was lost or is new."""
    lines = []
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            lines.append(f"{name}: {before.get(name, 'missing')} -> {after.get(name, 'missing')}")
    return lines


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="JSON file of the facts")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="some of the trainings")
    parser.add_argument("--keep", type=Path, help="folder of the project, which must not exist; default: temporary")
    args = parser.parse_args()
    before = json.loads(args.file.read_text(encoding="utf-8")) if args.action == "compare" else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "project" if args.keep is None else args.keep.resolve()
        folder.mkdir(parents=True)
        facts = json.loads(json.dumps(facts_of(folder, args.only)))
    if args.action == "record":
        args.file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"{len(facts)} facts in {args.file}")
        return
    kept = {name: value for name, value in before.items() if name in facts or args.only == list(CASES)}
    lines = differences(kept, facts)
    print(*lines, f"{len(lines)} of {len(facts)} facts differ", sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
