"""The HTML page of a cache; it runs no script."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sd3_light.config.base import is_url
from sd3_light.core.columns import named_bucket
from sd3_light.data.manifest import DUPLICATES_FILE, REJECTS_FILE
from sd3_light.encoding.vae import LOW_PSNR
from sd3_light.formats import byte_size
from sd3_light.pages import check_output_path, render_template, save_page
from sd3_light.report.inspect.cache_stats import Inspection, draw_samples, inspect_cache, reason_meaning
from sd3_light.report.inspect.duplicates import DUPLICATE_MEANINGS, DuplicatePair, read_duplicates
from sd3_light.report.inspect.histogram import Histogram, make_histogram
from sd3_light.report.inspect.line_sample import LineSample
from sd3_light.report.inspect.rejects import MOST_SHOWN, RejectCard, read_rejects
from sd3_light.report.inspect.sample_cards import SampleCard, load_samples, open_vae
from sd3_light.sources.access import exists

PAGE_SAMPLES = 50_000
"""The histograms use the captions of about this many samples."""

_WORST = 3  # reconstructions that are shown first
# the manifest's counts: name and hint on the page
_COUNTS = {
    "used": ("used", "samples in the cache, one per resolution of an image"),
    "pictures": ("images", "passed the first checks: a caption, a readable header"),
    "cropped": ("cropped", "lose part of their border"),
    "duplicates kept": ("duplicates kept", "have the bytes of an earlier image"),
    "duplicates dropped": ("duplicates dropped", "have the bytes of an earlier image"),
    "similar dropped": ("similar dropped", "look like an earlier image"),
    "held out": ("held out", "images for the validation loss"),
    "unmatched": ("not selected", "do not match `where`"),
    "excluded": ("excluded", "are listed in `exclude`"),
    "enlarged": ("enlarged", "smaller than their bucket"),
}


@dataclass(frozen=True)
class CachePage:
    """The content of the page; ``notes`` say what cannot be shown."""

    cache: Inspection
    rejects: LineSample[RejectCard]
    duplicates: LineSample[DuplicatePair]
    samples: list[SampleCard] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_cache_page(
    cache: Path, out: Path, samples: int = 48, seed: int = 0, vae: Path | None = None, counted: int | None = None
) -> CachePage:
    """Write the page of a cache with ``samples`` random samples and statistics of ``counted`` ones.

    Missing sources or a missing VAE are noted on the page. Raises UserError where there is no cache, ``out`` cannot be
    written, or ``vae`` cannot be used.
    """
    inspection = inspect_cache(cache, counted or PAGE_SAMPLES, seed)
    check_output_path(out)
    content = collect_content(inspection, samples, seed, vae)
    save_page(out, render_page(content))
    return content


def collect_content(cache: Inspection, samples: int, seed: int, vae: Path | None) -> CachePage:
    """Load the samples and rejects of a cache."""
    manifest = cache.manifest
    notes = [f"A shard cannot be read: {problem}" for problem in cache.stats.unreadable]
    for label in cache.directories:
        folder = manifest.places.get(f"directory:{label}")
        if folder is None or not exists(folder if is_url(folder) else Path(folder)):
            problem = "the cache does not record its folder" if folder is None else f"{folder} does not exist"
            notes.append(f"The originals of {label} cannot be shown: {problem}.")
    opened_vae, problem = open_vae(manifest.places, vae) if samples else (None, "")
    notes += [problem] if problem else []
    cards = load_samples(cache.folder, manifest, draw_samples(manifest.shards, samples, seed), opened_vae, notes)
    rejects = read_rejects(cache.folder, manifest.places, seed)
    if rejects.damaged:
        notes.append(f"Damaged lines in {REJECTS_FILE}: {rejects.damaged:,}.")
    duplicates = read_duplicates(cache.folder, manifest.places, seed)
    if duplicates.damaged:
        notes.append(f"Damaged lines in {DUPLICATES_FILE}: {duplicates.damaged:,}.")
    return CachePage(cache, rejects, duplicates, cards, notes)


def render_page(content: CachePage, **values: Any) -> str:
    """Return the page as HTML; ``values`` are those of pages that `sd3-light ui` serves."""
    cache = content.cache
    rejects = content.rejects
    places = content.cache.manifest.places
    reasons = {group.name: group.total for group in rejects.groups} or cache.rejects
    recipe = {"diffusers_path": places.get("diffusers_path", "not recorded"), **cache.manifest.recipe}
    recipe.pop("columns", None)  # hashes of what the other keys say
    return render_template(
        "inspect.html",
        name=cache.folder.resolve().name,
        folder=cache.folder,
        notes=content.notes,
        tiles=_tiles(cache, sum(reasons.values())),
        num_samples=cache.samples,
        buckets=[
            (name, named_bucket(name).width, named_bucket(name).height, count) for name, count in cache.buckets.items()
        ],
        captions=_caption_summary(cache),
        histograms=_histograms(cache),
        samples=content.samples,
        sample_groups=group_samples(content.samples),
        reconstruction=_reconstruction(content.samples),
        reasons=[(reason, reason_meaning(reason), count) for reason, count in reasons.items()],
        reject_groups=rejects.groups,
        reason_meaning=reason_meaning,
        duplicate_groups=content.duplicates.groups,
        duplicate_meanings=DUPLICATE_MEANINGS,
        num_rejects=sum(reasons.values()),
        num_shown=len(rejects.shown),
        most_rejects=MOST_SHOWN,
        sources=[
            (label, f"{count:,} samples", places.get(f"directory:{label}", ""))
            for label, count in cache.directories.items()
        ],
        recipe=[(name, "", str(value)) for name, value in recipe.items()],
        **values,
    )


def group_samples(samples: Sequence[SampleCard]) -> list[tuple[str, list[SampleCard]]]:
    """Return the worst reconstructions, the median one and the other samples, each group with its title."""
    scored = sorted((card for card in samples if card.psnr is not None), key=lambda card: card.psnr or 0.0)
    if len(scored) < 2 * _WORST:
        return [("", list(samples))]
    worst = scored[:_WORST]
    middle = scored[(len(scored) - 1) // 2]
    shown = {id(card) for card in (*worst, middle)}
    others = [card for card in samples if id(card) not in shown]
    return [("Worst reconstructions", worst), ("Median reconstruction", [middle]), ("Other samples", others)]


def _reconstruction(samples: Sequence[SampleCard]) -> str:
    scores = [card.psnr for card in samples if card.psnr is not None]
    if not scores:
        return ""
    low = sum(score < LOW_PSNR for score in scores)
    text = f"The median is {median(scores):.1f} dB, the worst {min(scores):.1f} dB."
    return f"{text} Below {LOW_PSNR:g} dB: {low}; this VAE does not fit these images." if low else text


def _tiles(cache: Inspection, num_rejects: int) -> list[tuple[str, str, str]]:
    return [
        *((f"{count:,}", *_COUNTS.get(name, (name, ""))) for name, count in cache.counts.items()),
        (f"{num_rejects:,}", "rejected", "inputs that are not used"),
        (byte_size(cache.bytes), "on disk", f"{len(cache.manifest.shards):,} shards"),
        (byte_size(cache.bytes_per_sample), "per sample", cache.stats.byte_shares()),
    ]


def _caption_summary(cache: Inspection) -> str:
    stats = cache.stats
    num_shards = len(cache.manifest.shards)
    if stats.samples == cache.samples:
        samples = f"all {stats.samples:,} samples"
    else:
        samples = f"{stats.samples:,} samples in {stats.shards:,} of {num_shards:,} shards, chosen at random"
    summary = f"{stats.words.total():,} captions of {samples}: {stats.mean_captions:,.3g} per sample."
    if cache.cut is not None and (sentence := cache.cut.sentence()):
        summary += f" Captions are cut: {sentence}."
    padded = [f"{max(counts)} {name}" for name, counts in stats.tokens.items() if len(counts) == 1]
    return f"{summary} Every caption has {', '.join(padded)} tokens." if padded else summary


def _histograms(cache: Inspection) -> list[Histogram]:
    recipe = cache.manifest.recipe
    charts = [make_histogram("Words", "words", cache.stats.words, "A Chinese or Japanese character counts as a word.")]
    for names, counts in cache.stats.token_counts().items():
        limits = {key: recipe.get(key) for key in (f"{name}_max_length" for name in names.split(", "))}
        hints = [
            f"{counts[limit] / counts.total():.1%} fill all {limit} tokens ({key}) and may be cut."
            for key, limit in limits.items()
            if isinstance(limit, int)
        ]
        charts.append(make_histogram(f"{names} tokens", f"{names} tokens", counts, " ".join(hints)))
    return charts
