"""The datasets of the served folders: their samples, the list of excluded ones, and jobs that read them."""

import os
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sd3_light.config import DirectoryConfig, load_config, load_dataset
from sd3_light.config.faults import UserError
from sd3_light.config.toml_file import read_toml
from sd3_light.config.toml_text import format_toml
from sd3_light.config.validation import looks_like
from sd3_light.other_process import start_verb
from sd3_light.sources.caption_places import CaptionPlace, CaptionPlaces
from sd3_light.sources.captions import prepare_captions
from sd3_light.sources.catalogue import Source, make_sources
from sd3_light.sources.exclusions import read_exclusions, with_exclusions
from sd3_light.sources.preprocess import Reject
from sd3_light.ui.caption_edits import CaptionEdit, EditResult, Journal, apply_edits, edited_captions
from sd3_light.ui.caption_text import make_transform
from sd3_light.ui.dataset_jobs import (
    LINKED,
    CachePlanRun,
    Job,
    cache_rejects,
    count_lost_tokens,
    has_linked_caption,
    list_samples,
    measure_psnr,
)
from sd3_light.ui.folders import Folders, Repeated, folder_id, project_folders, remembered
from sd3_light.ui.sample_index import IndexedSample, Rows, SampleIndex
from sd3_light.ui.served_files import ServedFiles

if TYPE_CHECKING:
    from sd3_light.core.caption_lengths import TextLimit

MOST_EDITS = 100_000
"""Samples whose captions one change may look at."""

_SEARCH_SECONDS = 10.0
_MOST_OPEN = 8
_MOST_TOMLS = 4000  # whose kind is in memory


@dataclass(frozen=True)
class Preview:
    """A change of captions that waits for a decision."""

    id: str
    description: str
    edits: Sequence[CaptionEdit]
    problems: Sequence[tuple[str, str]]
    looked_at: int


