"""The tiles of our kernels: each is timed with arguments that its operation takes."""

from types import SimpleNamespace
from typing import Any

import torch

from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.row_layout import make_layout


def test_every_kernel_has_arguments_that_its_operation_takes(scripts: SimpleNamespace, monkeypatch: Any) -> None:
    monkeypatch.setattr(scripts.step, "WIDTH", 32)
    monkeypatch.setattr(scripts.step, "HEADS", 2)
    layout = make_layout(2, 16, 8, None, torch.device("cpu"))
    assert scripts.step.CANDIDATES.keys() == scripts.step.MOVES.keys()
    for kernel in scripts.step.CANDIDATES:
        operation, arguments = scripts.step.call_of(kernel, layout)
        getattr(reference, operation)(*arguments)
