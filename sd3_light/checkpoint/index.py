"""The index of a checkpoint: its tensors, the file of each of their ranges, and the hash of its bytes."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import FailFast, Field, TypeAdapter, ValidationError

from sd3_light.config.faults import UserError
from sd3_light.inputs import INDEX_BYTES, is_inner_path, read_json_file

FORMAT = 2
INDEX = "index.json"


Count = Annotated[int, Field(strict=True, ge=0)]


class Range(NamedTuple):
    """Elements ``start`` to ``start + length`` of a flat tensor: their file and the hash of their bytes."""

    start: Count
    length: Count
    file: str
    sha256: str


@dataclass(frozen=True)
class IndexEntry:
    """One tensor: its shape, its dtype in safetensors spelling, and its ranges in order."""

    shape: Annotated[tuple[Count, ...], FailFast()]
    dtype: str
    ranges: Annotated[tuple[Range, ...], FailFast()]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def coverage_error(self) -> str | None:
        """Return which elements are missing or duplicated, or None if every one is present exactly once."""
        position = 0
        for part in self.ranges:
            if part.start > position:
                return f"elements {position} to {part.start - 1} are missing"
            if part.start < position:
                return f"element {part.start} is stored twice"
            position += part.length
        if position < self.count:
            return f"elements {position} to {self.count - 1} are missing"
        return None if position == self.count else f"it has {self.count} elements but {position} are stored"


_ENTRY = TypeAdapter(IndexEntry)


def _entry(name: str, fields: Any) -> IndexEntry:
    """Return the entry of a tensor. Raises ValueError with one line that names the first wrong field."""
    try:
        return _ENTRY.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{name}: {field}: {first['msg']}") from None


@dataclass(frozen=True)
class Index:
    """The content of `index.json`: free-form facts, the tensors by ``KIND/NAME``, and each file's size in bytes."""

    facts: dict[str, Any]
    tensors: dict[str, IndexEntry]
    files: dict[str, int]

    def to_json(self) -> str:
        """Return the file's text, with a digest of its content."""
        tensors = {
            name: {"shape": entry.shape, "dtype": entry.dtype, "ranges": entry.ranges}
            for name, entry in sorted(self.tensors.items())
        }
        facts = json.loads(json.dumps(self.facts))  # as they are read back: keys become strings
        content = {"format": FORMAT, "facts": facts, "files": self.files, "tensors": tensors}
        return json.dumps({**content, "sha256": _digest(content)}, separators=(",", ":"))


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint and verify its digest; raises a `UserError` with a remedy."""
    try:
        content = read_json_file(folder / INDEX, INDEX_BYTES)
    except (OSError, ValueError) as error:  # missing, not UTF-8, not JSON
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UserError(
            f"{folder} is not a complete checkpoint ({INDEX}: {reason}); choose another `step-*` folder"
        ) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise UserError(
            f"checkpoint {folder} has format {version}, this version reads {FORMAT}; continue with the version that "
            "wrote it, or start a new run from its export"
        )
    if content.pop("sha256", None) != _digest(content):
        raise damaged(folder, INDEX, "wrong hash")
    try:
        _require_files(content["files"])
        tensors = {name: _entry(name, fields) for name, fields in content["tensors"].items()}
        return Index(dict(content["facts"]), tensors, content["files"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder, INDEX, f"not an index: {error!r:.160}") from error


def merge_entries(parts: Iterable[Mapping[str, Any]]) -> dict[str, IndexEntry]:
    """Merge the ranks' notes of their parts of the tensors: ``KIND/NAME`` to shape, dtype and ranges."""
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    ranges: dict[str, list[Range]] = {}
    for tensors in parts:
        for name, fields in tensors.items():
            part = _entry(name, fields)
            shape, dtype = kinds.setdefault(name, (part.shape, part.dtype))
            if (shape, dtype) != (part.shape, part.dtype):
                raise UserError(
                    f"the ranks disagree on {name}: {dtype} {list(shape)} "
                    f"and {part.dtype} {list(part.shape)}; start all processes with the same config and version"
                )
            ranges.setdefault(name, []).extend(part.ranges)
    return {name: IndexEntry(*kind, tuple(sorted(ranges[name]))) for name, kind in kinds.items()}


def why_incomplete(folder: Path) -> str | None:
    """Return why the folder is not a complete checkpoint, by its index and its files' sizes; None if it is complete.

    A checkpoint of another format counts as complete: opening it reports the format.
    """
    try:
        content = read_json_file(folder / INDEX, INDEX_BYTES)
    except (OSError, ValueError):
        return f"{INDEX} cannot be read"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None if isinstance(content, dict) and "format" in content else f"{INDEX} is not an index"
    try:
        _require_files(content.get("files"))
    except ValueError as error:
        return f"{INDEX}: {error}"
    return wrong_size(folder, content["files"])


def wrong_size(folder: Path, files: Mapping[str, int]) -> str | None:
    """Return which file is missing or has the wrong size, or None."""
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (actual := path.stat().st_size) != size:
            return f"{name} has {actual} of {size} bytes"
    return None


def damaged(folder: Path, file: str, reason: object) -> UserError:
    """Return the error for a damaged checkpoint."""
    return UserError(f"checkpoint {folder} is damaged ({file}: {reason}); resume from an earlier one")


def _require_files(files: Any) -> None:
    """Raise a ValueError unless ``files`` is a table of sizes by names of files inside the checkpoint."""
    if not isinstance(files, dict) or not all(map(is_inner_path, files)) or not all(map(_is_count, files.values())):
        raise ValueError("its files are not a table of sizes")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
