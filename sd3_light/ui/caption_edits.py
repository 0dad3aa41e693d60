"""Changes of captions in their files, and how to take them back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.sources.caption_places import CaptionPlace
from sd3_light.sources.captions import Columns
from sd3_light.ui.caption_text import TableText, changed_text, require_caption, shown_text, with_lf
from sd3_light.ui.served_files import ServedFiles

_MOST_STEPS = 100  # that can be taken back
_MOST_EDITS = 500_000  # of all steps


@dataclass(frozen=True)
class CaptionEdit:
    """Another text for caption ``number`` of a sample, which was ``old``; of a sample without captions it is ""."""

    key: str
    place: CaptionPlace
    columns: Columns
    number: int
    old: str
    new: str


@dataclass(frozen=True)
class EditResult:
    """The edits that were written, and (key, reason) of the others."""

    done: Sequence[CaptionEdit]
    problems: Sequence[tuple[str, str]]


def edited_captions(place: CaptionPlace) -> tuple[str, ...]:
    """Return the captions of a place as they are edited; of a new file, an empty one."""
    if place.name or place.is_new:
        return place.captions or ("",)
    return tuple(shown_text(text.encode()) for text in place.captions)


def apply_edits(files: ServedFiles, edits: Iterable[CaptionEdit]) -> EditResult:
    """Write edits file by file. One that fails leaves its file as it was, except for other rows of the same table."""
    by_path: dict[Path, list[CaptionEdit]] = {}
    for edit in edits:
        by_path.setdefault(edit.place.path, []).append(edit)
    done: list[CaptionEdit] = []
    problems: list[tuple[str, str]] = []
    for path, group in by_path.items():
        try:
            write = _write_table if group[0].place.name else _write_text
            done += write(files, path, group, problems)
        except UserError as error:
            problems += [(edit.key, str(error)) for edit in group]
    return EditResult(done, problems)


def _write_text(
    files: ServedFiles, path: Path, edits: Sequence[CaptionEdit], problems: list[tuple[str, str]]
) -> list[CaptionEdit]:
    """Write the edit of a text file, which is one sample's, or of several with the same name and different suffixes."""
    edit = edits[-1]
    problems += [(other.key, "another edit of this file was written") for other in edits[:-1]]
    if edit.place.is_new:
        require_caption(edit.new)
        files.replace(path, None, _new_file(edit.new))
        return [edit]
    data = files.require_bytes(path)
    files.replace(path, data, changed_text(data, edit.old, edit.new))
    return [edit]


def _write_table(
    files: ServedFiles, path: Path, edits: Sequence[CaptionEdit], problems: list[tuple[str, str]]
) -> list[CaptionEdit]:
    if edits[0].place.problem:
        raise UserError(edits[0].place.problem)
    data = files.require_bytes(path)
    table = TableText(data, str(path), edits[0].columns)
    done: list[CaptionEdit] = []
    for edit in edits:
        try:
            table.change(edit.place.name, [(edit.number, edit.old, edit.new)])
            done.append(edit)
        except UserError as error:
            problems.append((edit.key, str(error)))
    if done:
        files.replace(path, data, table.data)
    return done


def _new_file(text: str) -> bytes:
    return (with_lf(text).rstrip("\n") + "\n").encode()


@dataclass
class Journal:
    """The steps that can be taken back, the last one first to go: a description and its edits."""

    steps: list[tuple[str, Sequence[CaptionEdit]]] = field(default_factory=list)

    def add(self, description: str, edits: Sequence[CaptionEdit]) -> None:
        """Add a step; old ones are forgotten."""
        if edits:
            self.steps = [*self.steps, (description, edits)][-_MOST_STEPS:]
            while len(self.steps) > 1 and sum(len(each) for _, each in self.steps) > _MOST_EDITS:
                del self.steps[0]

    @property
    def last(self) -> str:
        """What the last step did, "" if there is none."""
        return self.steps[-1][0] if self.steps else ""

    def undo(self, files: ServedFiles) -> EditResult:
        """Take the last step back. Captions that have changed since stay as they are, with a reason."""
        if not self.steps:
            raise UserError("there is nothing to undo")
        _, edits = self.steps.pop()
        created = [edit for edit in edits if edit.place.is_new]
        others = [replace(edit, old=edit.new, new=edit.old) for edit in edits if not edit.place.is_new]
        result = apply_edits(files, others)
        done = list(result.done)
        problems = list(result.problems)
        for edit in created:
            try:
                files.remove(edit.place.path, _new_file(edit.new))
                done.append(replace(edit, old=edit.new, new=""))
            except UserError as error:
                problems.append((edit.key, str(error)))
        return EditResult(done, problems)
