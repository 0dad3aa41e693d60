"""The inspect stage: what a data set became, on one screen (`run`, `render`) or as a page (`page.write_page`)."""

from pathlib import Path

from rich.box import SIMPLE
from rich.table import Column, Table
from rich.text import Text

from sd3_light.stages.inspect.gather import Inspection, explain, inspect_cache, quantile

__all__ = ["Inspection", "render", "run"]

SCREEN_SAMPLES = 10_000
"""Captions of about this many samples are looked at for the screen."""

_MOST_BUCKETS = 16
_MOST_REASONS = 12
_BAR = 24


def run(cache: Path, seed: int = 0) -> Inspection:
    """Look at a cache by its manifest and at the captions of shards chosen at random. Raises UserError without one."""
    return inspect_cache(cache, SCREEN_SAMPLES, seed)


def render(found: Inspection) -> Table:
    """One screen."""
    table = Table(
        "what", Column("value", justify="right"), Column("", overflow="fold"), title=_plain(found.folder), box=SIMPLE
    )
    for part in (_counts, _buckets, _rejects, _captions, _makers):
        part(found, table)
        table.add_section()
    return table


def _counts(found: Inspection, table: Table) -> None:
    for name, count in found.counts.items():
        table.add_row(_plain(name), f"{count:,}")
    table.add_row("on disk", f"{found.bytes / 1e6:,.1f} MB", f"{len(found.manifest.shards):,} shards")
    each = found.bytes / max(1, found.samples)
    total = max(1, sum(found.survey.parts.values()))
    shares = ", ".join(f"{name} {size / total:.0%}" for name, size in found.survey.parts.most_common(2))
    table.add_row("a sample", f"{each / 1e3:,.1f} kB", shares)


def _buckets(found: Inspection, table: Table) -> None:
    buckets = found.buckets
    largest, total = max(buckets.values(), default=1), max(1, found.samples)
    shown = sorted(buckets, key=lambda name: -buckets[name])[:_MOST_BUCKETS]
    for name in (name for name in buckets if name in shown):
        count = buckets[name]
        bar = Text("█" * max(1, round(_BAR * count / largest)), style="cyan")
        table.add_row(f"bucket {name}", f"{count:,}", bar + Text(f" {count / total:.1%}", style="default"))
    if len(buckets) > len(shown):
        rest = sum(count for name, count in buckets.items() if name not in shown)
        table.add_row(f"{len(buckets) - len(shown)} more buckets", f"{rest:,}", f"{rest / total:.1%}")


def _rejects(found: Inspection, table: Table) -> None:
    reasons = found.rejects
    for reason in list(reasons)[:_MOST_REASONS]:
        table.add_row(_plain(f"rejected: {reason}"), f"{reasons[reason]:,}", explain(reason))
    if len(reasons) > _MOST_REASONS:
        rest = sum(list(reasons.values())[_MOST_REASONS:])
        table.add_row(f"{len(reasons) - _MOST_REASONS} more reasons", f"{rest:,}", "see rejects.jsonl")


def _captions(found: Inspection, table: Table) -> None:
    survey = found.survey
    of = "all samples" if survey.samples == found.samples else f"{survey.samples:,} samples chosen at random"
    for name, lengths in (("words a caption", survey.words), ("T5 tokens a caption", survey.tokens)):
        if lengths:
            words = f"median; 95% have at most {quantile(lengths, 0.95):,}, the longest {max(lengths):,}"
            table.add_row(name, f"{quantile(lengths, 0.5):,}", words)
    if survey.captions_each:
        each = survey.words.total() / survey.samples
        table.add_row("captions a sample", f"{each:,.2g}", of)
    for caption in survey.examples[:3]:
        table.add_row("a caption", "", _plain(caption, 200))
    for fault in survey.unread[:3]:
        table.add_row("unreadable", "", _plain(fault, 200))


def _makers(found: Inspection, table: Table) -> None:
    recipe, places = found.manifest.recipe, found.manifest.places
    text = ", ".join(f"{name} = {recipe[name]}" for name in ("text_tokens", "t5_max_length") if name in recipe)
    table.add_row("text", "", text)
    if "diffusers_path" in places:
        table.add_row("encoders", "", _plain(places["diffusers_path"]))
    for label, count in found.directories.items():
        table.add_row(_plain(f"from {label}"), f"{count:,}", _plain(places.get(f"directory:{label}", "")))


def _plain(value: object, longest: int = 300) -> Text:
    """Text from data: no markup, no control codes, not endless."""
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return Text(text if len(text) <= longest else f"{text[: longest - 1]}…")
