"""Makes everything that sd3_light/assets/demo ships, on a GPU: images, parts, cache, base, scores.

    python scripts/demo_base.py OUT [--images 96000] [--set KEY=VALUE ...] [any option of demo_parts.py]

`demo_parts.py` draws the images and trains the parts, recipes/demo/base.toml the denoiser. OUT/assets then replaces the
shipped folder, except for NOTE.md: parts, transformer, a thinned log and `hashes.json`. OUT/scores.json has the
composition score on 480 held-out prompts and the seconds of each stage.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from demo_hashes import write_hashes
from demo_parts import add_options, make_parts
from diffusers import SD3Transformer2DModel

from sd3_light.evaluate import verb as evaluate
from sd3_light.evaluate.composition import ScoreOptions
from sd3_light.parts import verb as parts
from sd3_light.runlog import read_log

ROOT = Path(__file__).parent.parent
MAX_FILE = "14MB"
LOGGED_EVERY = 10  # records of the log that are shipped; evaluations are all kept
PROMPTS, GUIDANCE = 480, 3.0


def train(out: Path, processes: int, overrides: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and command of each stage of the recipe."""
    config = ["--config", str(out / "base.toml"), *(word for one in overrides for word in ("--set", one))]
    script = str(ROOT / "train.py")
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    yield "cache", [*(torchrun if processes > 1 else [sys.executable]), script, *config, "--cache-only"]
    yield "train", [sys.executable, script, *config, "--trust-cache"]


def write_assets(out: Path, export: Path, assets: Path) -> None:
    """Write the folder that is shipped."""
    shutil.rmtree(assets, ignore_errors=True)
    shutil.copytree(out / "model", assets, ignore=shutil.ignore_patterns(parts.WORK, "judge"))
    shutil.copy(export / "model_index.json", assets)
    transformer = SD3Transformer2DModel.from_pretrained(export / "transformer", torch_dtype=torch.float16)
    transformer.save_pretrained(assets / "transformer", max_shard_size=MAX_FILE)
    shutil.copy(export / "transformer" / "config.json", assets / "transformer")  # the new one has a local path
    events = list(read_log(out / "base" / "log.jsonl"))
    steps = [event for event in events if event["event"] == "step"][LOGGED_EVERY - 1 :: LOGGED_EVERY]
    kept = [event for event in events if event["event"] != "step" or event in steps]
    text = "".join(json.dumps(event) + "\n" for event in kept)
    (assets / "transformer" / "log.jsonl").write_text(text, encoding="utf-8")
    write_hashes(assets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="caching processes")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="held-out prompts of the score")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds[name] = round(time.monotonic() - started, 1)

    with timed("images and parts"):
        make_parts(args)
    for name, command in train(args.out, args.processes, args.set):
        with timed(name):
            subprocess.run(command, check=True)
    export = max((args.out / "base" / "exports").glob("step-*"))
    with timed("evaluate"):
        score = evaluate.run(export, args.prompts, options=ScoreOptions(guidance=GUIDANCE, batch=96))
    with timed("assets"):
        write_assets(args.out, export, args.out / "assets")
    result = {"seconds": seconds, "export": export.name, "prompts": args.prompts, "score": dict(score.rates)}
    (args.out / "scores.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
