"""Curves of any length reduced to a few hundred points while the log is read; no spike is lost."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

NUM_BINS = 600
"""A curve has at most about this many bins, of two points each."""

_SMOOTHED_SHARE = 40  # the moving mean covers one part in 40 of the curve


@dataclass
class Curve:
    """A curve in bins of ``bin_size`` records: the mean of each bin (at ``x``), and its lowest and highest point."""

    bin_size: int = 1
    x: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    extremes: list[tuple[float, float]] = field(default_factory=list)
    nonfinite: list[float] = field(default_factory=list)
    """The x of values that are not finite, at most one per bin."""
    last: float = math.nan
    """The last finite value."""

    @property
    def points(self) -> list[tuple[float, float]]:
        """The mean of each bin."""
        return list(zip(self.x, self.mean, strict=True))

    def smooth(self) -> tuple[list[tuple[float, float]], int]:
        """Return a moving mean over a fortieth of the curve, and the number of records it averages."""
        half = len(self.mean) // (2 * _SMOOTHED_SHARE)
        sums = [0.0]
        for value in self.mean:
            sums.append(sums[-1] + value)
        points = []
        for index, x in enumerate(self.x):
            start, end = max(0, index - half), min(len(self.x), index + half + 1)
            points.append((x, (sums[end] - sums[start]) / (end - start)))
        return points, (2 * half + 1) * self.bin_size


class CurveBuilder:
    """Builds curves of the fields ``names`` of records, and of all fields in their ``groups`` (as GROUP/FIELD)."""

    def __init__(self, num_records: int, names: Iterable[str], groups: Iterable[str] = ()) -> None:
        self.curves: dict[str, Curve] = {}
        self._bin_size = max(1, math.ceil(num_records / NUM_BINS))
        self._names, self._groups = tuple(names), tuple(groups)
        self._records: list[Mapping[str, Any]] = []
        self._x: list[float] = []

    def add(self, x: float, record: Mapping[str, Any]) -> None:
        """Add a record; ``x`` must not decrease."""
        self._x.append(x)
        self._records.append(record)
        if len(self._x) >= self._bin_size:
            self.finish()

    def finish(self) -> None:
        """Close the current bin."""
        if not self._x:
            return
        for name, xs, ys in self._columns():
            _add_bin(self.curves.setdefault(name, Curve(self._bin_size)), xs, ys)
        self._x, self._records = [], []

    def _columns(self) -> Iterator[tuple[str, list[float], list[Any]]]:
        for name in self._names:
            yield from self._column(name, self._records, name)
        for group in self._groups:
            fields = [record.get(group, {}) for record in self._records]
            for name in dict.fromkeys(name for each in fields for name in each):
                yield from self._column(f"{group}/{name}", fields, name)

    def _column(
        self, title: str, records: Sequence[Mapping[str, Any]], name: str
    ) -> Iterator[tuple[str, list[float], list[Any]]]:
        try:
            yield title, self._x, list(map(itemgetter(name), records))
        except KeyError:  # some records lack the field
            pairs = [(x, record[name]) for x, record in zip(self._x, records, strict=True) if name in record]
            if pairs:
                yield title, [x for x, _ in pairs], [y for _, y in pairs]


def _add_bin(curve: Curve, xs: list[float], ys: list[Any]) -> None:
    try:
        total = sum(ys)
    except TypeError:  # the log writes nan and the infinities as strings
        total = math.nan
    if not math.isfinite(total):
        pairs = [(x, float(y)) for x, y in zip(xs, ys, strict=True) if y is not None]
        finite = [(x, y) for x, y in pairs if math.isfinite(y)]
        curve.nonfinite += [x for x, y in pairs if not math.isfinite(y)][:1]
        if not finite:
            return
        xs, ys = [x for x, _ in finite], [y for _, y in finite]
        total = sum(ys)
    low, high = ys.index(min(ys)), ys.index(max(ys))
    curve.x.append((xs[0] + xs[-1]) / 2)
    curve.mean.append(total / len(ys))
    curve.extremes += [(xs[index], ys[index]) for index in sorted({low, high})]
    curve.last = float(ys[-1])
