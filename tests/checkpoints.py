"""Write and read whole checkpoints of one process, for tests."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, equal

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name, commit, reset_folder, temporary_folder, write_part
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write a checkpoint of tensors by ``KIND/NAME``; return its folder."""
    temporary = temporary_folder(folder, step)
    flat = {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}
    pieces = [TensorPiece(name, flat[name], 0, tuple(tensor.shape)) for name, tensor in tensors.items()]
    try:
        reset_folder(temporary)
        write_part(temporary, 0, pieces)
        return commit(folder, step, [0], facts)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        final = folder / checkpoint_name(step)
        raise UserError(f"cannot write checkpoint {final}: {error.strerror}; earlier checkpoints are intact") from error


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors and facts of a checkpoint, hashes verified."""
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.shapes}, checkpoint.facts


def assert_same_checkpoint(one: Path, two: Path) -> None:
    """Assert that two checkpoints have the same tensors, bit for bit, and the same counters."""
    (tensors, facts), (others, other_facts) = read_checkpoint(one), read_checkpoint(two)
    assert facts == other_facts
    assert set(tensors) == set(others)
    assert [name for name in tensors if not equal(tensors[name], others[name])] == []


def tensors(folder: Path) -> dict[str, Tensor]:
    saved = open_checkpoint(folder)
    return {name: saved.tensor(name) for name in saved.shapes}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(equal(tensor, second[name]) for name, tensor in first.items())
