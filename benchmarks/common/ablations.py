"""The rows of an ablation table, their results in a file, and what the results say: `ablate.py`.

Two trainings that drew the same prompts with the same seeds are compared in pairs. An outcome is whether the image of a
prompt is right. Seeds and prompts are both samples of many, so the error of the mean has a part of each:
var(seed) / S + var(prompt) / P + var(rest) / (S P), by the mean squares of a two-way table.
"""

import fcntl
import json
import math
import os
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sd3_light.config import UserError

ENOUGH = 2.0
"""Standard errors that a difference needs to be called one."""
Outcomes = Mapping[int, Sequence[bool]]
"""Training seed -> whether each prompt is right."""
TARGET = 0.9
CLOSE_SAMPLES = 100_000
MAIN = "average"
"""The draw of every row: the average of the weights, or the weights themselves without one."""


@dataclass(frozen=True)
class Draw:
    """How a trained row is drawn: which weights, or an average of which length, and the sampler's shift.

    With ``padded`` prompts are padded as stock pipelines do, also for a model of real text.
    """

    weights: str | None = None
    ema_length: float | None = None
    shift: float | None = None
    padded: bool = False


@dataclass(frozen=True)
class Row:
    """One change to another row, as `--set` strings; ``overrides`` are all of them, ``against`` is that row.

    ``init`` is a row whose result is continued, ``side`` the pixels of its images if they are not FOLDER's, ``minutes``
    an estimate for one seed in its lane. A ``control`` is aligned with features of other images.
    """

    name: str
    about: str
    overrides: tuple[str, ...] = ()
    against: str | None = None
    draws: tuple[tuple[str, Draw], ...] = ()
    init: str | None = None
    side: int | None = None
    minutes: float | None = None
    control: bool = False


@dataclass(frozen=True)
class Table:
    """The rows of a table file, and the minutes of one that was not measured."""

    rows: Mapping[str, Row]
    minutes: float = 5.0


def read_table(file: Path, tuned: str | None = None) -> Table:
    """Return the rows of a table file; rows like `tuned` change the row that it, or ``tuned``, names."""
    raw = tomllib.loads(file.read_text(encoding="utf-8"))
    entries: Mapping[str, Mapping[str, Any]] = raw["rows"]
    draws = {name: Draw(**entry) for name, entry in raw.get("draws", {}).items()}
    tuned = tuned or raw.get("tuned")
    rows: dict[str, Row] = {}

    def resolve(name: str, seen: tuple[str, ...] = ()) -> Row:
        if name not in entries or name in seen:
            raise UserError(f"{file}: no row {name!r}, or it is like itself; it has {', '.join(entries)}")
        if name not in rows:
            rows[name] = make(name, entries[name], (*seen, name))
        return rows[name]

    def make(name: str, entry: Mapping[str, Any], seen: tuple[str, ...]) -> Row:
        named = {key: tuned if entry.get(key) == "tuned" else entry.get(key) for key in ("like", "against")}
        like = named["like"]
        parent = None if like is None else resolve(like, seen)
        against = named["against"]
        if against is None:
            against = like or ("base" if name != "base" and "base" in entries else None)
        return Row(
            name,
            entry.get("about", ""),
            (*(() if parent is None else parent.overrides), *entry.get("set", ())),
            against or None,
            tuple((draw, draws[draw]) for draw in entry.get("draws", ())),
            entry.get("init"),
            entry.get("side", None if parent is None else parent.side),
            entry.get("minutes"),
            entry.get("control", False),
        )

    for name in entries:
        resolve(name)
    return Table({name: rows[name] for name in entries}, raw.get("minutes", Table.minutes))


# --- results ---------------------------------------------------------------------------------------


def read_results(file: Path) -> list[dict[str, Any]]:
    """Return the results so far; a later line of the same row and seed replaces an earlier one.

    A line that was cut when its machine was lost is left out.
    """
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        kept[entry["row"], entry["seed"]] = entry
    return list(kept.values())


