"""All regimes of `train_run.py` on one GPU: the speed of the step and of the whole stage, side by side.

    python benchmarks/regimes.py OUT [--regimes padded real ...] [any option of train_run.py]

The runs write their caches at the same time and train one after another. Each leaves log, config, summary and output
in OUT/REGIME; a regime with a summary is not run again. Prints a Markdown table.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from train_run import REGIMES

TRAIN_RUN = Path(__file__).with_name("train_run.py")
HEAD = "| regime | step, samples/s | stage, samples/s | stage of step | GPU idle |\n|---|---:|---:|---:|---:|"


def start(regime: str, out: Path, options: list[str]) -> "subprocess.Popen[bytes]":
    """Start the run of a regime."""
    folder = out / regime
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(TRAIN_RUN), "--regime", regime, "--out", str(folder), "--lock", str(out / "lock")]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen([*command, "--no-save", *options], stdout=output, stderr=subprocess.STDOUT)


def row(regime: str, out: Path) -> str:
    """Return the table's row of a regime."""
    summary = out / regime / "summary.json"
    if not summary.is_file():
        return f"| {regime} | failed: {out / regime / 'output.txt'} | | | |"
    results = json.loads(summary.read_text(encoding="utf-8"))
    stage, ratio = results["samples_per_second"], results.get("stage of step")
    if ratio is None:
        return f"| {regime} | not measured | {stage:,.1f} | | |"
    step = results["step alone, samples_per_second"]
    waits = f"{results['data_wait']:.1%}, waits in {results.get('host_bound', 0):.0%} of steps"
    return f"| {regime} | {step:,.1f} | {stage:,.1f} | {ratio:.1%} | {waits} |"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    args, options = parser.parse_known_args()
    todo = [regime for regime in args.regimes if not (args.out / regime / "summary.json").is_file()]
    runs = [start(regime, args.out, options) for regime in todo]
    for run in runs:
        run.wait()
    print(HEAD, *(row(regime, args.out) for regime in args.regimes), sep="\n")


if __name__ == "__main__":
    main()
