"""Compares rows of `ablate.py` with their base by what they need to reach the same score: samples and minutes.

    python benchmarks/alignment.py RESULTS... [--rows 'align-*'] [--score 0.9] [--base base]

RESULTS are results.jsonl of one or several calls of `ablate.py`, also from several machines of one kind. A gain is what
the base needs, divided by what the row needs, for each seed that both have. The crossing is read between the two points
of the curve around the score; minutes are those of training up to there, without drawing, and only those of one lane
per GPU count. The bar: 1.3 in samples and 1.15 in minutes in every seed, and at most 1.05 for the controls.
"""

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ablate import read_results


def crossing(scores: Sequence[Sequence[float]], score: float) -> float | None:
    """Return the samples at which a curve reaches a score, by a straight line between points; None if it does not."""
    before = (0.0, 0.0)
    for samples, value in scores:
        if value >= score:
            share = (score - before[1]) / (value - before[1])
            return before[0] + share * (samples - before[0])
        before = (samples, value)
    return None


def minutes_at(entry: Mapping[str, Any], samples: float) -> float:
    """Return the minutes of training for a number of samples: the rate is that of the whole run."""
    minutes: float = entry["minutes"] * samples / entry["samples"]
    return minutes


def gains(row: Mapping[str, Any], base: Mapping[str, Any], score: float) -> tuple[float, float] | None:
    """Return the gains in samples and in minutes; None where one of the two does not reach the score."""
    own = crossing(row["scores"], score)
    others = crossing(base["scores"], score)
    if own is None or others is None:
        return None
    return others / own, minutes_at(base, others) / minutes_at(row, own)


def table(entries: Sequence[Mapping[str, Any]], rows: Sequence[str], base: str, score: float) -> str:
    """Return a line per row and seed."""
    known = {(entry["row"], entry["seed"]): entry for entry in entries}
    lines = ["| row | seed | last score | base | gain in samples | gain in minutes |", "|---|---|---|---|---|---|"]
    for (name, seed), entry in sorted(known.items()):
        other = known.get((base, seed))
        if name == base or other is None or not any(fnmatch(name, pattern) for pattern in rows):
            continue
        gain = gains(entry, other, score)
        cells = ("-", "-") if gain is None else (f"{gain[0]:.2f}", f"{gain[1]:.2f}")
        ends = [f"{each['scores'][-1][1]:.3f}" for each in (entry, other)]
        lines.append(f"| {' | '.join((name, str(seed), *ends, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--rows", nargs="+", default=["align-*"])
    parser.add_argument("--base", default="base")
    parser.add_argument("--score", type=float, default=0.9)
    args = parser.parse_args()
    entries = [entry for file in args.results for entry in read_results(file)]
    print(table(entries, args.rows, args.base, args.score))


if __name__ == "__main__":
    main()