def keep_result(file: Path, result: Mapping[str, Any]) -> None:
    """Append a line, whole and on the disk before this returns; a line that was cut before it stays alone."""
    with open(file, "ab+") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        size = out.seek(0, os.SEEK_END)
        out.seek(max(0, size - 1))
        start = b"" if out.read() in (b"", b"\n") else b"\n"
        out.write(start + json.dumps(result, ensure_ascii=False).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


# --- paired differences -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The mean difference over seeds and prompts, its standard error (None: unknown), and the number of seeds."""

    mean: float
    error: float | None
    seeds: int

    @property
    def verdict(self) -> str:
        """Return `better` or `worse` for at least two seeds and two standard errors, otherwise `undecided`."""
        if self.seeds < 2 or self.error is None or self.mean == 0 or abs(self.mean) < ENOUGH * self.error:
            return "undecided"
        return "better" if self.mean > 0 else "worse"

    def __str__(self) -> str:
        error = "?" if self.error is None else f"{self.error:.3f}"
        return f"{self.mean:+.3f} ± {error}"


def differences(row: Outcomes, base: Outcomes) -> NDArray[np.float64]:
    """Return row - base of the seeds that both have, [seed, prompt]."""
    seeds = sorted(set(row) & set(base))
    pairs = [np.asarray(row[seed], dtype=float) - np.asarray(base[seed], dtype=float) for seed in seeds]
    return np.stack(pairs) if pairs else np.zeros((0, 0))


def seed_variance(table: NDArray[np.float64]) -> float | None:
    """Return the variance between seeds of a table of differences, without that of its prompts; None for one seed."""
    seeds, prompts = table.shape
    if seeds < 2:
        return None
    return float(max(0.0, table.mean(1).var(ddof=1) - _residual(table) / prompts))


def pooled_seed_variance(tables: Iterable[NDArray[np.float64]]) -> float | None:
    """Return the mean variance between seeds of several rows, weighted by their seeds less one; None without any.

    Two or three seeds of one row may agree by chance; those of all rows together say how far seeds usually differ.
    """
    known = [(seed_variance(table), table.shape[0] - 1) for table in tables]
    weights = sum(weight for variance, weight in known if variance is not None)
    return sum(variance * weight for variance, weight in known if variance is not None) / weights if weights else None


def compare(table: NDArray[np.float64], pooled: float | None = None) -> Difference | None:
    """Return the difference of a table, None if it is empty. The seeds' part is at least the ``pooled`` variance."""
    seeds, prompts = table.shape
    if seeds == 0 or prompts < 2:
        return None
    mean = float(table.mean())
    own = seed_variance(table)
    if own is None and pooled is None:
        return Difference(mean, None, seeds)
    between = max(own or 0.0, pooled or 0.0)
    if seeds == 1:
        return Difference(mean, math.sqrt(between + table.var(ddof=1) / prompts), seeds)
    rest = _residual(table)
    of_prompts = max(0.0, table.mean(0).var(ddof=1) - rest / seeds)
    return Difference(mean, math.sqrt(between / seeds + of_prompts / prompts + rest / (seeds * prompts)), seeds)


def _residual(table: NDArray[np.float64]) -> float:
    """Return the variance that neither seeds nor prompts explain."""
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    return float((rest**2).sum() / ((table.shape[0] - 1) * (table.shape[1] - 1)))


# --- the table -------------------------------------------------------------------------------------


def markdown(results: Sequence[Mapping[str, Any]], table: Table, more: Sequence[str] = ()) -> str:
    """Return the table of the results: a line per row, and one per draw of it."""
    current: dict[str, dict[int, Mapping[str, Any]]] = {}
    for entry in sorted(results, key=lambda entry: entry["seed"]):
        row = table.rows.get(entry["row"])
        if row is not None and entry["set"] == [*more, *row.overrides]:
            current.setdefault(row.name, {})[entry["seed"]] = entry
    pooled = pooled_seed_variance(
        differences(outcomes(entries), outcomes(current[table.rows[name].against or ""]))
        for name, entries in current.items()
        if table.rows[name].against in current
    )
    pooled_draws = pooled_seed_variance(
        differences(outcomes(entries, draw), outcomes(entries))
        for name, entries in current.items()
        for draw in dict(table.rows[name].draws)
    )
    lines = [
        "| row | change | seeds | right | difference | to | verdict | loss at fixed t | samples to 0.9 | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in filter(current.__contains__, table.rows):
        row, entries = table.rows[name], current[name]
        base = current.get(row.against or "")
        cells = _difference_cells(outcomes(entries), None if base is None else outcomes(base), row.against, pooled)
        losses = " / ".join(f"{e['fixed'].get('ema', e['fixed'].get('raw')):.4f}" for e in entries.values())
        reached = " / ".join(samples_to(TARGET, e["scores"]) for e in entries.values())
        minutes = " / ".join(f"{e['minutes']:.1f}" for e in entries.values())
        lines.append(f"| {name} | {row.about} | {' | '.join(cells)} | {losses} | {reached} | {minutes} |")
        for draw in dict(row.draws):
            cells = _difference_cells(outcomes(entries, draw), outcomes(entries), f"its {MAIN}", pooled_draws)
            lines.append(f"| {name} | drawn: {draw} | {' | '.join(cells)} | | | |")
    return "\n".join(lines) + "\n"


def outcomes(entries: Mapping[int, Mapping[str, Any]], draw: str = MAIN) -> dict[int, list[bool]]:
    """Return seed -> whether each prompt is right."""
    return {seed: [digit == "1" for digit in e["right"][draw]] for seed, e in entries.items() if draw in e["right"]}


def _difference_cells(
    own: Mapping[int, Sequence[bool]], base: Mapping[int, Sequence[bool]] | None, to: str | None, pooled: float | None
) -> list[str]:
    seeds = ", ".join(map(str, own))
    rates = " / ".join(f"{statistics.mean(right):.3f}" for right in own.values())
    compared = None if base is None else compare(differences(own, base), pooled)
    return [seeds, rates, *(("", "", "") if compared is None else (str(compared), to or "", compared.verdict))]


def samples_to(rate: float, scores: Sequence[Sequence[float]]) -> str:
    """Return the million samples of the first point that reaches a rate; `-` if the one before it is not close."""
    before = 0.0
    for samples, value in scores:
        if value >= rate:
            return f"{samples / 1e6:.2f}" if samples - before <= CLOSE_SAMPLES else "-"
        before = samples
    return "-"


# --- gains -----------------------------------------------------------------------------------------


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


def gain_table(entries: Sequence[Mapping[str, Any]], table: Table, rows: Sequence[str], score: float) -> str:
    """Return a line per row and seed, beside the row that it changes."""
    known = {(entry["row"], entry["seed"]): entry for entry in entries}
    lines = ["| row | seed | last score | base | gain in samples | gain in minutes |", "|---|---|---|---|---|---|"]
    for (name, seed), entry in sorted(known.items()):
        row = table.rows.get(name)
        base = None if row is None else known.get((row.against or "", seed))
        if base is None or not any(fnmatch(name, pattern) for pattern in rows):
            continue
        gain = gains(entry, base, score)
        cells = ("-", "-") if gain is None else (f"{gain[0]:.2f}", f"{gain[1]:.2f}")
        ends = [f"{each['scores'][-1][1]:.3f}" for each in (entry, base)]
        lines.append(f"| {' | '.join((name, str(seed), *ends, *cells))} |")
    return "\n".join(lines)
