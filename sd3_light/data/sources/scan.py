"""The front door: one directory of a data set as a stream of records and rejects."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from sd3_light.config import DirectoryConfig
from sd3_light.config.faults import UserError
from sd3_light.data.sources.name_store import NameStore
from sd3_light.data.sources.parquet import scan_parquet
from sd3_light.data.sources.records import ScanItem
from sd3_light.data.sources.scope import Scope
from sd3_light.data.sources.tars import scan_tar
from sd3_light.data.sources.walk import scan_folder


def scan(directory: DirectoryConfig, index: int) -> Iterator[ScanItem]:
    """All samples of a directory, lazily, always in the same order; what cannot be used comes as Rejected.

    ``index`` becomes part of every key and must tell directories of the same name apart (see `occurrences`). What
    ``subsample_ratio`` leaves out, a pure function of the key, does not come at all. Raises UserError at once, not at
    the first sample, when a path that the directory names is not there.
    """
    for key in ("path", "mask_path", "default_mask_file"):
        place: Path | None = getattr(directory, key)
        if place is not None and not place.exists():
            raise UserError(f"{key}: {place} does not exist; correct the [[directory]] that names it")
    if directory.mask_path is not None and not directory.mask_path.is_dir():
        raise UserError(f"mask_path: {directory.mask_path} is not a folder; one mask for all is `default_mask_file`")
    path = directory.path
    if not path.is_dir() and path.suffix.lower() not in (".tar", ".parquet"):
        raise UserError(f"path: {path} is neither a folder nor a .tar or .parquet file; name the folder that holds it")
    return _scan(directory, index)


def _scan(directory: DirectoryConfig, index: int) -> Iterator[ScanItem]:
    path = directory.path
    try:
        with closing(NameStore()) as name_store:
            scope = Scope(directory, index, name_store)
            if path.is_dir():
                yield from scan_folder(scope, path)
            elif path.suffix.lower() == ".tar":
                yield from scan_tar(scope, str(path), path.name)
            else:
                yield from scan_parquet(scope, str(path), path.name, may_lack_images=False)
    except sqlite3.OperationalError as fault:
        hint = "free some space in the temporary folder, or name another one in SQLITE_TMPDIR"
        raise UserError(f"{path}: the names that a scan keeps on disk: {fault}; {hint}") from fault


def scan_all(directories: Iterable[DirectoryConfig]) -> Iterator[ScanItem]:
    """All samples of a data set, directory by directory."""
    directories = tuple(directories)
    scans = [scan(directory, index) for directory, index in zip(directories, occurrences(directories), strict=True)]
    for found in scans:
        yield from found


def occurrences(directories: Iterable[DirectoryConfig]) -> tuple[int, ...]:
    """For each directory, how many of the same name come before it.

    As indices for `scan` these make keys unique, and unlike places in the list they do not change when a directory of
    another name is added, so its samples alone are new to the cache.
    """
    met: Counter[str] = Counter()
    numbers = []
    for directory in directories:
        numbers.append(met[directory.path.name])
        met[directory.path.name] += 1
    return tuple(numbers)
