"""Checkpoints on disk: safetensors and a JSON index, whole or not there (laws 5 and 8).

    checkpoints/step-00000042/   index.json · rank-00000.safetensors ...

A file holds flat ranges named ``KIND/NAME@START``; the index gives every tensor's shape, dtype and ranges, and the hash
of each range. Ranges fit replicas, rows of sharded weights and cut-up optimizer fragments alike, so a checkpoint
belongs to the run and not to the layout that wrote it. Each writing rank calls `write_part`, then one of them `commit`.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from sd3_light.checkpoint.index import INDEX, Index, Range, entries, incomplete, wrong_size
from sd3_light.checkpoint.ranges import DTYPE_NAMES, write_ranges
from sd3_light.checkpoint.reading import Checkpoint, open_checkpoint
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece
from sd3_light.files import swap_folder

__all__ = [
    "INDEX",
    "Checkpoint",
    "abandoned",
    "checkpoint_name",
    "commit",
    "half_written",
    "keep_newest",
    "newest_checkpoint",
    "open_checkpoint",
    "read_checkpoint",
    "remove",
    "start_fresh",
    "sweep",
    "temporary_folder",
    "write_checkpoint",
    "write_part",
]

RANGE_ELEMENTS = 1 << 24  # no longer range is written: readers hold one at a time
_NAME = re.compile(r"step-(\d{8,})")
_STEP = re.compile(r"step-(\d+)")
_ABANDONED = "abandoned-"


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:08d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Where all ranks write the parts of a checkpoint before it has its name."""
    return folder / f".{checkpoint_name(step)}.tmp"


# --- writing -----------------------------------------------------------------------------------


def start_fresh(temporary: Path) -> None:
    """An empty folder for the parts; what an earlier attempt left goes. Before any rank writes, by one of them."""
    with suppress(FileNotFoundError):
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True, exist_ok=True)


