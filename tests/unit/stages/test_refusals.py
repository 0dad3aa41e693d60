"""What stages refuse before they do anything."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.export import places
from sd3_light.training.trainable import freeze


def test_freezing_everything_is_refused() -> None:
    transformer: Any = torch.nn.Linear(2, 2)
    freeze(transformer, ["bias"])
    assert [p.requires_grad for p in transformer.parameters()] == [True, False]
    with pytest.raises(UserError, match="leaves nothing to train"):
        freeze(transformer, ["*"])


def test_an_export_that_cannot_take_its_place_leaves_the_old_one(tmp_path: Path) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "weights").write_text("old")
    with pytest.raises(OSError, match="missing"):
        places._replace(tmp_path / "missing", old)
    assert (old / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
