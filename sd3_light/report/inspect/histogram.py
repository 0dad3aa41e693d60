"""Histograms of caption lengths."""

from collections import Counter
from dataclasses import dataclass

from sd3_light.report.inspect.cache_stats import quantile

_MOST_BINS = 30
_ROUND_WIDTHS = tuple(digit * 10**power for power in range(10) for digit in (1, 2, 5))


@dataclass(frozen=True)
class HistogramBin:
    """The number of captions with a length from ``low`` to ``high``; an open bin also counts all longer ones."""

    low: int
    high: int
    count: int
    is_open: bool = False

    def __str__(self) -> str:
        if self.is_open:
            return f"{self.low:,} or more"
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class Histogram:
    """A histogram of caption lengths in ``unit``."""

    title: str
    unit: str
    summary: str
    bins: list[HistogramBin]


def make_histogram(title: str, unit: str, lengths: Counter[int], hint: str) -> Histogram:
    """Return the histogram of lengths, with a one-line summary."""
    if not lengths:
        return Histogram(title, unit, "No captions.", [])
    median = quantile(lengths, 0.5)
    high = quantile(lengths, 0.95)
    summary = f"Median {median:,}, 95th percentile {high:,}, longest {max(lengths):,}. {hint}"
    return Histogram(title, unit, summary, histogram_bins(lengths))


def histogram_bins(lengths: Counter[int]) -> list[HistogramBin]:
    """Return at most 30 bins of a round width. The last is open where a few captions are far longer than the rest."""
    if not lengths:
        return []
    low = min(lengths)
    longest = max(lengths)
    top = min(longest, 2 * quantile(lengths, 0.99) + 1)
    width = next(width for width in _ROUND_WIDTHS if (top - low) // width + 2 <= _MOST_BINS)
    start = low // width * width
    counts = [0] * ((top - start) // width + 1)
    for length, count in lengths.items():
        counts[min((length - start) // width, len(counts) - 1)] += count
    bins = [HistogramBin(start + i * width, start + (i + 1) * width - 1, count) for i, count in enumerate(counts)]
    last = bins[-1]
    return [*bins[:-1], HistogramBin(last.low, last.high, last.count, is_open=longest > last.high)]
