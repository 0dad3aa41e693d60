"""Checkpoints on disk: safetensors files and a JSON index, written atomically (laws 5 and 8).

    checkpoints/step-00000042/   index.json · rank-00000.safetensors ...

A file contains flat ranges named ``KIND/NAME@START``; the index has every tensor's shape, dtype and ranges, and each
range's hash. Ranges describe replicas, rows of sharded weights and optimizer fragments alike: a checkpoint belongs to
the run, not to the layout that wrote it. Each writing rank calls `write_part`, then one of them `commit`.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from sd3_light.checkpoint.index import INDEX, Index, Range, merge_entries, why_incomplete, wrong_size
from sd3_light.checkpoint.reading import tensor_bytes
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece
from sd3_light.files import swap_folder
from sd3_light.inputs import INDEX_BYTES, read_json_file
from sd3_light.tensor_file import dtype_name, header_bytes

RANGE_ELEMENTS = 1 << 24  # maximum length of a range; readers hold one at a time
_NAME = re.compile(r"step-(\d{8,})")
_STEP = re.compile(r"step-(\d+)")
_ABANDONED = "abandoned-"


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:08d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Return the folder to which all ranks write their parts before the checkpoint gets its name."""
    return folder / f".{checkpoint_name(step)}.tmp"


# --- writing -----------------------------------------------------------------------------------


def reset_folder(temporary: Path) -> None:
    """Create an empty folder for the parts, removing leftovers. One rank calls it before any rank writes."""
    with suppress(FileNotFoundError):
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True, exist_ok=True)


def write_part(temporary: Path, rank: int, pieces: Iterable[TensorPiece]) -> int:
    """Write this rank's pieces and a note for `commit`, both flushed to disk; return the file's size in bytes.

    Ranks may call it in parallel.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    # sorted by element size, so that all ranges are aligned
    written = sorted((piece for piece in pieces if piece.writes), key=lambda piece: -piece.values.element_size())
    parts = [part for piece in written for part in _split(piece)]
    file = temporary / _part_name(rank)
    hashes = _write_ranges(file, [(f"{part.name}@{part.start}", part.values) for part in parts])
    tensors: dict[str, dict[str, Any]] = {}
    for part, digest in zip(parts, hashes, strict=True):
        dtype = dtype_name(part.values.dtype)
        entry = tensors.setdefault(part.name, {"shape": part.shape, "dtype": dtype, "ranges": []})
        entry["ranges"].append(Range(part.start, len(part.values), file.name, digest))
    size = file.stat().st_size
    _write_text(file.with_suffix(".json"), json.dumps({"bytes": size, "tensors": tensors}))
    return size


def _write_ranges(path: Path, ranges: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Write 1-D tensors from any device, flush them to disk, and return their sha256 hashes. Errors name the file.

    The safetensors library can read the file. Here each range is hashed and written in one pass from its own memory,
    without the copies that some versions of the library make.
    """
    hashes = []
    try:
        with open(path, "wb") as file:
            file.write(header_bytes([(key, dtype_name(values.dtype), [len(values)]) for key, values in ranges]))
            for _, values in ranges:
                data = tensor_bytes(values.detach().cpu().contiguous())
                hashes.append(hashlib.sha256(data).hexdigest())
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not set the file name
        raise
    return hashes


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _split(piece: TensorPiece) -> Iterator[TensorPiece]:
    """Yield ranges of bounded length. An empty piece is written only for an empty tensor, so that it has a range."""
    if not len(piece.values):
        if 0 in piece.shape:
            yield piece
        return
    for start in range(0, len(piece.values), RANGE_ELEMENTS):
        values = piece.values[start : start + RANGE_ELEMENTS]
        yield TensorPiece(piece.name, values, piece.start + start, piece.shape)


def commit(folder: Path, step: int, ranks: Sequence[int], facts: Mapping[str, Any]) -> Path:
    """Combine the ranks' parts: check that they cover every tensor exactly once, write the index, rename.

    One rank calls it after all have written. A checkpoint of the same step is replaced, or unchanged if that fails.
    """
    temporary = temporary_folder(folder, step)
    notes = {_part_name(rank): _read_note(temporary, rank) for rank in ranks}
    tensors = merge_entries(note["tensors"] for note in notes.values())
    index = Index(dict(facts), tensors, {file: note["bytes"] for file, note in notes.items()})
    if problem := wrong_size(temporary, index.files):
        raise UserError(f"{temporary}: {problem}; check the disk and the network")
    for name, entry in index.tensors.items():
        if problem := entry.coverage_error():
            raise UserError(f"the ranks' parts do not cover {name} exactly once: {problem}")
    _write_text(temporary / INDEX, index.to_json())
    for file in notes:
        (temporary / file).with_suffix(".json").unlink()
    _sync_folder(temporary)
    return _replace(temporary, folder / checkpoint_name(step))


