"""What stages refuse before they do anything."""

from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.export.trainable import freeze


def test_freezing_everything_is_refused() -> None:
    transformer: Any = torch.nn.Linear(2, 2)
    freeze(transformer, ["bias"])
    assert [p.requires_grad for p in transformer.parameters()] == [True, False]
    with pytest.raises(UserError, match="leaves nothing to train"):
        freeze(transformer, ["*"])
