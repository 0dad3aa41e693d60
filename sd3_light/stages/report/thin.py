"""Curves of any length in a few hundred points, made while the log streams by; no spike is lost."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

BUCKETS = 600
"""A curve has at most about this many buckets, of two points each."""


@dataclass
class Curve:
    """A curve in buckets of ``per`` records: of each bucket its mean (at ``x``), and its least and greatest point."""

    per: int = 1
    x: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    extremes: list[tuple[float, float]] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)
    """Where values were not finite, one place a bucket."""
    last: float = math.nan
    """The last value that was finite."""

    @property
    def points(self) -> list[tuple[float, float]]:
        """The means."""
        return list(zip(self.x, self.mean, strict=True))

    def smooth(self) -> tuple[list[tuple[float, float]], int]:
        """A moving mean over a fortieth of the curve, and how many records that is."""
        half = len(self.mean) // 80
        sums = [0.0]
        for value in self.mean:
            sums.append(sums[-1] + value)
        shown = []
        for at, x in enumerate(self.x):
            start, end = max(0, at - half), min(len(self.x), at + half + 1)
            shown.append((x, (sums[end] - sums[start]) / (end - start)))
        return shown, (2 * half + 1) * self.per


class Thinner:
    """Makes curves from about ``count`` records that come one by one."""

    def __init__(self, count: int, names: Iterable[str], groups: Iterable[str] = ()) -> None:
        self.curves: dict[str, Curve] = {}
        self._per = max(1, math.ceil(count / BUCKETS))
        self._names, self._groups = tuple(names), tuple(groups)
        self._records: list[Mapping[str, Any]] = []
        self._x: list[float] = []

    def add(self, x: float, record: Mapping[str, Any]) -> None:
        """A record further on; its fields ``names``, and those within its fields ``groups`` as GROUP/FIELD, count."""
        self._x.append(x)
        self._records.append(record)
        if len(self._x) >= self._per:
            self.finish()

    def finish(self) -> None:
        """No more will come."""
        if not self._x:
            return
        for name, xs, ys in self._columns():
            _reduce(self.curves.setdefault(name, Curve(self._per)), xs, ys)
        self._x, self._records = [], []

    def _columns(self) -> Iterator[tuple[str, list[float], list[Any]]]:
        for name in self._names:
            yield from self._column(name, self._records, name)
        for group in self._groups:
            inner = [record.get(group, {}) for record in self._records]
            for name in dict.fromkeys(name for one in inner for name in one):
                yield from self._column(f"{group}/{name}", inner, name)

    def _column(
        self, title: str, records: Sequence[Mapping[str, Any]], name: str
    ) -> Iterator[tuple[str, list[float], list[Any]]]:
        try:
            yield title, self._x, list(map(itemgetter(name), records))
        except KeyError:  # not all have it
            pairs = [(x, record[name]) for x, record in zip(self._x, records, strict=True) if name in record]
            if pairs:
                yield title, [x for x, _ in pairs], [y for _, y in pairs]


def _reduce(curve: Curve, xs: list[float], ys: list[Any]) -> None:
    """One more bucket."""
    try:
        total = sum(ys)
    except TypeError:  # nan and the infinities are texts in the log
        total = math.nan
    if not math.isfinite(total):
        pairs = [(x, float(y)) for x, y in zip(xs, ys, strict=True) if y is not None]
        finite = [(x, y) for x, y in pairs if math.isfinite(y)]
        curve.broken += [x for x, y in pairs if not math.isfinite(y)][:1]
        if not finite:
            return
        xs, ys = [x for x, _ in finite], [y for _, y in finite]
        total = sum(ys)
    low, high = ys.index(min(ys)), ys.index(max(ys))
    curve.x.append((xs[0] + xs[-1]) / 2)
    curve.mean.append(total / len(ys))
    curve.extremes += [(xs[at], ys[at]) for at in sorted({low, high})]
    curve.last = float(ys[-1])
