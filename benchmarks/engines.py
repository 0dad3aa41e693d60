"""Compares the torch and DeepSpeed engines on the same config, one process each.

    python benchmarks/engines.py [--zero-stages 0 1 2 3] [--out FOLDER] [options of benchmarks/train_run.py]

Prints images per second, seconds per step and peak GPU memory of each, and the speed relative to the torch engine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_RUN = Path(__file__).with_name("train_run.py")
_FIELDS = ("samples_per_second", "seconds", "gpu_memory_gib", "gpu_reserved_gib", "mfu", "loss")


def measure(name: str, options: list[str], out: Path) -> dict[str, Any]:
    """Run one engine in its own process and return its summary."""
    print(f"--- {name}", flush=True)
    subprocess.run([sys.executable, str(_RUN), *options, "--out", str(out / name)], check=True)
    results: dict[str, Any] = json.loads((out / name / "summary.json").read_text(encoding="utf-8"))
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero-stages", type=int, nargs="*", choices=range(4), default=[1])
    parser.add_argument("--out", type=Path, help="folder for logs and summaries")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        runs = {"torch": measure("torch", rest, out)}
        for zero in args.zero_stages:
            options = [*rest, "--engine", "deepspeed", "--zero-stage", str(zero)]
            runs[f"deepspeed-zero{zero}"] = measure(f"deepspeed-zero{zero}", options, out)
    for name, results in runs.items():
        ratio = results["samples_per_second"] / runs["torch"]["samples_per_second"]
        print(
            name, f"{ratio:.3f} of the torch engine's speed", {key: results[key] for key in _FIELDS if key in results}
        )


if __name__ == "__main__":
    main()
