"""Joins scores of several training seeds, as `sd3-light evaluate --against ... --out` writes them, into one table.

    python scripts/join_scores.py SCORES.json ... [--out TABLE.md]

Each file has one model, trained with another seed, and the same captions. The error of a value has two parts: over the
images (of the mean over seeds), and over the seeds (the spread of their means, divided by the root of their number; 0
with one seed, which the table then says). The second table has paired differences of the model to each row: "better"
and "worse" need two standard errors.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import Any

from sd3_light.evaluate.against import COLUMNS, SHUFFLED, TITLES, TRUE
from sd3_light.evaluate.nearest import BY_CAPTION, BY_CAPTION_IN_GROUP, ORACLE

OTHERS = (TRUE, SHUFFLED, BY_CAPTION, BY_CAPTION_IN_GROUP, ORACLE)
OF_SETS = COLUMNS[:2]
OF_IMAGES = COLUMNS[2:]
LOWER_IS_BETTER = {*OF_SETS, "distance"}
MODEL = "model"


@dataclass(frozen=True)
class Value:
    """A mean and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.error:.2g}"

    def verdict(self, lower_is_better: bool) -> str:
        """Return whether a difference is better or worse than 0 by two standard errors."""
        if abs(self.mean) <= 2 * self.error:
            return ""
        return "better" if (self.mean < 0) == lower_is_better else "worse"


def read_runs(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rows of each file, the model's under `MODEL`."""
    runs = []
    for file in files:
        scores = json.loads(file.read_text(encoding="utf-8"))
        models = [name for name in scores["rows"] if name not in OTHERS]
        if len(models) != 1:
            raise SystemExit(f"{file} has {len(models)} models; evaluate one at a time")
        runs.append({**scores["rows"], MODEL: scores["rows"][models[0]]})
        del runs[-1][models[0]]
    first = [row["each"]["rows"] for row in runs[0].values()]
    if any([row["each"]["rows"] for row in run.values()] != first for run in runs):
        raise SystemExit("the files have different rows or captions; evaluate all models on the same set")
    return runs


def joined(of_seeds: Sequence[Sequence[float]]) -> Value:
    """Return the mean of values by seed and image."""
    means = [mean(values) for values in of_seeds]
    of_images = [mean(values) for values in zip(*of_seeds, strict=True)]
    over_images = variance(of_images) / len(of_images) if len(of_images) > 1 else 0.0
    return Value(mean(means), math.sqrt(over_images + _over_seeds(means)))


def joined_sets(estimates: Sequence[dict[str, float]]) -> Value:
    """Return the mean of values with 95% intervals over the images, one per seed."""
    over_images = mean(((one["high"] - one["low"]) / (2 * 1.96)) ** 2 for one in estimates)
    values = [one["value"] for one in estimates]
    return Value(mean(values), math.sqrt(over_images + _over_seeds(values)))


def _over_seeds(means: Sequence[float]) -> float:
    return variance(means) / len(means) if len(means) > 1 else 0.0


def cell(runs: Sequence[dict[str, Any]], name: str, metric: str) -> Value | None:
    """Return a value of the first table."""
    if runs[0][name].get(metric) is None:
        return None
    if metric in OF_SETS:
        return joined_sets([run[name][metric] for run in runs])
    return joined([run[name]["each"][metric] for run in runs])


def difference(runs: Sequence[dict[str, Any]], name: str, metric: str) -> Value | None:
    """Return the model's mean less that of a row, over the captions for which the row has an image."""
    if metric not in runs[0][name]["each"] or metric not in runs[0][MODEL]["each"]:
        return None
    differences = []
    for run in runs:
        own = dict(zip(run[MODEL]["each"]["rows"], run[MODEL]["each"][metric], strict=True))
        other = run[name]["each"]
        differences.append([own[row] - value for row, value in zip(other["rows"], other[metric], strict=True)])
    return joined(differences)


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Return both tables as Markdown."""
    count = len(runs[0][TRUE]["each"]["rows"])
    seeds = f"{len(runs)} training seeds" if len(runs) > 1 else "one training seed: no error over seeds"
    lines = [f"{count} captions, {seeds}; mean ± standard error.", ""]
    lines += _head("", COLUMNS)
    for name in runs[0]:
        values = (cell(runs, name, metric) for metric in COLUMNS)
        lines.append(f"| {name} | {' | '.join('' if value is None else str(value) for value in values)} |")
    lines += ["", *_head("model less", OF_IMAGES)]
    for name in runs[0]:
        if name == MODEL:
            continue
        texts = []
        for metric in OF_IMAGES:
            value = difference(runs, name, metric)
            texts.append("" if value is None else f"{value} {value.verdict(metric in LOWER_IS_BETTER)}".strip())
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _head(first: str, metrics: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(TITLES[metric] for metric in metrics)} |", "|---|" + "---:|" * len(metrics)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="write the table here, too")
    args = parser.parse_args()
    text = tables(read_runs(args.scores))
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
