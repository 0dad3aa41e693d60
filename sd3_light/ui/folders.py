"""The runs and caches below the folders that the user named, and the caches of these runs."""

import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from sd3_light.config import load_config
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.inputs import open_regular
from sd3_light.report.curves import Curve
from sd3_light.report.run_ends import read_ends
from sd3_light.report.run_log import QUICK_BYTES, RunReader
from sd3_light.report.verb import RunReport
from sd3_light.tensor_file import read_header
from sd3_light.ui.served_files import LARGEST_TEXT

_DEEPEST = 3  # levels below a named folder
_MOST_ENTRIES = 2000  # of a folder that are looked at: folders of images have many more
_MOST_FOLDERS = 20_000  # below a named folder that are searched for configs
_SCAN_SECONDS = 10.0  # between two searches
EVALUATION = "images.json"
"""The file that lists the images of an evaluation and their scores."""
_MOST_EVALUATIONS = 200
_MOST_ADAPTERS = 200
_LONGEST_HEADER = 16_000_000  # bytes of an adapter's file
_ADAPTER_KEY = re.compile(r"\.(lora_|lora\.|lokr_|hada_)")
# in memory
_MOST_LOGS = 1000
_MOST_ENDS = 10_000
_MOST_MANIFESTS = 16
_SKIPPED = frozenset(("checkpoints", "ema", "exports", "samples", "shards", "tensorboard", "transformer"))

Content = TypeVar("Content")


def remembered(most: int, read: Callable[[Path], Content]) -> Callable[[Path], Content]:
    """Return ``read`` with a memory of the last ``most`` files: one is read again only after it has changed."""

    @lru_cache(most)
    def content(path: Path, version: tuple[int, ...]) -> Content:
        return read(path)

    def current(path: Path) -> Content:
        """Return the content of a file. Raises FileNotFoundError where there is none."""
        status = path.stat()
        return content(path, (status.st_ino, status.st_size, status.st_mtime_ns))

    return current


class Repeated(Generic[Content]):
    """The result of a search, which is repeated when it is older than ``seconds``. Several threads may use it."""

    def __init__(self, search: Callable[[], Content], seconds: float) -> None:
        self._search = search
        self._seconds = seconds
        self._last: tuple[float, Content] | None = None
        self._lock = threading.Lock()

    def get(self) -> Content:
        """Return the result."""
        with self._lock:
            last = self._last
            if last is None or time.monotonic() - last[0] >= self._seconds:
                content = self._search()
                last = (time.monotonic(), content)
                self._last = last
            return last[1]

    def forget(self) -> None:
        """Search again at the next request."""
        self._last = None