def _read_note(temporary: Path, rank: int) -> dict[str, Any]:
    path = (temporary / _part_name(rank)).with_suffix(".json")
    try:
        note: dict[str, Any] = read_json_file(path, INDEX_BYTES)
    except FileNotFoundError as error:
        raise UserError(
            f"the part of rank {rank} is not in {temporary}; use a folder that all machines share"
        ) from error
    return note


def _replace(temporary: Path, final: Path) -> Path:
    """Rename into place; an existing checkpoint of the same step is renamed aside, and back if that fails."""
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        remove(aside)
    swap_folder(temporary, final, aside)
    _sync_folder(final.parent)
    with suppress(OSError):  # the new checkpoint is in place; the next run cleans this up
        remove(aside)
    return final


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk, if its file system supports that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


# --- the folder of checkpoints -----------------------------------------------------------------


def _steps(folder: Path) -> list[Path]:
    steps = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(steps)]


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a complete checkpoint; False where the disk cannot tell."""
    try:
        return newest_checkpoint(folder) is not None
    except OSError:
        return False


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, by its index and file sizes; hashes are not checked."""
    return next((path for path in reversed(_steps(folder)) if why_incomplete(path) is None), None)


def incomplete_checkpoints(folder: Path) -> dict[Path, str]:
    """Return folders named like checkpoints that are not complete, oldest first, and why. No run resumes from them."""
    return {path: reason for path in _steps(folder) if (reason := why_incomplete(path)) is not None}


def keep_newest(folder: Path, count: int, written: Path | None = None) -> list[Path]:
    """Delete all but the newest ``count`` complete checkpoints and the one just ``written``; 0 keeps all.

    Returns the deleted ones. A kill never leaves an incomplete checkpoint under a valid name. Abandoned checkpoints
    are deleted too once ``count`` newer ones exist; damaged ones never are.
    """
    complete = [path for path in _steps(folder) if why_incomplete(path) is None]
    old = [path for path in complete[:-count] if path != written] if count else []
    if count and len(complete) >= count:
        passed = [path for path in abandoned_checkpoints(folder) if step_of(path) <= step_of(complete[-count])]
        old += [path for path in passed if why_incomplete(path) is None]
    for path in old:
        remove(path)
    return old


def mark_abandoned_after(step: int, folder: Path, chosen: Path | None = None) -> list[str]:
    """Rename the folders `step-N` later than ``step``, except ``chosen``, to `abandoned-step-N`; return the new names.

    A run that resumes from an earlier step abandons later checkpoints: none of them may count as the newest. They are
    not deleted here; see `keep_newest`. If ``chosen`` itself is an abandoned one, the other of the same step is
    renamed as well.
    """
    renamed: list[str] = []
    for path in _steps(folder):
        number = step_of(path)
        if number > step or (number == step and chosen is not None and path.resolve() != chosen.resolve()):
            aside = path.with_name(f"{_ABANDONED}{path.name}")
            while aside.exists():
                aside = aside.with_name(f"{aside.name}.again")
            os.replace(path, aside)
            renamed.append(aside.name)
    return renamed


def abandoned_checkpoints(folder: Path) -> list[Path]:
    """Return the folders that `mark_abandoned_after` renamed."""
    return sorted(folder.glob(f"{_ABANDONED}step-*"))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, also of an abandoned one."""
    match = _STEP.search(path.name)
    if match is None:
        raise UserError(f"{path} is not named like a checkpoint; choose one of `checkpoints/step-*`")
    return int(match[1])


def restore_replaced(folder: Path) -> list[str]:
    """Restore what a killed run renamed aside for a replacement that is missing; return the hidden names."""
    restored = []
    for path in sorted(folder.glob(".step-*.old")):
        final = path.with_name(path.name.split(".")[1])
        if not final.exists():
            os.replace(path, final)
            restored.append(path.name)
    return restored


def clean_leftovers(folder: Path) -> list[str]:
    """Delete parts of unfinished checkpoints, exports and images of a killed run; return their names."""
    leftovers = []
    for path in sorted([*folder.glob(".step-*.*"), *folder.glob(f".{_ABANDONED}step-*.gone")]):
        if path.suffix in (".part", ".tmp") and path.is_file():  # an unfinished image
            path.unlink()
        elif path.suffix in (".old", ".tmp", ".gone"):
            remove(path)
        else:
            continue
        leftovers.append(path.name)
    return leftovers


def remove(path: Path) -> None:
    """Rename a folder to a hidden name, then delete it: after a kill in between it never counts as a checkpoint."""
    gone = path.with_name(f".{path.name.removeprefix('.')}.gone") if path.suffix != ".gone" else path
    with suppress(FileNotFoundError):
        if gone != path:
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(path, gone)
        shutil.rmtree(gone)
