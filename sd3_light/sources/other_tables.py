"""Caption tables of any file name: the only one in a folder with file names and captions is read.

It comes after all other sources of captions, so a file that is in a folder for another purpose changes nothing.
"""

from collections.abc import Iterable, Sequence

from sd3_light.sources.access import suffix_of
from sd3_light.sources.listing import is_other_table
from sd3_light.sources.parquet import HasImages
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.rows import require_table
from sd3_light.sources.scan_context import ScanContext
from sd3_light.sources.tables import CaptionTable, ClaimedRows

_MOST_OPENED = 16
"""Files per folder that are opened to look for a table: thousands of images may have a file each."""
_NAME_ONE = "name the right one metadata.csv or metadata.jsonl"
_OTHER_COLUMNS = " (image_column and caption_column select other columns)"


class OtherTable:
    """The table of a folder, if it has one, and why other files are not read. ``base`` is the folder's name."""

    def __init__(self, base: str, file: str = "", table: CaptionTable | None = None, notes: Sequence[str] = ()) -> None:
        self.base = base
        self.file = file
        self.is_needed = False
        self._table = table
        self._notes = tuple(notes)

    def claim(self, name: str) -> ClaimedRows | None:
        """Mark the rows of a file as used and return them; None if there are none."""
        rows = self._table and self._table.claim(name.removeprefix(self.base))
        return ClaimedRows(lambda: self._captions(rows), rows.columns) if rows else None

    def _captions(self, rows: ClaimedRows) -> Sequence[str]:
        self.is_needed = True
        return rows.captions()

    def why_not(self) -> tuple[str, ...]:
        """Return what to say about an image that has no caption."""
        if self._table is None:
            return self._notes
        return (f"{self.base}{self.file} does not list it (it starts with {self._table.first_name()!r})", *self._notes)

    @property
    def needed(self) -> CaptionTable | None:
        """The table, if an image has its caption from it."""
        return self._table if self.is_needed else None

    def close(self) -> None:
        """Delete the temporary database."""
        if self._table is not None:
            self._table.close()


def choose_table(context: ScanContext, path: str, base: str, names: Iterable[str]) -> OtherTable:
    """Return the table of the folder ``path`` among the names of its files."""
    notes = []
    tables = []
    candidates = list(filter(is_other_table, names))
    parquet = [name for name in candidates if suffix_of(name) == ".parquet"]
    others = [name for name in candidates if suffix_of(name) != ".parquet"]
    if len(others) > _MOST_OPENED:
        notes.append(f"{len(others):,} tables are in {base or 'its folder'}, and none is read: {_NAME_ONE}")
    files = [name for kind in (others, parquet) if len(kind) <= _MOST_OPENED for name in kind]
    for file in sorted(files):
        try:
            require_table(f"{path}/{file}", context.columns)
            tables.append(file)
        except HasImages:
            continue
        except Reject as reject:
            notes.append(f"{base}{file} is not read: {reject.detail}{_OTHER_COLUMNS}")
    if len(tables) > 1:
        listed = " and ".join(base + file for file in tables)
        return OtherTable(
            base,
            notes=[f"{listed} all have file names and captions, so none is read: keep one, or {_NAME_ONE}", *notes],
        )
    if not tables:
        return OtherTable(base, notes=notes)
    try:
        table = CaptionTable(f"{path}/{tables[0]}", context.columns, context.selection)
    except Reject as reject:
        return OtherTable(base, notes=[f"{base}{tables[0]} is not read: {reject.detail}", *notes])
    return OtherTable(base, tables[0], table, notes)