class Folders:
    """The runs and caches below ``roots`` and the caches of these runs, each by an id for URLs; the search is repeated
    from time to time.

    Several threads may use it.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(os.path.abspath(root)) for root in roots]
        self._listed = Repeated(self._search, _SCAN_SECONDS)
        self._added: dict[str, Path] = {}
        self._manifest = remembered(_MOST_MANIFESTS, lambda path: Manifest.load(path.parent))
        self._ends = remembered(_MOST_ENDS, lambda log: read_ends(log.parent))
        self._named_caches = remembered(_MOST_LOGS, _named_caches)
        self._has_adapter_keys = remembered(_MOST_LOGS, _has_adapter_keys)
        self._readers = lru_cache(_MOST_LOGS)(RunReader)
        self._readers_lock = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Return the run folders by id, the one that was logged to last first."""
        runs = {**self._listed.get()[0], **self._added}
        return dict(sorted(runs.items(), key=lambda item: -_modified(item[1] / "log.jsonl")))

    def caches(self) -> dict[str, Path]:
        """Return the cache folders by id."""
        runs, caches = self._listed.get()
        of_runs = {folder_id(cache): cache for folder in runs.values() for cache in self._caches_of(folder)}
        return dict(sorted({**caches, **of_runs}.items()))

    def add_run(self, folder: Path) -> str:
        """Add a run, which may not have a log yet, and return its id."""
        self._added = {**self._added, folder_id(folder): folder}
        return folder_id(folder)

    def run(self, run_id: str) -> Path:
        """Return the folder of a run. Raises UserError for an unknown id."""
        folder = self._added.get(run_id) or self._listed.get()[0].get(run_id)
        if folder is None:
            raise UserError(f"there is no run {run_id}; see the list of runs")
        return folder

    def cache(self, cache_id: str) -> Path:
        """Return the folder of a cache. Raises UserError for an unknown id."""
        folder = self.caches().get(cache_id)
        if folder is None:
            raise UserError(f"there is no cache {cache_id}; see the list of caches")
        return folder

    def adapters(self) -> dict[str, tuple[str, Path]]:
        """Return label and path of LoRA, LoKr and LoHa files by id: exports of the runs, then files below the folders.

        Links are left out.
        """
        exports = (file for run in self.runs().values() for file in sorted(run.glob("exports/step-*/*.safetensors")))
        files = (file for folder in project_folders(self.roots) if not folder.is_model for file in folder.files)
        named: dict[str, tuple[str, Path]] = {}
        for file in (*exports, *(file for file in files if file.suffix == ".safetensors")):
            if len(named) == _MOST_ADAPTERS:
                break
            if self._is_adapter(file):
                named[folder_id(file)] = (self._label(file), file)
        return named

    def _is_adapter(self, file: Path) -> bool:
        links = [path.is_symlink() for path in (file, file.parent, file.parent.parent)]
        if any(links) or (file.parent / "model_index.json").exists():
            return False
        try:
            return self._has_adapter_keys(file)
        except OSError:  # removed meanwhile
            return False

    def _label(self, path: Path) -> str:
        """Return a path from the first served folder that it is below."""
        root = next((root for root in self.roots if path.is_relative_to(root)), path.parent)
        return str(path.relative_to(root))

    def evaluations(self) -> dict[str, tuple[str, Path]]:
        """Return label and folder of the images that `evaluate --against --save` wrote, by id."""
        of_runs = (file for run in self.runs().values() for file in sorted(run.glob(f"*/{EVALUATION}")))
        files = (file for folder in project_folders(self.roots) for file in folder.files if file.name == EVALUATION)
        folders = [file.parent for file in (*of_runs, *files) if not (file.is_symlink() or file.parent.is_symlink())]
        return {folder_id(folder): (self._label(folder), folder) for folder in folders[:_MOST_EVALUATIONS]}

    def evaluation(self, evaluation_id: str) -> tuple[str, Path]:
        """Return label and folder of an evaluation. Raises UserError for an unknown id."""
        known = self.evaluations().get(evaluation_id)
        if known is None:
            raise UserError(f"there is no evaluation {evaluation_id}; see the list of evaluations")
        return known

    def report(self, folder: Path, quick_bytes: int = QUICK_BYTES) -> RunReport:
        """Return what the log of a run says; only lines that were added since the last call are read.

        A preview where they are more than ``quick_bytes``, until they were read in the background.
        """
        if not (folder / "log.jsonl").exists():
            return RunReport(folder)
        return self._reader(folder).look(quick_bytes)

    def ends(self, folder: Path) -> RunReport:
        """Return what the ends of a run's log say, for lists; they are read again only after a change."""
        log = folder / "log.jsonl"
        return self._ends(log) if log.exists() else RunReport(folder)

    def fine_curves(self, folder: Path, steps: tuple[float, float], names: Sequence[str]) -> dict[str, Curve]:
        """Return finer curves of a run between two steps; none where its log was not read or the part is too long."""
        return self._reader(folder).window(*steps, names)

    def wait_for(self, folder: Path) -> None:
        """Wait until the log of a run is read that is being read in the background, if it is."""
        self._reader(folder).wait()

    def _reader(self, folder: Path) -> RunReader:
        with self._readers_lock:
            return self._readers(folder)

    def manifest(self, folder: Path) -> Manifest:
        """Return the manifest of a cache; it is parsed again only after it has changed. Raises UserError."""
        try:
            return self._manifest(folder / MANIFEST)
        except OSError:
            return Manifest.load(folder)  # raises an error with the remedy

    def _search(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Return the runs and the caches below the roots, by id."""
        folders = [item for root in self.roots for item in _search_below(root, _DEEPEST)]
        runs = {folder_id(folder): folder for folder, is_run in folders if is_run}
        return runs, {folder_id(folder): folder for folder, is_run in folders if not is_run}

    def _caches_of(self, run: Path) -> list[Path]:
        """Return the local caches of a run's training and evaluation sets that exist."""
        if os.path.islink(run / "config.toml"):
            return []
        try:
            named = self._named_caches(run / "config.toml")
        except OSError:  # missing, or a loop of links
            return []
        return [cache for cache in named if (cache / MANIFEST).is_file()]


def _named_caches(config: Path) -> list[Path]:
    try:
        loaded = load_config(config)
    except UserError:  # damaged, or its dataset TOML is gone
        return []
    caches = [dataset.cache_dir for dataset in (loaded.dataset, *loaded.eval_datasets.values())]
    return [cache for cache in caches if isinstance(cache, Path)]


def _has_adapter_keys(file: Path) -> bool:
    """Return whether the names of a safetensors file's tensors are those of an adapter; no tensor is read."""
    try:
        with open_regular(file) as opened:
            if int.from_bytes(opened.read(8), "little") > _LONGEST_HEADER:
                return False
            keys = read_header(opened).entries
    except (OSError, ValueError):
        return False
    return any(_ADAPTER_KEY.search(key) for key in keys)


def folder_id(folder: Path) -> str:
    """Return an id for URLs: the folder's name, and a hash of its whole path."""
    path = os.path.abspath(folder)
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in Path(path).name)
    return f"{name[:60]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def _search_below(folder: Path, levels: int) -> Iterator[tuple[Path, bool]]:
    """Yield the runs (True) and caches (False) in a folder and ``levels`` below it; no link is followed."""
    try:
        with os.scandir(folder) as entries:
            known = [entry for entry in islice(entries, _MOST_ENTRIES) if not entry.is_symlink()]
            content = {entry.name: entry.is_dir(follow_symlinks=False) for entry in known}
    except OSError:  # not readable, or removed meanwhile
        return
    if "log.jsonl" in content and "config.json" not in content:  # a denoiser's folder may keep the log of its training
        yield folder, True
    elif "manifest.json" in content and content.get("shards", False):
        yield folder, False
    elif levels and "model_index.json" not in content:
        for name in sorted(name for name, is_folder in content.items() if is_folder and name[0] != "."):
            if name not in _SKIPPED:
                yield from _search_below(folder / name, levels - 1)


