"""Curves of any length reduced to a few hundred points while the log is read; no spike is lost."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

NUM_BINS = 600
"""A curve has at most about this many bins, of two points each; twice as many while its log grows."""

_SMOOTHED_SHARE = 40  # the moving mean covers one part in 40 of the curve
_LARGEST = 3.5e38  # beyond the range of fp32, in which training computes: drawn as not finite

Point = tuple[float, float]


class Bin(NamedTuple):
    """Consecutive records of a curve; ``size`` of their values are finite."""

    number: int
    first_x: float
    last_x: float
    size: int
    total: float
    low: Point
    high: Point
    last: float
    nonfinite: float | None
    """The first x of a value that is not finite."""

    def joined(self, later: "Bin", number: int) -> "Bin":
        """Return this bin and a later one as one bin."""
        nonfinite = later.nonfinite if self.nonfinite is None else self.nonfinite
        if not self.size or not later.size:
            return (self if self.size else later)._replace(number=number, nonfinite=nonfinite)
        return Bin(
            number,
            self.first_x,
            later.last_x,
            self.size + later.size,
            self.total + later.total,
            later.low if later.low[1] < self.low[1] else self.low,
            later.high if later.high[1] > self.high[1] else self.high,
            later.last,
            nonfinite,
        )


@dataclass
class Curve:
    """A curve in bins of ``bin_size`` records: the mean of each bin (at ``x``), and its lowest and highest point."""

    bin_size: int = 1
    bins: list[Bin] = field(default_factory=list)

    @property
    def x(self) -> list[float]:
        """The middle of each bin."""
        return [(each.first_x + each.last_x) / 2 for each in self.bins if each.size]

    @property
    def mean(self) -> list[float]:
        """The mean of each bin."""
        return [each.total / each.size for each in self.bins if each.size]

    @property
    def extremes(self) -> list[Point]:
        """The lowest and the highest point of each bin, in the order of x."""
        return [point for each in self.bins if each.size for point in sorted({each.low, each.high})]

    @property
    def nonfinite(self) -> list[float]:
        """The x of values that are not finite, at most one per bin."""
        return [each.nonfinite for each in self.bins if each.nonfinite is not None]

    @property
    def last(self) -> float:
        """The last finite value."""
        return next((each.last for each in reversed(self.bins) if each.size), math.nan)

    @property
    def points(self) -> list[Point]:
        """The mean of each bin, at its x."""
        return list(zip(self.x, self.mean, strict=True))

    def smooth(self) -> tuple[list[Point], int]:
        """Return a moving mean over a fortieth of the curve, and the number of records it averages."""
        means = self.mean
        half = len(means) // (2 * _SMOOTHED_SHARE)
        points = []
        for index, x in enumerate(self.x):
            window = means[max(0, index - half) : index + half + 1]
            points.append((x, math.fsum(window) / len(window)))  # running sums would keep the error of a spike
        return points, (2 * half + 1) * self.bin_size


class CurveBuilder:
    """Builds curves of the fields ``names`` of records, and of all fields in their ``groups`` (as GROUP/FIELD).

    Records beyond ``num_records`` may follow: bins are then joined in pairs from time to time.
    """

    def __init__(self, num_records: int, names: Iterable[str], groups: Iterable[str] = ()) -> None:
        self._bin_size = max(1, math.ceil(num_records / NUM_BINS))
        self._names = tuple(names)
        self._groups = tuple(groups)
        self._num_bins = 0
        self._bins: dict[str, list[Bin]] = {}
        self._records: list[Mapping[str, Any]] = []
        self._x: list[float] = []

    def add(self, x: float, record: Mapping[str, Any]) -> None:
        """Add a record; ``x`` must not decrease."""
        self._x.append(x)
        self._records.append(record)
        if len(self._x) >= self._bin_size:
            for name, closed in self._open_bins():
                self._bins.setdefault(name, []).append(closed)
            self._x = []
            self._records = []
            self._num_bins += 1
            if self._num_bins >= 2 * NUM_BINS:
                self._join_pairs()

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves of all records so far, each with at least one bin."""
        curves = {name: Curve(self._bin_size, list(bins)) for name, bins in self._bins.items()}
        for name, unfinished in self._open_bins():
            curves.setdefault(name, Curve(self._bin_size)).bins.append(unfinished)
        return curves

    def _join_pairs(self) -> None:
        for name, bins in self._bins.items():
            pairs = [(number, list(pair)) for number, pair in groupby(bins, key=lambda each: each.number // 2)]
            self._bins[name] = [
                pair[0].joined(pair[1], number) if len(pair) == 2 else pair[0]._replace(number=number)
                for number, pair in pairs
            ]
        self._num_bins //= 2
        self._bin_size *= 2

    def _open_bins(self) -> Iterator[tuple[str, Bin]]:
        """Yield a bin of the records since the last complete one, per curve that has values in them."""
        if self._x:
            for name, xs, ys in self._columns():
                yield name, make_bin(self._num_bins, xs, ys)

    def _columns(self) -> Iterator[tuple[str, list[float], list[Any]]]:
        for name in self._names:
            yield from self._column(name, self._records, name)
        for group in self._groups:
            fields = [record.get(group) or {} for record in self._records]  # null: not measured
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


def make_bin(number: int, xs: list[float], ys: list[Any]) -> Bin:
    """Return the bin of consecutive records, of which not all values need to be finite."""
    try:
        total = sum(ys)
        lowest = min(ys)
        highest = max(ys)
    except TypeError:  # the log writes nan and the infinities as strings
        total = lowest = highest = math.nan
    nonfinite = None
    if not (math.isfinite(total) and lowest > -_LARGEST and highest < _LARGEST):
        pairs = [(x, float(y)) for x, y in zip(xs, ys, strict=True) if y is not None]
        nonfinite = next((x for x, y in pairs if not abs(y) < _LARGEST), None)
        finite = [(x, y) for x, y in pairs if abs(y) < _LARGEST]
        if not finite:
            return Bin(number, xs[0], xs[-1], 0, 0.0, (0.0, 0.0), (0.0, 0.0), math.nan, nonfinite)
        xs = [x for x, _ in finite]
        ys = [y for _, y in finite]
        total = sum(ys)
        lowest = min(ys)
        highest = max(ys)
    low = ys.index(lowest)
    high = ys.index(highest)
    last = float(ys[-1])
    return Bin(number, xs[0], xs[-1], len(ys), total, (xs[low], ys[low]), (xs[high], ys[high]), last, nonfinite)