class Dataset:
    """A dataset TOML, its samples as far as they are listed, and what was changed here.

    ``configs`` are the train TOMLs that name it. Several threads may use it.
    """

    def __init__(self, path: Path, configs: Sequence[Path], files: ServedFiles, prepare: Callable[[], object]) -> None:
        self.path = path
        self.configs = configs
        self.files = files
        self._prepare = prepare
        self.journal = Journal()
        self.job: Job | None = None
        self.plan: CachePlanRun | None = None
        self.limits: Sequence[TextLimit] = ()
        self.lost: dict[str, int] = {}
        self.psnr: dict[str, float] = {}
        self.notes: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="sd3-light-ui-")
        self._index: SampleIndex | None = None
        self._previews: dict[str, Preview] = {}
        self._load = remembered(1, load_dataset)
        self._lock = threading.RLock()
        self.is_listed_here = False

    @property
    def directories(self) -> tuple[DirectoryConfig, ...]:
        """The directories as the TOML is now. Raises ConfigFaults."""

        try:
            return self._load(self.path).directories
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error

    @property
    def sources(self) -> list[Source]:
        """The sources with the samples that `exclude` lists."""
        return make_sources([each.model_copy(update={"exclude": None}) for each in self.directories])

    @property
    def cache_dir(self) -> Path | None:
        """The folder of the cache: that of the first train TOML that names the dataset, or the usual one."""
        for config in self.configs:
            try:
                loaded = load_config(config)
            except UserError:
                continue
            for dataset in (loaded.dataset, *loaded.eval_datasets.values()):
                if dataset.path == self.path:
                    return dataset.cache_dir if isinstance(dataset.cache_dir, Path) else None
        return self.path.with_suffix(".cache")

    @property
    def excluded(self) -> frozenset[str]:
        """The keys in all lists of the TOML."""
        lists = {directory.exclude for directory in self.directories if directory.exclude is not None}
        return frozenset[str]().union(*(read_exclusions(path) for path in lists if path.exists()))

    @property
    def index(self) -> SampleIndex | None:
        """The samples; None if they were never listed."""
        with self._lock:
            if self._index is None and (cache := self.cache_dir) is not None:
                index = SampleIndex.of_cache(cache, make_sources(self.directories))
                self._index = None if index is None else index.with_rejects(cache_rejects(cache, index))
            if self._index is not None and self._index.excluded != self.excluded:
                self._index = replace(self._index, excluded=self.excluded)
            return self._index

    def require_index(self) -> SampleIndex:
        """Return the samples. Raises UserError if they were never listed."""
        index = self.index
        if index is None:
            raise UserError("the images of this dataset were not listed yet; press `List images`")
        return index

    # --- jobs -------------------------------------------------------------------------------------

    def list_images(self, compare: bool = False) -> None:
        """List and probe the images in a thread; ``compare``: also find similar ones."""
        self._start("Listing images", lambda job: self._list(job, compare))

    def count_tokens(self) -> None:
        """Find the captions that text encoders cut, in a thread."""
        self._start("Counting tokens", self._count_tokens)

    def measure_psnr(self) -> None:
        """Find the images that the VAE of the cache reconstructs worst, in a thread."""
        self._start("Loading the VAE", self._measure_psnr)

    def plan_cache(self, config: Path) -> None:
        """Ask `sd3-light cache CONFIG --dry-run` what would be encoded again."""
        if config not in self.configs:
            raise UserError(f"{config} does not name this dataset; choose a config of the list")
        with self._lock:
            if self.plan is not None and self.plan.is_running:
                raise UserError("the cache is being compared already; wait until it is done")
            output = Path(self._folder.name, f"plan-{time.monotonic_ns()}.txt")
            process = start_verb(["cache", str(config), "--dry-run"], output, start_new_session=True)
            self.plan = CachePlanRun(config, output, process)

    def _start(self, title: str, work: Callable[[Job], None]) -> None:
        with self._lock:
            if self.job is not None and self.job.is_running:
                raise UserError("the dataset is being read already; wait until it is done")
            self.job = Job(title)
        self.job.start(work)

    def _list(self, job: Job, compare: bool) -> None:
        sources = [replace(source, compared=compare) for source in self.sources]
        index = list_samples(job, sources, Path(self._folder.name), self.cache_dir)
        with self._lock:
            edited = self._index.edited if self._index is not None else frozenset()
            self._index = replace(index, excluded=self.excluded, edited=edited)
            self.is_listed_here = True
            self.lost = {}
            self.psnr = {}

    def _count_tokens(self, job: Job) -> None:
        self.lost, note = count_lost_tokens(job, self.require_index(), self._load_limits())
        self.notes = [note]

    def _measure_psnr(self, job: Job) -> None:
        self._prepare()
        if self.cache_dir is None:
            raise UserError("the cache is at a URL, whose images are not decoded here")
        self.psnr, self.notes = measure_psnr(job, self.cache_dir)

    def _load_limits(self) -> "Sequence[TextLimit]":
        from sd3_light.core.registry import family_of

        for config in self.configs:
            try:
                model = load_config(config).train.model
            except UserError:
                continue
            self._prepare()
            self.limits = family_of(model).encoding.model_limits(model)
            if self.limits:
                return self.limits
        raise UserError("no train TOML of this dataset names a model whose tokenizers can be read")

    # --- samples and captions ---------------------------------------------------------------------

    def sample(self, key: str) -> IndexedSample:
        """Return a sample. Raises UserError for an unknown key."""
        index = self.require_index()
        return index.samples(np.array([index.row_of(key)]))[0]

    def caption_place(self, key: str) -> CaptionPlace:
        """Return where the captions of a sample are. Raises UserError if they cannot be changed."""
        sample = self.sample(key)
        with CaptionPlaces(sample.source.directory, sample.source.index) as places:
            place = self._place(places, sample)
        return place

    def _place(self, places: CaptionPlaces, sample: IndexedSample) -> CaptionPlace:
        if has_linked_caption(sample):
            raise UserError(f"{sample.key}: {LINKED}")
        try:
            place = places.find(sample.key, sample.location)
        except Reject as reject:
            raise UserError(f"{sample.key}: {reject.detail or reject.reason}") from reject
        if problem := place.problem or self.files.problem(place.path):
            raise UserError(problem)
        return place

    def edit(self, key: str, number: int, old: str, new: str) -> tuple[str, ...]:
        """Change one caption and return all of the sample's as they are trained on. Raises UserError."""
        with self._lock:
            sample = self.sample(key)
            with CaptionPlaces(sample.source.directory, sample.source.index) as places:
                edit = CaptionEdit(key, self._place(places, sample), places.columns, number, old, new)
            result = apply_edits(self.files, [edit])
            for _, problem in result.problems:
                raise UserError(problem)
            self._note(f"the caption of {key}", result)
            return self.sample(key).captions

    def preview(self, rows: Rows, mode: str, find: str, put: str) -> Preview:
        """Return what a change of the captions of rows would do. Raises UserError for a change that is not valid."""
        index = self.require_index()
        if len(rows) > MOST_EDITS:
            raise UserError(f"{len(rows):,} samples are too many at once; filter them to at most {MOST_EDITS:,}")
        edits: list[CaptionEdit] = []
        problems: list[tuple[str, str]] = []
        delimiters = [source.directory.cache_shuffle_delimiter for source in index.sources]
        transforms = {delimiter: make_transform(mode, find, put, delimiter) for delimiter in delimiters}
        for places, _, sample in _with_places(index, rows):
            transform = transforms[sample.source.directory.cache_shuffle_delimiter]
            if not any(transform(text) != text for text in sample.captions):
                continue  # no place is looked for: most captions do not change
            try:
                place = self._place(places, sample)
                texts = edited_captions(place)
            except UserError as error:
                problems.append((sample.key, str(error)))
                continue
            edits += [
                CaptionEdit(sample.key, place, places.columns, at, text, transform(text))
                for at, text in enumerate(texts)
                if transform(text) != text
            ]
        described = {"text": f"{find!r} → {put!r}", "tag": f"tag {find!r} → {put!r}", "start": f"+ {put!r}"}
        description = f"{len(edits):,} captions: {described.get(mode, f'+ {put!r} at the end')}"
        preview = Preview(f"{time.monotonic_ns():x}", description, edits, problems, len(rows))
        with self._lock:
            self._previews = dict([*self._previews.items(), (preview.id, preview)][-4:])
        return preview

    def apply(self, preview_id: str) -> EditResult:
        """Write the edits of a preview, once. Captions that have changed since stay as they are, with a reason."""
        with self._lock:
            preview = self._previews.pop(preview_id, None)
            if preview is None:
                raise UserError("this preview is not known any more; preview the change again")
            result = apply_edits(self.files, preview.edits)
            self._note(preview.description, result)
            self.notes = [f"{len(result.done):,} captions were changed.", *_problem_notes(result.problems)]
            return result

    def undo(self) -> EditResult:
        """Take back the last change of captions."""
        with self._lock:
            description = self.journal.last
            result = self.journal.undo(self.files)
            self._show(result)
            self.notes = [f"Taken back: {description}.", *_problem_notes(result.problems)]
            return result

    def _note(self, description: str, result: EditResult) -> None:
        self.journal.add(description, result.done)
        self._show(result)

    def _show(self, result: EditResult) -> None:
        """Show the captions of edited samples as they are in their files now."""
        index = self.require_index()
        keys = [edit.key for edit in result.done]
        changes: dict[int, Sequence[str]] = {}
        accepted = set()
        for places, row, sample in _with_places(index, index.rows_of(keys)):
            try:
                place = places.find(sample.key, sample.location)
                changes[row] = prepare_captions(place.captions, sample.source.directory)
            except (UserError, Reject):  # empty, and empty captions are skipped: listing again says so
                changes[row] = ()
            if changes[row]:
                accepted.add(sample.key)
        self._index = index.with_captions(changes).without_reasons(accepted, ("no_caption", "empty_caption"))

    # --- excluded samples -------------------------------------------------------------------------

    def exclude(self, keys: Sequence[str], excluded: bool) -> int:
        """Add keys to the list of excluded samples, or remove them; return how many changed. Raises UserError."""
        with self._lock:
            sources = {source.label: source for source in make_sources(self.directories)}
            by_list: dict[Path | None, list[str]] = {}
            for key in dict.fromkeys(keys):
                source = max((label for label in sources if key.startswith(f"{label}/")), key=len, default=None)
                if source is None:
                    raise UserError(f"{key:.200} is not a key of this dataset")
                by_list.setdefault(sources[source].directory.exclude, []).append(key)
            before = self.excluded
            for path, own in by_list.items():
                self._write_list(path, own, excluded)
            return len(before ^ self.excluded)

    def _write_list(self, path: Path | None, keys: Sequence[str], excluded: bool) -> None:
        target = path or self.path.with_name(f"{self.path.stem}.exclude.txt")
        toml = self.files.read(self.path) if path is None else None
        new_toml = b"" if toml is None else _with_key(toml, "exclude", target.name)
        data = self.files.read(target)
        text = "" if data is None else data.decode("utf-8")
        added, removed = (keys, ()) if excluded else ((), keys)
        new = with_exclusions(text, added, removed).encode()
        if new != (data or b""):
            self.files.replace(target, data, new)
        if toml is not None:
            self.files.replace(self.path, toml, new_toml)


