"""The inspect stage: a cache as a table (`run`, `render`) or as an HTML page (`cache_page.write_cache_page`)."""

from pathlib import Path

from rich.box import SIMPLE
from rich.table import Column
from rich.text import Text

from sd3_light.config.faults import UserError
from sd3_light.formats import byte_size, shorten
from sd3_light.report.inspect.cache_stats import Inspection, inspect_cache, quantile, reason_meaning
from sd3_light.runlog import ResultTable

__all__ = ["Inspection", "render", "run"]

TABLE_SAMPLES = 10_000
"""The table uses the captions of about this many samples."""

_MOST_BUCKETS = 16
_MOST_REASONS = 12
_BAR_WIDTH = 24


def run(cache: Path, seed: int = 0, samples: int | None = None) -> Inspection:
    """Read the manifest of a cache, and the captions of random shards. Raises UserError where there is no cache."""
    if cache.suffix == ".toml":
        raise UserError(f"{cache} is a config; pass the folder of its cache, such as {cache.stem}_data.cache")
    return inspect_cache(cache, samples or TABLE_SAMPLES, seed)


def render(cache: Inspection, location: str = "") -> ResultTable:
    """Return a table that fits one screen; ``location`` is the cache's if it was fetched to its folder."""
    columns = ("field", Column("value", justify="right"), "")
    table = ResultTable(*columns, title=_plain(location or cache.folder), box=SIMPLE)
    for add_rows in (_add_counts, _add_buckets, _add_rejects, _add_captions, _add_settings):
        add_rows(cache, table)
        table.add_section()
    return table


def _add_counts(cache: Inspection, table: ResultTable) -> None:
    for name, count in cache.counts.items():
        table.add_row("images" if name == "pictures" else _plain(name), f"{count:,}")
    table.add_row("on disk", byte_size(cache.bytes), f"{len(cache.manifest.shards):,} shards")
    table.add_row("per sample", byte_size(cache.bytes_per_sample), cache.stats.byte_shares())


def _add_buckets(cache: Inspection, table: ResultTable) -> None:
    buckets = cache.buckets
    largest = max(buckets.values(), default=1)
    total = max(1, cache.samples)
    shown = sorted(buckets, key=lambda name: -buckets[name])[:_MOST_BUCKETS]
    for name in (name for name in buckets if name in shown):
        count = buckets[name]
        bar = Text("█" * max(1, round(_BAR_WIDTH * count / largest)), style="cyan")
        table.add_row(f"bucket {name}", f"{count:,}", bar + Text(f" {count / total:.1%}", style="default"))
    if len(buckets) > len(shown):
        rest = sum(count for name, count in buckets.items() if name not in shown)
        table.add_row(f"{len(buckets) - len(shown)} more buckets", f"{rest:,}", f"{rest / total:.1%}")


def _add_rejects(cache: Inspection, table: ResultTable) -> None:
    reasons = cache.rejects
    for reason in list(reasons)[:_MOST_REASONS]:
        table.add_row(_plain(f"rejected: {reason}"), f"{reasons[reason]:,}", reason_meaning(reason))
    if len(reasons) > _MOST_REASONS:
        rest = sum(list(reasons.values())[_MOST_REASONS:])
        table.add_row(f"{len(reasons) - _MOST_REASONS} more reasons", f"{rest:,}", "see rejects.jsonl")


def _add_captions(cache: Inspection, table: ResultTable) -> None:
    stats = cache.stats
    tokens = {f"{names} tokens per caption": lengths for names, lengths in stats.token_counts().items()}
    for name, lengths in {"words per caption": stats.words, **tokens}.items():
        if lengths:
            text = f"median; 95th percentile {quantile(lengths, 0.95):,}, longest {max(lengths):,}"
            table.add_row(name, f"{quantile(lengths, 0.5):,}", text)
    if stats.samples:
        samples = "all samples" if stats.samples == cache.samples else f"{stats.samples:,} random samples"
        table.add_row("captions per sample", f"{stats.mean_captions:,.2g}", samples)
    if cache.cut is not None and (sentence := cache.cut.sentence()):
        table.add_row("captions cut", f"{max(cache.cut.cut.values()):,}", _plain(sentence, 400))
    for caption in stats.examples[:3]:
        table.add_row("caption", "", _plain(caption, 200))
    for problem in stats.unreadable[:3]:
        table.add_row("unreadable", "", _plain(problem, 200))


def _add_settings(cache: Inspection, table: ResultTable) -> None:
    recipe = cache.manifest.recipe
    places = cache.manifest.places
    text = ", ".join(
        f"{name} = {recipe[name]}" for name in ("text_tokens", "t5_max_length", "text_max_length") if name in recipe
    )
    table.add_row("text", "", text)
    if "diffusers_path" in places:
        table.add_row("encoders", "", _plain(places["diffusers_path"]))
    for label, count in cache.directories.items():
        table.add_row(_plain(f"from {label}"), f"{count:,}", _plain(places.get(f"directory:{label}", "")))


def _plain(value: object, longest: int = 300) -> Text:
    """Return text from data without markup and control codes, cut to ``longest`` characters."""
    return Text(shorten("".join(letter if letter.isprintable() else " " for letter in str(value)), longest))
