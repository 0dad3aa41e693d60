"""What the tests of checkpoints share."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sd3_light.checkpoint.store import commit, start_fresh, temporary_folder, write_part
from sd3_light.engines.protocol import TensorPiece


@pytest.fixture
def write_ranks() -> Callable[..., Path]:
    """A checkpoint as ranks of some layout write it, one after the other."""

    def write(folder: Path, step: int, ranks: Sequence[Sequence[TensorPiece]], facts: object = None) -> Path:
        temporary = temporary_folder(folder, step)
        start_fresh(temporary)
        for rank, pieces in enumerate(ranks):
            write_part(temporary, rank, pieces)
        return commit(folder, step, range(len(ranks)), {"given": facts})

    return write