class Datasets:
    """The dataset TOMLs below the roots of folders, and those that train TOMLs there name."""

    def __init__(self, folders: Folders, prepare: Callable[[], object]) -> None:
        self._folders = folders
        self._prepare = prepare
        self.files = ServedFiles(folders.roots)
        self._kind = remembered(_MOST_TOMLS, _kind_of)
        self.listed = Repeated(self._search, _SEARCH_SECONDS)
        """Path and train TOMLs of every dataset by its id, sorted by path."""
        self._open: dict[str, Dataset] = {}
        self._lock = threading.Lock()

    def get(self, dataset_id: str) -> Dataset:
        """Return a dataset. Raises UserError for an unknown id."""
        known = self.listed.get().get(dataset_id)
        if known is None:
            raise UserError(f"there is no dataset {dataset_id:.80}; see the list of datasets")
        with self._lock:
            dataset = self._open.pop(dataset_id, None) or Dataset(*known, self.files, self._prepare)
            dataset.configs = known[1]
            self._open[dataset_id] = dataset
            for oldest in list(self._open)[:-_MOST_OPEN]:
                if not ((job := self._open[oldest].job) and job.is_running):
                    del self._open[oldest]
            return dataset

    def _search(self) -> dict[str, tuple[Path, list[Path]]]:
        named: dict[Path, list[Path]] = {}
        for path in (path for folder in project_folders(self._folders.roots) for path in folder.tomls()):
            try:
                kind, dataset = self._kind(path)
            except OSError:
                continue
            if kind == "dataset":
                named.setdefault(path, [])
            elif dataset is not None and os.path.isfile(dataset):  # False also for names that are too long
                named.setdefault(dataset, []).append(path)
        return {folder_id(path): (path, named[path]) for path in sorted(named)}


