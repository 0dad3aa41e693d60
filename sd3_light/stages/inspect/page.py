"""One self-contained page that shows what a data set became: it asks the network for nothing and runs no script."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.data.files import write_atomically
from sd3_light.stages.inspect.cards import reject_groups, sample_sheet
from sd3_light.stages.inspect.charts import bar, bucket_bars, histogram
from sd3_light.stages.inspect.gather import Inspection, draw, explain, inspect_cache, quantile
from sd3_light.stages.inspect.html import Html, join, rows, tag
from sd3_light.stages.inspect.rejects import MOST_SHOWN, Rejects, read_rejects
from sd3_light.stages.inspect.samples import ShownSample, open_decoder, show_samples
from sd3_light.stages.inspect.style import STYLE

PAGE_SAMPLES = 50_000
"""Captions of about this many samples make the histograms."""

# a browser that obeys it loads nothing and runs nothing, whatever a caption may hold
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
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
    _make_room(out)
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
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"sd3-light {__version__}"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    body = tag("body", _top(found), tag("main", *(section(found) for section in sections)))
    return join((Html("<!doctype html>\n"), tag("html", head, body, lang="en"), Html("\n")))


def _make_room(out: Path) -> None:
    """Fail before the work, not after it."""
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder; name the file of the page, such as {out / 'page.html'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"--out: cannot make the folder {out.parent}: {fault.strerror}; name another place") from fault


def _top(found: Findings) -> Html:
    names = ("buckets", "captions", "samples", "rejects", "makers")
    titles = ("Buckets", "Captions", "Samples", "Rejects", "What made it")
    links = (tag("a", title, href=f"#{name}") for name, title in zip(names, titles, strict=True))
    notes = [tag("div", *(tag("p", note) for note in found.notes), class_="notes", role="note")] if found.notes else []
    return tag(
        "header",
        tag("h1", "What the data set became"),
        tag("div", str(found.cache.folder), class_="key soft"),
        tag("nav", *links),
        *notes,
    )


def _counts(found: Findings) -> Html:
    cache = found.cache
    rejected = sum(found.rejects.counts.values()) or sum(cache.rejects.values())
    each = cache.bytes / max(1, cache.samples)
    tiles = [_tile(f"{count:,}", name, _MEANINGS.get(name, "")) for name, count in cache.counts.items()]
    tiles.append(_tile(f"{rejected:,}", "rejected", "inputs that are not used"))
    tiles.append(_tile(_size(cache.bytes), "on disk", f"{len(cache.manifest.shards):,} shards"))
    tiles.append(_tile(_size(each), "a sample", _shares(cache.survey.parts)))
    return tag("section", *tiles, class_="tiles", id="counts")


def _buckets(found: Findings) -> Html:
    cache = found.cache
    words = f"{cache.samples:,} samples in {len(cache.buckets):,} buckets (width x height, drawn to scale)."
    return _section("buckets", "Buckets", tag("p", words, class_="soft"), bucket_bars(cache.buckets))


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
    return _section("captions", "Captions", tag("p", words, class_="soft"), tag("div", *charts, class_="pair"))


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
    return _section("samples", "Samples", tag("p", words, class_="soft"), sample_sheet(found.samples))


def _rejects(found: Findings) -> Html:
    counts = dict(found.rejects.counts.most_common()) or found.cache.rejects
    if not counts:
        return _section("rejects", "Rejects", tag("p", "Every input was used.", class_="soft"))
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
    return _section("rejects", "Rejects", tag("p", words, class_="soft"), table, reject_groups(found.rejects))


def _makers(found: Findings) -> Html:
    cache, places = found.cache, found.cache.manifest.places
    sources = [
        (label, join((f"{count:,} samples ", tag("span", places.get(f"directory:{label}", ""), class_="key soft"))))
        for label, count in cache.directories.items()
    ]
    facts = [("diffusers_path", tag("span", places.get("diffusers_path", "not told"), class_="key"))]
    facts += [(str(name), tag("span", str(value), class_="key")) for name, value in cache.manifest.recipe.items()]
    return _section(
        "makers",
        "What made it",
        tag("h3", "Sources"),
        rows(sources, class_="facts"),
        tag("h3", "Encoders and settings"),
        rows(facts, class_="facts"),
    )


def _section(name: str, title: str, *children: str) -> Html:
    return tag("section", tag("h2", title), *children, id=name)


def _tile(number: str, name: str, remark: str) -> Html:
    return tag("div", tag("b", number), tag("span", name if not remark else f"{name}: {remark}"), class_="tile")


def _shares(parts: Mapping[str, int]) -> str:
    total = max(1, sum(parts.values()))
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / total:.0%}" for name, size in ranked if size / total >= 0.005)


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:,.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"
