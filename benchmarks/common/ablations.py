"""The rows of an ablation table, their results in a file, and what the results say: `ablate.py`."""

import fcntl
import json
import os
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from common.paired import compare, differences, pooled_seed_variance
from sd3_light.config import UserError

TARGET = 0.9
CLOSE_SAMPLES = 100_000
MAIN = "average"
"""The draw of every row: the average of the weights, or the weights themselves without one."""


@dataclass(frozen=True)
class Draw:
    """How a trained row is drawn: which weights, or an average of which length, and the sampler's shift."""

    weights: str | None = None
    ema_length: float | None = None
    shift: float | None = None


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
