"""The tiles of our kernels: each is timed with arguments that its operation takes."""

import importlib
from pathlib import Path

import pytest
import torch

from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.row_layout import make_layout

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_every_kernel_has_arguments_that_its_operation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("kernels")
    monkeypatch.setattr(script, "WIDTH", 32)
    monkeypatch.setattr(script, "HEADS", 2)
    layout = make_layout(2, 16, 8, None, torch.device("cpu"))
    assert script.CANDIDATES.keys() == script.MOVES.keys()
    for kernel in script.CANDIDATES:
        operation, arguments = script.call_of(kernel, layout)
        getattr(reference, operation)(*arguments)
