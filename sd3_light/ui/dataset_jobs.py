"""What is read of a dataset in threads: its images, tokens of captions, and what the VAE makes of cached images."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import REJECTS_FILE, Manifest
from sd3_light.inputs import lines_of, open_regular, parse_json, read_limited
from sd3_light.sources.catalogue import PART_ROWS, Catalogue, Source
from sd3_light.sources.claims import Claims
from sd3_light.sources.listing import CAPTION_SUFFIXES
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes
from sd3_light.sources.video import open_still
from sd3_light.ui.background import error_of
from sd3_light.ui.sample_index import IndexedSample, Query, SampleIndex

if TYPE_CHECKING:
    from sd3_light.core.caption_lengths import TextLimit

LINKED = "its caption is a link that leads out of the folder, which this page does not show"
_MOST_REJECTS = 200_000  # lines of a cache's rejects that are read
_MOST_RETRIED = 5000
_MOST_DECODED = 1000  # images whose PSNR is measured: decoding one takes as long as encoding two
_DECODED_AT_ONCE = 32
_MOST_COUNTED = 50_000  # captions whose tokens are counted
_TAIL = 20_000  # characters of what a command printed
_WORKERS = min(4, os.cpu_count() or 1)


@dataclass
class Job:
    """Work in a thread: what it does, how far it is, and how it ended."""

    title: str
    done: int = 0
    total: int = 0
    error: str = ""
    is_running: bool = True

    def begin(self, title: str, total: int) -> None:
        """Begin the next part of the work."""
        self.title = title
        self.done = 0
        self.total = total

    def advance(self, count: int) -> None:
        """Add to what is done."""
        self.done += count

    def start(self, work: "Callable[[Job], None]") -> None:
        """Do the work in a thread, which marks its end."""

        def run() -> None:
            self.error = error_of(lambda: work(self))
            self.is_running = False

        threading.Thread(target=run, name="dataset", daemon=True).start()


@dataclass
class CachePlanRun:
    """`sd3-light cache CONFIG --dry-run` in another process."""

    config: Path
    output: Path
    process: Any

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def text(self) -> str:
        """What it has printed."""
        try:
            return read_limited(self.output).decode(errors="replace")[-_TAIL:].strip()
        except OSError:
            return ""


def list_samples(job: Job, sources: Sequence[Source], folder: Path, cache: Path | None) -> SampleIndex:
    """List and probe the images of sources into a folder; sources that are `compared` have groups of similar images."""
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        listings = catalogue.refresh(sources, job.advance)
        if total := catalogue.count_unprobed(listings):
            job.begin("Reading images", total)
            catalogue.probe_images(listings, _WORKERS, job.advance)
    index = SampleIndex.of_parts(catalogue.folder, [(each.source, each.parts) for each in listings])
    index = _without_linked_captions(index)
    rejects = {} if cache is None else _decodable(job, cache_rejects(cache, index), index)
    index = index.with_misfits().with_rejects(rejects)
    if any(source.compared for source in sources):
        job.title = "Comparing images"
        index = index.with_groups()
    return index


def has_linked_caption(sample: IndexedSample) -> bool:
    """Return whether the caption of an image is a link that leads out of the folder: the page would show any file."""
    root = sample.source.root
    try:
        image = sample.location if sample.image and isinstance(root, Path) else None
    except Reject:
        return False
    if not isinstance(image, FileBytes):
        return False
    captions = [os.path.splitext(image.path)[0] + suffix for suffix in CAPTION_SUFFIXES]
    targets = [Path(os.path.realpath(path)) for path in captions if os.path.islink(path)]  # also of a loop
    return any(not target.is_relative_to(os.path.realpath(str(root))) for target in targets)


def _without_linked_captions(index: SampleIndex) -> SampleIndex:
    linked: dict[int, tuple[str, ...]] = {}
    for start in range(0, len(index), PART_ROWS):
        rows = np.arange(start, min(start + PART_ROWS, len(index)))
        samples = zip(rows.tolist(), index.samples(rows), strict=True)
        linked |= {row: () for row, sample in samples if sample.captions and has_linked_caption(sample)}
    if not linked:
        return index
    hidden = replace(index.with_captions(linked), edited=index.edited)
    return hidden.with_rejects(dict.fromkeys(index.keys(np.array(list(linked))), ("unreadable", LINKED)))


def _decodable(job: Job, rejects: dict[str, tuple[str, str]], index: SampleIndex) -> dict[str, tuple[str, str]]:
    """Return the rejects of a cache whose images still cannot be decoded; a part of very many is tried."""
    tried = list(rejects)[:_MOST_RETRIED]
    job.begin("Trying rejected images again", len(tried))
    left = dict(rejects)
    for sample in index.samples(index.rows_of(tried)):
        job.advance(1)
        try:
            open_still(sample.location)
            del left[sample.key]
        except Reject as reject:
            left[sample.key] = (reject.reason, reject.detail)
    return left


def count_lost_tokens(job: Job, index: SampleIndex, limits: "Sequence[TextLimit]") -> tuple[dict[str, int], str]:
    """Return by key how many tokens of captions the encoders do not read, and a note."""
    rows = index.find(Query())[:_MOST_COUNTED]
    job.begin("Counting tokens", len(rows))
    lost: dict[str, int] = {}
    for start in range(0, len(rows), 256):
        for sample in index.samples(rows[start : start + 256]):
            if beyond := max((tokens_lost(text, limits) for text in sample.captions), default=0):
                lost[sample.key] = beyond
            job.advance(1)
    note = f"{len(lost):,} of {len(rows):,} samples have a caption that a text encoder cuts"
    return lost, note + (": sort by tokens cut to see them." if lost else ".")


def measure_psnr(job: Job, cache: Path) -> tuple[dict[str, float], list[str]]:
    """Return by key how well the VAE of a cache reconstructs its images, and notes. Raises UserError."""
    from sd3_light.report.inspect.cache_stats import draw_samples
    from sd3_light.report.inspect.sample_cards import load_samples, open_vae

    manifest = Manifest.load(cache)
    vae, problem = open_vae(manifest.places, None)
    if vae is None:
        raise UserError(problem)
    refs = draw_samples(manifest.shards, _MOST_DECODED, seed=0)
    job.begin("Decoding cached images", len(refs))
    measured: dict[str, float] = {}
    chosen = "all" if len(refs) < _MOST_DECODED else f"{len(refs):,} random"
    notes = [f"PSNR of {chosen} cached images was measured: sort by PSNR to see the worst."]
    for start in range(0, len(refs), _DECODED_AT_ONCE):
        for card in load_samples(cache, manifest, refs[start : start + _DECODED_AT_ONCE], vae, notes):
            if card.psnr is not None:
                measured[card.origin.key] = min(card.psnr, measured.get(card.origin.key, math.inf))
        job.advance(min(_DECODED_AT_ONCE, len(refs) - start))
    return measured, notes


def tokens_lost(text: str, limits: "Sequence[TextLimit]") -> int:
    """Return how many tokens of a text the encoders do not read, at most."""
    return max((limit.count(text) - limit.tokens for limit in limits), default=0) if limits else 0


def read_length(text: str, limits: "Sequence[TextLimit]") -> int:
    """Return how many characters of a text the strictest encoder reads."""
    low = 0
    high = len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens_lost(text[:middle], limits) <= 0 else (low, middle - 1)
    return low


def cache_rejects(cache: Path, index: SampleIndex) -> dict[str, tuple[str, str]]:
    """Return reason and detail of the inputs that a cache could not use, by key."""
    rejects: dict[str, tuple[str, str]] = {}
    try:
        with open_regular(cache / REJECTS_FILE) as file:
            for number, line in enumerate(lines_of(file)):
                if number >= _MOST_REJECTS:
                    break
                item = parse_json(line)
                if isinstance(item, dict) and isinstance(item.get("key"), str):
                    rejects[item["key"]] = (str(item.get("reason", "")), str(item.get("detail", "")))
    except (OSError, ValueError):  # no cache yet, or a damaged list
        pass
    known = set(index.keys(index.rows_of(list(rejects)))) if rejects else set()
    return {key: why for key, why in rejects.items() if key in known}
