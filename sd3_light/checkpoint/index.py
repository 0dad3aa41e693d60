"""The index of a checkpoint: which tensors there are, where every range of them lies, and what their bytes hash to."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sd3_light.config.faults import UserError

FORMAT = 2
INDEX = "index.json"


class Range(NamedTuple):
    """Elements ``start`` to ``start + length`` of a flat tensor: the file that holds them, the hash of their bytes."""

    start: int
    length: int
    file: str
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One tensor: its shape, its dtype as safetensors spells it, and its ranges in order."""

    shape: tuple[int, ...]
    dtype: str
    ranges: tuple[Range, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def fault(self) -> str | None:
        """Which elements are missing or doubled; None where every one is there exactly once."""
        position = 0
        for held in self.ranges:
            if held.start > position:
                return f"elements {position} to {held.start - 1} are missing"
            if held.start < position:
                return f"element {held.start} is there twice"
            position += held.length
        if position < self.count:
            return f"elements {position} to {self.count - 1} are missing"
        return None if position == self.count else f"it has {self.count} elements and {position} are there"


@dataclass(frozen=True)
class Index:
    """What `index.json` says: free facts, the tensors by ``KIND/NAME``, and the size of each file in bytes."""

    facts: dict[str, Any]
    tensors: dict[str, Entry]
    files: dict[str, int]

    def to_json(self) -> str:
        """The file's text, with a digest of its content."""
        tensors = {
            name: {"shape": entry.shape, "dtype": entry.dtype, "ranges": entry.ranges}
            for name, entry in sorted(self.tensors.items())
        }
        facts = json.loads(json.dumps(self.facts))  # as a reader will see them: keys are words
        content = {"format": FORMAT, "facts": facts, "files": self.files, "tensors": tensors}
        return json.dumps({**content, "sha256": _digest(content)}, separators=(",", ":"))


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, its digest checked; a fault is a `UserError` that says what to do."""
    try:
        found = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError) as error:  # not there, not UTF-8, not JSON
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UserError(
            f"{folder} is not a whole checkpoint ({INDEX}: {reason}); name a folder `step-*` that is, or an earlier one"
        ) from error
    number = found.get("format") if isinstance(found, dict) else None
    if number == 1:
        raise UserError(
            f"checkpoint {folder} is of an older version (format 1, this one reads {FORMAT}); "
            "resume from another, or go on with the version that wrote it"
        )
    if number != FORMAT:
        raise UserError(f"checkpoint {folder} has format {number}, this version reads {FORMAT}; resume from another")
    if found.pop("sha256", None) != _digest(found):
        raise damaged(folder, INDEX, "wrong hash")
    return Index(found["facts"], {name: _entry(said) for name, said in found["tensors"].items()}, found["files"])


def entries(said: Iterable[Mapping[str, Any]]) -> dict[str, Entry]:
    """Join what several ranks say of their parts of the tensors: ``KIND/NAME`` to shape, dtype and ranges."""
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    ranges: dict[str, list[Range]] = {}
    for tensors in said:
        for name, one in tensors.items():
            part = _entry(one)
            shape, dtype = kinds.setdefault(name, (part.shape, part.dtype))
            if (shape, dtype) != (part.shape, part.dtype):
                raise UserError(
                    f"the ranks do not agree on {name}: {dtype} {list(shape)} "
                    f"and {part.dtype} {list(part.shape)}; start all processes with the same config and version"
                )
            ranges.setdefault(name, []).extend(part.ranges)
    return {name: Entry(*kind, tuple(sorted(ranges[name]))) for name, kind in kinds.items()}


def incomplete(folder: Path) -> str | None:
    """Why the folder is no whole checkpoint, judged by its index and by the sizes of its files; None if it is one.

    A checkpoint of another format is not judged: whoever opens it is told so.
    """
    try:
        found = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError):
        return f"{INDEX} cannot be read"
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None if isinstance(found, dict) and "format" in found else f"{INDEX} is no index"
    return wrong_size(folder, found.get("files", {}))


def wrong_size(folder: Path, files: Mapping[str, int]) -> str | None:
    """The first file that is not there in its size; None where all are."""
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    return None


def damaged(folder: Path, file: str, why: object) -> UserError:
    """The fault of a checkpoint that was whole once."""
    return UserError(f"checkpoint {folder} is damaged ({file}: {why}); resume from an earlier one")


def _entry(said: Mapping[str, Any]) -> Entry:
    return Entry(tuple(said["shape"]), said["dtype"], tuple(Range(*one) for one in said["ranges"]))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
