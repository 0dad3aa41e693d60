"""Where the captions of an image in a folder are: in its own text file, or in a table; by the rules of a scan."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from sd3_light.config import DirectoryConfig
from sd3_light.config.base import is_url
from sd3_light.config.faults import UserError
from sd3_light.sources.captions import Columns
from sd3_light.sources.listing import CAPTION_SUFFIXES, TABLE_FILES, FolderNames, is_folder, visible
from sd3_light.sources.other_tables import OtherTable, choose_table
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes, Location
from sd3_light.sources.scan_context import ScanContext
from sd3_light.sources.tables import CaptionTable, ClaimedRows, normal_name
from sd3_light.sources.walk import caption_files, read_caption

EDITABLE = (".csv", ".jsonl")
"""Suffixes of tables whose rows can be changed in place."""


@dataclass(frozen=True)
class CaptionPlace:
    """The file with an image's captions; a new text file if there is none.

    ``name`` is the image's in a table, "" for a text file. ``captions`` are as written.
    """

    path: Path
    captions: tuple[str, ...]
    name: str = ""

    @property
    def is_new(self) -> bool:
        """Whether the file does not exist yet."""
        return not self.captions

    @property
    def problem(self) -> str:
        """Why captions there cannot be changed in place; "" if they can."""
        if not self.name or self.path.suffix.lower() in EDITABLE:
            return ""
        return (
            f"the caption is in {self.path.name}, whose rows cannot be changed in place; write text files, "
            "metadata.csv or metadata.jsonl instead"
        )


class _Tables(NamedTuple):
    """The tables of a folder: those of fixed names in order of precedence, and the one of another name."""

    base: str
    fixed: Sequence[tuple[str, CaptionTable]]
    other: OtherTable


class CaptionPlaces:
    """Finds the captions of images below a directory, which should be asked for folder by folder."""

    def __init__(self, directory: DirectoryConfig, index: int) -> None:
        self._root = str(directory.path)
        self._stack = ExitStack()
        self._context = ScanContext(directory, index)
        self._prefix = f"{directory.name}#{index}/"
        self._tables: dict[str, _Tables] = {}
        self._files: tuple[str, FolderNames] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def columns(self) -> Columns:
        """The columns of captions in tables."""
        return self._context.columns

    def find(self, key: str, image: Location) -> CaptionPlace:
        """Return where the captions of a sample are. Raises UserError if they cannot be changed at all."""
        if is_url(self._root):
            raise UserError("the images are at a URL, which this page does not change")
        name = key.removeprefix(self._prefix)
        if not isinstance(image, FileBytes) or os.path.join(self._root, name) != image.path:
            container = next((part for part in name.split("/") if part.lower().endswith((".tar", ".parquet"))), "")
            kind = "Parquet files" if container.lower().endswith(".parquet") else "tar files"
            raise UserError(
                f"the caption is in {container or self._root}; {kind} cannot be changed in place: unpack it"
            )
        folders = [*name.split("/")[:-1]]
        bases = ["/".join(folders[:depth]) + "/" if depth else "" for depth in range(len(folders), -1, -1)]
        try:
            return self._find(name, bases)
        except OSError as error:
            raise UserError(f"{self._root} cannot be listed: {error.strerror}") from error
        except Reject as reject:
            raise UserError(f"the caption cannot be read: {reject.detail or reject.reason}") from reject

    def _find(self, name: str, bases: Sequence[str]) -> CaptionPlace:
        tables = [self._tables_of(base) for base in bases]
        for base, fixed, _ in tables:
            for file, table in fixed:
                if rows := table.claim(name.removeprefix(base)):
                    return self._listed(base, file, name, rows)
        folder = self._root if not bases[0] else f"{self._root}/{bases[0].rstrip('/')}"
        stem = os.path.splitext(name.rpartition("/")[2])[0]
        for file in caption_files(folder, stem, self._names(bases[0], folder)):
            if (text := read_caption(f"{folder}/{file}")) is not None:
                return CaptionPlace(Path(folder, file), (text,))
        for base, _, other in tables:
            if rows := other.claim(name):
                return self._listed(base, other.file, name, rows)
        return CaptionPlace(Path(folder, stem + CAPTION_SUFFIXES[0]), ())

    def _listed(self, base: str, file: str, name: str, rows: ClaimedRows) -> CaptionPlace:
        listed = normal_name(name.removeprefix(base), "")
        return CaptionPlace(Path(self._root, base, file), tuple(rows.captions()), listed)

    def _tables_of(self, base: str) -> _Tables:
        if base not in self._tables:
            folder = os.path.join(self._root, base).rstrip("/")
            names = self._names(base, folder)
            fixed = [(file, table) for file in TABLE_FILES if file in names and (table := self._open(folder, file))]
            other = self._stack.enter_context(closing(choose_table(self._context, folder, base, names)))
            self._tables[base] = _Tables(base, fixed, other)
        return self._tables[base]

    def _open(self, folder: str, file: str) -> CaptionTable | None:
        try:
            table = CaptionTable(f"{folder}/{file}", self._context.columns)
        except Reject:  # a scan lists it among the rejects
            return None
        return self._stack.enter_context(closing(table))

    def _names(self, base: str, folder: str) -> FolderNames:
        """Return the files of a folder; those of the last one are kept."""
        if self._files is None or self._files[0] != base:
            entries = visible(folder, self._context.excluded)
            self._files = base, FolderNames({entry.name: "" for entry in entries if not is_folder(entry)})
        return self._files[1]
