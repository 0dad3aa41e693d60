"""Fixtures of the checkpoint tests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sd3_light.checkpoint.store import commit, reset_folder, temporary_folder, write_part
from sd3_light.engines.protocol import TensorPiece


@pytest.fixture
def write_ranks() -> Callable[..., Path]:
    """Return a function that writes a checkpoint as several ranks would, one after another."""

    def write(folder: Path, step: int, ranks: Sequence[Sequence[TensorPiece]], facts: object = None) -> Path:
        temporary = temporary_folder(folder, step)
        reset_folder(temporary)
        for rank, pieces in enumerate(ranks):
            write_part(temporary, rank, pieces)
        return commit(folder, step, range(len(ranks)), {"given": facts})

    return write
