"""Bars and histograms in plain HTML."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sd3_light.runlog.page.html import Html, rows, tag
from sd3_light.stages.inspect.gather import quantile, sides

_MOST_BINS = 30
_SHAPE = 28  # pixels of the longest side of a drawn bucket
_NUM_LABELS = 6


@dataclass(frozen=True)
class Bin:
    """The number of captions from ``low`` to ``high``; the last bin of a histogram takes all above it too."""

    low: int
    high: int
    count: int
    is_open: bool = False

    def __str__(self) -> str:
        if self.is_open:
            return f"{self.low:,} or more"
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


def bins_of(lengths: Counter[int]) -> list[Bin]:
    """At most 30 bins of a round width. Where a few captions are far longer than the others, the last bin is open."""
    if not lengths:
        return []
    longest = max(lengths)
    top = min(longest, 2 * quantile(lengths, 0.99) + 1)
    low = min(lengths)
    width = next(w for w in _round_widths() if (top - low) // w + 2 <= _MOST_BINS)
    start = low // width * width
    found = [Bin(at, at + width - 1, 0) for at in range(start, top + 1, width)]
    counts = [0] * len(found)
    for length, count in lengths.items():
        counts[min((length - start) // width, len(found) - 1)] += count
    is_open = longest > found[-1].high
    last = len(found) - 1
    return [Bin(bin.low, bin.high, counts[at], is_open and at == last) for at, bin in enumerate(found)]


def histogram(lengths: Counter[int], unit: str) -> Html:
    """Columns, a few numbers under them, and the same as a table for whoever wants to read it."""
    bins = bins_of(lengths)
    most = max((bin.count for bin in bins), default=1)
    columns = (
        tag(
            "i",
            class_=None if bin.count else "none",
            style=f"height:{max(100 * bin.count / most, 1.5 if bin.count else 0):.2f}%",
            title=f"{bin} {unit}: {bin.count:,}",
        )
        for bin in bins
    )
    every = -(-len(bins) // _NUM_LABELS)
    labels = (tag("span", f"{bin.low:,}" if at % every == 0 else "") for at, bin in enumerate(bins))
    table = rows((str(bin), f"{bin.count:,}") for bin in bins if bin.count)
    return tag(
        "div",
        tag("div", *columns, class_="columns", role="img", aria_label=f"histogram of {unit} a caption"),
        tag("div", *labels, class_="under"),
        tag("details", tag("summary", f"{unit} a caption, as a table"), table),
    )


def bucket_bars(buckets: Mapping[str, int]) -> Html:
    """A line a bucket: its shape to scale, its bar, its samples and their share of all."""
    total, most = max(1, sum(buckets.values())), max(buckets.values(), default=1)
    largest = max((max(sides(name)) for name in buckets), default=1)
    lines = (
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", shape(name, largest)),
            tag("td", bar(count / most)),
            tag("td", f"{count:,}", class_="number"),
            tag("td", f"{count / total:.1%}", class_="number soft"),
        )
        for name, count in buckets.items()
    )
    return tag("table", tag("tbody", *lines), class_="bars buckets")


def bar(share: float) -> Html:
    """A horizontal bar."""
    return tag("div", tag("i", style=f"width:{100 * share:.2f}%"), class_="track")


def shape(bucket: str, largest: int) -> Html:
    """A bucket drawn to scale; ``largest`` is the longest side of all."""
    width, height = (side / largest * _SHAPE for side in sides(bucket))
    side = _SHAPE + 2
    box = tag(
        "rect",
        x=f"{(side - width) / 2:.1f}",
        y=f"{(side - height) / 2:.1f}",
        width=f"{width:.1f}",
        height=f"{height:.1f}",
    )
    return tag("svg", box, class_="shape", width=side, height=side, aria_hidden="true")


def _round_widths() -> "list[int]":
    return [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
