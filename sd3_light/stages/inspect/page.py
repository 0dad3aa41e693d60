"""One self-contained page that shows what a data set became: it asks the network for nothing and runs no script."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sd3_light.files import write_atomically
from sd3_light.runlog.page.frame import document, links, make_room, notes, section, size_text, tile
from sd3_light.runlog.page.html import Html, join, rows, tag
from sd3_light.stages.inspect.cards import reject_groups, sample_sheet
from sd3_light.stages.inspect.charts import bar, bucket_bars, histogram
from sd3_light.stages.inspect.gather import Inspection, draw, explain, inspect_cache, quantile
from sd3_light.stages.inspect.rejects import MOST_SHOWN, Rejects, read_rejects
from sd3_light.stages.inspect.samples import ShownSample, open_decoder, show_samples
from sd3_light.stages.inspect.style import STYLE

PAGE_SAMPLES = 50_000
"""Captions of about this many samples make the histograms."""

_MEANINGS = {
    "used": "samples in the cache, one for each resolution of a picture",
    "pictures": "sound at first sight: a caption, a readable header",
    "cropped": "lose some of their border",
    "enlarged": "are smaller than their bucket",
}


@dataclass(frozen=True)
class Findings:
    """All that the page shows; ``notes`` say what could not be shown."""

    cache: Inspection
    rejects: Rejects
    samples: list[ShownSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_page(cache: Path, out: Path, samples: int = 48, seed: int = 0, vae: Path | None = None) -> Findings:
    """Write the page of a cache; ``samples`` are drawn by ``seed`` from all of it. Missing sources or a missing VAE are
    told on the page; a ``vae`` that is named and cannot be used, no cache, or no place to write raise UserError."""
    found = inspect_cache(cache, PAGE_SAMPLES, seed)
    make_room(out)
    findings = gather_findings(found, samples, seed, vae)
    # what cannot be written as UTF-8 (half a surrogate pair in a detail) must not cost the page
    write_atomically(out, render_page(findings).encode("utf-8", "backslashreplace"))
    return findings


def gather_findings(found: Inspection, samples: int, seed: int, vae: Path | None) -> Findings:
    """Rejects and samples of a cache that has been looked at, and notes of what is missing."""
    manifest = found.manifest
    notes = [f"A shard cannot be read: {fault}" for fault in found.survey.unread]
    for label in found.directories:
        place = manifest.places.get(f"directory:{label}")
        if place is None or not Path(place).exists():
            gone = "the cache does not say where it was" if place is None else f"{place} does not exist"
            notes.append(f"The originals of {label} cannot be shown: {gone}.")
    decoder, problem = open_decoder(manifest.places, vae) if samples else (None, "")
    notes += [problem] if problem else []
    shown = show_samples(found.folder, manifest, draw(manifest.shards, samples, seed), decoder, notes)
    rejects = read_rejects(found.folder, manifest.places, seed)
    if rejects.damaged:
        notes.append(f"{rejects.damaged:,} lines of rejects.jsonl are damaged.")
    return Findings(found, rejects, shown, notes)


def render_page(found: Findings) -> Html:
    """The whole page as text."""
    sections = (_counts, _buckets, _captions, _samples, _rejects, _makers)
    title = f"{found.cache.folder.resolve().name}: what the data set became"
    return document(title, STYLE, [_top(found), tag("main", *(part(found) for part in sections))])


def _top(found: Findings) -> Html:
    names = ("buckets", "captions", "samples", "rejects", "makers")
    titles = ("Buckets", "Captions", "Samples", "Rejects", "What made it")
    return tag(
        "header",
        tag("h1", "What the data set became"),
        tag("div", str(found.cache.folder), class_="key soft"),
        links(zip(names, titles, strict=True)),
        *notes(found.notes),
    )


def _counts(found: Findings) -> Html:
    cache = found.cache
    rejected = sum(found.rejects.counts.values()) or sum(cache.rejects.values())
    each = cache.bytes / max(1, cache.samples)
    tiles = [tile(f"{count:,}", name, _MEANINGS.get(name, "")) for name, count in cache.counts.items()]
    tiles.append(tile(f"{rejected:,}", "rejected", "inputs that are not used"))
    tiles.append(tile(size_text(cache.bytes), "on disk", f"{len(cache.manifest.shards):,} shards"))
    tiles.append(tile(size_text(each), "a sample", _shares(cache.survey.parts)))
    return tag("section", *tiles, class_="tiles", id="counts")


def _buckets(found: Findings) -> Html:
    cache = found.cache
    words = f"{cache.samples:,} samples in {len(cache.buckets):,} buckets (width x height, drawn to scale)."
    return section("buckets", "Buckets", tag("p", words, class_="soft"), bucket_bars(cache.buckets))


def _captions(found: Findings) -> Html:
    survey, recipe = found.cache.survey, found.cache.manifest.recipe
    shards = f"{survey.shards:,} of {len(found.cache.manifest.shards):,} shards"
    of = f"{survey.samples:,} samples in {shards}, chosen at random"
    if survey.samples == found.cache.samples:
        of = f"all {survey.samples:,} samples"
    charts = [_chart("Words", survey.words, "words", "A Chinese or Japanese character counts as a word.")]
    limit = recipe.get("t5_max_length")
    if survey.tokens:
        full = survey.tokens.get(limit, 0) / survey.tokens.total() if isinstance(limit, int) else 0
        words = f"{full:.1%} fill all {limit} (t5_max_length) and may be cut."
        charts.append(_chart("T5 tokens", survey.tokens, "T5 tokens", words))
    padded = "" if survey.tokens else f" Text is padded to {limit} T5 tokens, so token counts are not kept."
    each = survey.words.total() / max(1, survey.samples)
    words = f"{survey.words.total():,} captions of {of}: {each:,.3g} a sample.{padded}"
    return section("captions", "Captions", tag("p", words, class_="soft"), tag("div", *charts, class_="pair"))


def _chart(title: str, lengths: Counter[int], unit: str, remark: str) -> Html:
    if not lengths:
        return tag("div", tag("h3", title), tag("p", "none", class_="soft"))
    middle, most = quantile(lengths, 0.5), max(lengths)
    words = f"Median {middle:,}, 95% have at most {quantile(lengths, 0.95):,}, the longest {most:,}. {remark}"
    return tag("div", tag("h3", title), tag("p", words, class_="soft"), histogram(lengths, unit))


def _samples(found: Findings) -> Html:
    words = (
        f"{len(found.samples):,} samples, drawn at random from all. Left: the original, resized and cropped as for the "
        "cache. Right: what the VAE makes of the cached latents, and how close it is (peak signal-to-noise ratio)."
    )
    return section("samples", "Samples", tag("p", words, class_="soft"), sample_sheet(found.samples))


def _rejects(found: Findings) -> Html:
    counts = dict(found.rejects.counts.most_common()) or found.cache.rejects
    if not counts:
        return section("rejects", "Rejects", tag("p", "Every input was used.", class_="soft"))
    most = max(counts.values())
    lines = (
        tag(
            "tr",
            tag("th", tag("code", reason), tag("div", explain(reason), class_="soft"), scope="row"),
            tag("td", bar(count / most)),
            tag("td", f"{count:,}", class_="number"),
        )
        for reason, count in counts.items()
    )
    words = f"{sum(counts.values()):,} inputs are not used; rejects.jsonl names them all."
    if sum(counts.values()) > len(found.rejects.shown):
        words += f" At most {MOST_SHOWN} are shown, chosen at random from every reason alike."
    table = tag("table", tag("tbody", *lines), class_="bars reasons")
    return section("rejects", "Rejects", tag("p", words, class_="soft"), table, reject_groups(found.rejects))


def _makers(found: Findings) -> Html:
    cache, places = found.cache, found.cache.manifest.places
    sources = [
        (label, join((f"{count:,} samples ", tag("span", places.get(f"directory:{label}", ""), class_="key soft"))))
        for label, count in cache.directories.items()
    ]
    facts = [("diffusers_path", tag("span", places.get("diffusers_path", "not told"), class_="key"))]
    facts += [(str(name), tag("span", str(value), class_="key")) for name, value in cache.manifest.recipe.items()]
    return section(
        "makers",
        "What made it",
        tag("h3", "Sources"),
        rows(sources, class_="facts"),
        tag("h3", "Encoders and settings"),
        rows(facts, class_="facts"),
    )


def _shares(parts: Mapping[str, int]) -> str:
    total = max(1, sum(parts.values()))
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / total:.0%}" for name, size in ranked if size / total >= 0.005)