def write_part(temporary: Path, rank: int, pieces: Iterable[TensorPiece]) -> int:
    """Write the pieces that this rank writes, and a note of them for `commit`; the file's size in bytes.

    Both are on the disk when it returns. Ranks may do so at once.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    wanted = sorted((p for p in pieces if p.writes), key=lambda piece: -piece.values.element_size())  # aligned so
    cut = [part for piece in wanted for part in _cut(piece)]
    file = temporary / _part_name(rank)
    hashes = write_ranges(file, [(f"{part.name}@{part.start}", part.values) for part in cut])
    tensors: dict[str, dict[str, Any]] = {}
    for part, digest in zip(cut, hashes, strict=True):
        dtype = DTYPE_NAMES[part.values.dtype]
        entry = tensors.setdefault(part.name, {"shape": part.shape, "dtype": dtype, "ranges": []})
        entry["ranges"].append(Range(part.start, len(part.values), file.name, digest))
    size = file.stat().st_size
    _write_text(file.with_suffix(".json"), json.dumps({"bytes": size, "tensors": tensors}))
    return size


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _cut(piece: TensorPiece) -> Iterator[TensorPiece]:
    """Ranges of bounded length; of an empty piece only that of an empty tensor, which must be somewhere."""
    if not len(piece.values):
        if 0 in piece.shape:
            yield piece
        return
    for at in range(0, len(piece.values), RANGE_ELEMENTS):
        yield TensorPiece(piece.name, piece.values[at : at + RANGE_ELEMENTS], piece.start + at, piece.shape)


def commit(folder: Path, step: int, ranks: Sequence[int], facts: Mapping[str, Any]) -> Path:
    """Make the ranks' parts one checkpoint: check that they cover every tensor exactly once, write the index, rename.

    By one rank, after all have written. A checkpoint of the same step is replaced, or as it was if that fails.
    """
    temporary = temporary_folder(folder, step)
    notes = {_part_name(rank): _read_note(temporary, rank) for rank in ranks}
    index = Index(dict(facts), entries(n["tensors"] for n in notes.values()), {f: n["bytes"] for f, n in notes.items()})
    if fault := wrong_size(temporary, index.files):
        raise UserError(f"{temporary}: {fault}; the disk or the network lost it")
    for name, entry in index.tensors.items():
        if fault := entry.fault():
            raise UserError(f"the ranks' parts do not cover {name} exactly once: {fault}")
    _write_text(temporary / INDEX, index.to_json())
    for file in notes:
        (temporary / file).with_suffix(".json").unlink()
    _sync_folder(temporary)
    return _put(temporary, folder / checkpoint_name(step))


def _read_note(temporary: Path, rank: int) -> dict[str, Any]:
    path = (temporary / _part_name(rank)).with_suffix(".json")
    try:
        note: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        hint = "the folder must be one that all machines share"
        raise UserError(f"rank {rank}'s part is not in {temporary}; {hint}") from error
    return note


def _put(temporary: Path, final: Path) -> Path:
    """Rename into place; a checkpoint of the same step steps aside whole, and comes back if the rename fails."""
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        remove(aside)
    swap_folder(temporary, final, aside)
    _sync_folder(final.parent)
    with suppress(OSError):  # the new one is in place; the next run sweeps this away
        remove(aside)
    return final


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, where its filesystem knows how."""
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
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint under ``folder``: its index and all its files are there, by size; no hash is made."""
    return next((path for path in reversed(_steps(folder)) if incomplete(path) is None), None)


def half_written(folder: Path) -> list[Path]:
    """Folders named like checkpoints that are not whole, oldest first. Nothing goes on from them."""
    return [path for path in _steps(folder) if incomplete(path) is not None]


def keep_newest(folder: Path, count: int, written: Path | None = None) -> list[Path]:
    """Delete all but the newest ``count`` whole checkpoints and the one just ``written``; 0 keeps all.

    The deleted ones. A kill in between leaves no half checkpoint under a name that counts. What a run left behind when
    it went back goes too, when ``count`` of its own are not older.
    """
    whole = [path for path in _steps(folder) if incomplete(path) is None]
    old = [path for path in whole[:-count] if path != written] if count else []
    if count and len(whole) >= count:
        old += [path for path in abandoned(folder) if step_of(path) <= step_of(whole[-count])]
    for path in old:
        remove(path)
    return old


def set_aside_after(step: int, folder: Path, chosen: Path | None = None) -> list[str]:
    """Rename the folders `step-N` of ``folder`` that are later than ``step``, but not ``chosen``; their new names.

    A run that goes on from an earlier step leaves that future behind: nothing of it may pass for the newest. Nothing is
    deleted here; see `keep_newest`. Where ``chosen`` itself is such an abandoned one, the other of its own step gives
    way as well.
    """
    found: list[str] = []
    for path in _steps(folder):
        number = step_of(path)
        if number > step or (number == step and chosen is not None and path.resolve() != chosen.resolve()):
            aside = path.with_name(f"{_ABANDONED}{path.name}")
            while aside.exists():
                aside = aside.with_name(f"{aside.name}.again")
            os.replace(path, aside)
            found.append(aside.name)
    return found


def abandoned(folder: Path) -> list[Path]:
    """What `set_aside_after` has renamed, under its new names."""
    return sorted(folder.glob(f"{_ABANDONED}step-*"))


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint, an abandoned one too."""
    match = _STEP.search(path.name)
    if match is None:
        raise UserError(f"{path} is not named like a checkpoint; name one of `checkpoints/step-*`")
    return int(match[1])


def sweep(folder: Path) -> list[str]:
    """Clear up after a killed run, before this one writes: the names of what was found.

    Parts of unfinished checkpoints, exports and pictures go. What had stepped aside for its replacement comes back if
    the replacement is not there.
    """
    found = []
    for path in sorted([*folder.glob(".step-*.*"), *folder.glob(f".{_ABANDONED}step-*.gone")]):  # .old before .tmp
        final = path.with_name(path.name.split(".")[1])
        if path.suffix == ".old" and not final.exists():
            os.replace(path, final)
        elif path.suffix in (".part", ".tmp") and path.is_file():  # an unfinished image
            path.unlink()
        elif path.suffix in (".old", ".tmp", ".gone"):
            remove(path)
        else:
            continue
        found.append(path.name)
    return found


def remove(path: Path) -> None:
    """Delete a folder under a name that counts for nothing: killed in between, it never passes for a checkpoint."""
    gone = path.with_name(f".{path.name.removeprefix('.')}.gone") if path.suffix != ".gone" else path
    with suppress(FileNotFoundError):
        if gone != path:
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(path, gone)
        shutil.rmtree(gone)


# --- whole dictionaries, in the calling thread --------------------------------------------------


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """A checkpoint of one process's tensors, by ``KIND/NAME``. The result is whole or not there."""
    temporary = temporary_folder(folder, step)
    pieces = [
        TensorPiece(name, tensor.detach().reshape(-1), 0, tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    try:
        start_fresh(temporary)
        write_part(temporary, 0, pieces)
        return commit(folder, step, [0], facts)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        final = folder / checkpoint_name(step)
        raise UserError(f"cannot write checkpoint {final}: {error.strerror}; earlier checkpoints are intact") from error


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors and facts of a checkpoint."""
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.shapes}, checkpoint.facts