def _with_places(index: SampleIndex, rows: Rows) -> Iterator[tuple[CaptionPlaces, int, IndexedSample]]:
    """Yield rows and their samples, source by source, with what finds their captions."""
    for number, source in enumerate(index.sources):
        own = np.sort(rows[index.numbers[rows] == number])
        with CaptionPlaces(source.directory, source.index) as places:
            for row, sample in zip(own.tolist(), index.samples(own), strict=True):
                yield places, row, sample


def _problem_notes(problems: Sequence[tuple[str, str]]) -> list[str]:
    first = [f"{key}: {why}" for key, why in problems[:3]]
    return [f"{len(problems):,} were not changed, such as {'; '.join(first)}"] if problems else []


def _kind_of(path: Path) -> tuple[str, Path | None]:
    """Return whether a TOML is that of a dataset or of a training, and the dataset that the latter names."""
    raw, _ = read_toml(path)
    if raw is None:
        return "", None
    kind = looks_like(raw) or ""
    name = raw.get("dataset")
    if kind == "dataset" or not isinstance(name, str) or "\0" in name:
        return kind, None
    return "train", Path(os.path.abspath(path.parent / os.path.expanduser(name)))


def _with_key(toml: bytes, key: str, value: str) -> bytes:
    """Return a TOML with another key at its top, after its first comments; the rest stays as it is."""
    text = toml.decode("utf-8")
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    lines = text.removeprefix(mark).splitlines(keepends=True)
    comments = next((at for at, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    ending = "\r\n" if "\r\n" in text else "\n"
    added = f"{key} = {format_toml(value)}{ending}"
    new = mark + "".join(lines[:comments]) + added + "".join(lines[comments:])
    try:
        before = tomllib.loads(text.removeprefix(mark))
        is_added = key not in before and tomllib.loads(new.removeprefix(mark)) == {key: value, **before}
        data = new.encode()
    except ValueError:  # the value is a file name, whose bytes may not be UTF-8
        is_added = False
    if not is_added:
        raise UserError(f"{key} cannot be added to the dataset TOML; write {added.strip()} at its top")
    return data
