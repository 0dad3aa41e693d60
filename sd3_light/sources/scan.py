"""Scan one directory of a dataset: a stream of records and rejects."""

import sqlite3
from collections.abc import Callable, Iterable, Iterator

from sd3_light.config import DirectoryConfig
from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.sources.access import CONTAINERS, exists, is_folder, suffix_of
from sd3_light.sources.exclusions import Exclusions
from sd3_light.sources.listing import Media, media_of
from sd3_light.sources.parquet import scan_parquet
from sd3_light.sources.records import ScanItem
from sd3_light.sources.scan_context import ScanContext
from sd3_light.sources.tars import scan_tar
from sd3_light.sources.walk import scan_folder


def scan(
    directory: DirectoryConfig,
    index: int,
    media: Media | None = None,
    on_unmatched: Callable[[], None] = lambda: None,
    on_excluded: Callable[[], None] = lambda: None,
) -> Iterator[ScanItem]:
    """Yield all samples of a directory, always in the same order; unusable inputs as Rejected.

    ``media`` is the kind of samples, by default the one that the directory's keys name. ``index`` becomes part of every
    key and must distinguish directories of the same name (see `occurrences`). Samples that ``subsample_ratio`` leaves
    out, by a pure function of the key, are not yielded, nor are those that do not match ``where``: ``on_unmatched`` is
    called for each (its terms over the image's size are left to `matches_size`). Samples that ``exclude`` lists are not
    yielded either, and ``on_excluded`` is called. Raises UserError immediately, before the first sample, if a
    configured path does not exist.
    """
    for key in ("path", "mask_path", "default_mask_file", "rejected"):
        configured: DataLocation | None = getattr(directory, key)
        if configured is not None and not exists(configured):
            raise UserError(f"{key}: {configured} does not exist; correct it in the [[directory]] table")
    if directory.mask_path is not None and not is_folder(directory.mask_path):
        raise UserError(f"mask_path: {directory.mask_path} is not a folder; for one common mask set default_mask_file")
    if directory.rejected is not None and not is_folder(directory.rejected):
        raise UserError(f"rejected: {directory.rejected} is not a folder; give the folder of the rejected images")
    for folder in directory.references:
        if not is_folder(folder):
            raise UserError(f"references: {folder} is not a folder; give the folder of the reference images")
    path = directory.path
    if suffix_of(path) not in CONTAINERS and not is_folder(path):
        raise UserError(f"path: {path} is not a folder, .tar or .parquet file; give the folder that contains it")
    exclusions = Exclusions.of(directory.exclude, on_excluded)
    return _scan(ScanContext(directory, index, media or media_of(directory), on_unmatched, exclusions), path)


def _scan(context: ScanContext, path: DataLocation) -> Iterator[ScanItem]:
    try:
        name = str(path).rpartition("/")[2]
        if is_folder(path):
            yield from scan_folder(context, path)
        elif suffix_of(path) == ".tar":
            yield from scan_tar(context, str(path), name)
        else:
            yield from scan_parquet(context, str(path), name)
        if context.selection is not None:
            context.selection.require_columns(path)
    except sqlite3.OperationalError as error:
        hint = "free disk space in the temp folder, or set SQLITE_TMPDIR to another folder"
        raise UserError(f"{path}: cannot keep the rows of a table on disk: {error}; {hint}") from error


def occurrences(directories: Iterable[DirectoryConfig]) -> tuple[int, ...]:
    """Return for each directory how many of the same name come before it.

    As indices for `scan` they make keys unique. Unlike list positions they do not change when a directory of another
    name is added, so only its samples are new to the cache.
    """
    names = [directory.name for directory in directories]
    return tuple(names[:number].count(name) for number, name in enumerate(names))
