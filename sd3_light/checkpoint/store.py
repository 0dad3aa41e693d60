"""Checkpoints on disk: safetensors and a JSON index, whole or not there (laws 5 and 8).

    checkpoints/step-00000042/   index.json · rank-00000.safetensors ...

A file holds flat float32 ranges named ``KIND/NAME@START``; the index gives every tensor's shape and every file's hash.
Ranges fit replicas, rows of sharded weights and cut-up optimizer fragments alike, so a checkpoint belongs to the run
and not to the layout that wrote it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sd3_light.config.faults import UserError

FORMAT = 1
INDEX = "index.json"


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` optimizer steps; sorts by step."""
    return f"step-{step:08d}"


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write everything under a temporary name, then rename. The result is whole or not there."""
    final = folder / checkpoint_name(step)
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        flat = {f"{name}@0": tensor.detach().float().reshape(-1).cpu().contiguous() for name, tensor in tensors.items()}
        file = temporary / "rank-00000.safetensors"
        save_file(flat, file)
        index = {
            "format": FORMAT,
            "facts": dict(facts),
            "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
            "files": {file.name: _sha256(file)},
        }
        (temporary / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        _put(temporary, final)
    except (OSError, SafetensorError) as error:  # a full disk is the second kind
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot write checkpoint {final}: {reason}; earlier checkpoints are intact") from error
    return final


def _put(temporary: Path, final: Path) -> None:
    """Rename into place; a checkpoint of the same step steps aside whole, and comes back if the rename fails."""
    aside = temporary.with_suffix(".old")
    replaces = final.exists()
    if replaces:
        os.replace(final, aside)
    try:
        os.replace(temporary, final)
    except OSError:
        if replaces:
            os.replace(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint, checked by hash and for being covered whole."""
    index = _read_index(folder)
    ranges: dict[str, dict[int, Tensor]] = {}
    for name, digest in index["files"].items():
        path = folder / name
        if not path.is_file() or _sha256(path) != digest:
            raise UserError(f"checkpoint {folder} is damaged ({name}); resume from an earlier one")
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                tensor, start = key.rsplit("@", 1)
                if int(start) in ranges.setdefault(tensor, {}):
                    raise UserError(f"checkpoint {folder} holds {key} twice; resume from another")
                ranges[tensor][int(start)] = file.get_tensor(key)
    shapes = index["shapes"]
    if set(ranges) != set(shapes):
        raise UserError(f"checkpoint {folder} lacks {sorted(set(shapes) ^ set(ranges))[:3]}; resume from another")
    return {name: _assemble(folder, name, parts, shapes[name]) for name, parts in ranges.items()}, index["facts"]


def _assemble(folder: Path, name: str, parts: Mapping[int, Tensor], shape: list[int]) -> Tensor:
    ordered = [parts[start] for start in sorted(parts)]
    starts = torch.tensor([0, *(len(part) for part in ordered)]).cumsum(0).tolist()
    if starts[:-1] != sorted(parts) or starts[-1] != torch.Size(shape).numel():
        raise UserError(f"checkpoint {folder} does not cover {name} exactly once; resume from another")
    return torch.cat(ordered).reshape(shape)


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, not UTF-8, not JSON
        raise UserError(f"{folder} is not a whole checkpoint ({error}); name one of `checkpoints/step-*`") from error
    if index.get("format") != FORMAT:
        raise UserError(f"checkpoint {folder} has format {index.get('format')}; this version reads {FORMAT}")
    return index


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint under ``folder``; half-written ones have other names and do not count."""
    found = _whole(folder)
    return found[-1] if found else None


def _whole(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / INDEX).is_file())


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the newest ``count`` whole checkpoints; 0 keeps all."""
    for path in _whole(folder)[:-count] if count else []:
        shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