@dataclass(frozen=True)
class ProjectFolder:
    """A folder that may have configs and images, with its files; or that of a model. Links are left out."""

    path: Path
    files: Sequence[Path]
    is_model: bool

    def tomls(self) -> Iterator[Path]:
        """Yield the TOML files that the pages can edit."""
        for path in self.files:
            if path.name.endswith(".toml") and not self.is_model and _size(path) <= LARGEST_TEXT:
                yield path


def project_folders(roots: Sequence[Path]) -> Iterator[ProjectFolder]:
    """Yield folders and those up to three levels below, without those of runs and caches."""
    for root in roots:
        yield from islice(_folders_below(root, _DEEPEST), _MOST_FOLDERS)


def _folders_below(path: Path, levels: int) -> Iterator[ProjectFolder]:
    try:
        with os.scandir(path) as entries:
            content = sorted(islice(entries, _MOST_ENTRIES), key=lambda entry: entry.name)
    except OSError:  # not readable, or removed meanwhile
        return
    names = {entry.name for entry in content}
    is_model = "model_index.json" in names
    if "log.jsonl" in names or {"manifest.json", "shards"} <= names:
        return
    yield ProjectFolder(path, [Path(entry.path) for entry in content if entry.is_file(follow_symlinks=False)], is_model)
    for entry in content:
        is_inner = levels and not is_model and entry.name[0] != "." and entry.name not in _SKIPPED
        if is_inner and entry.is_dir(follow_symlinks=False):
            yield from _folders_below(Path(entry.path), levels - 1)


def _size(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:  # removed meanwhile
        return math.inf


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
