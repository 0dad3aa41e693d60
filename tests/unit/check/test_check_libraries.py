"""`check` reports libraries that the config needs and that are not installed."""

from collections.abc import Callable
from typing import Any

import pytest

from sd3_light.check import disk
from sd3_light.check.disk import disk_faults
from sd3_light.config import Fault

PRODIGY = '[optimizer]\ntype = "prodigy"'


def test_optimizers_and_few_bits_without_their_library(
    monkeypatch: pytest.MonkeyPatch, files: Any, only_fault: Callable[..., Fault]
) -> None:
    monkeypatch.setattr(disk, "find_spec", lambda name: None)
    fault = only_fault(tables=PRODIGY)
    assert fault.key == "optimizer.type"
    assert "prodigyopt" in fault.problem
    assert fault.hint is not None
    assert "`pip install 'sd3-light[prodigy]'`" in fault.hint
    assert disk_faults(files.load(tables=PRODIGY), caching=True) == [], "a cache needs no optimizer"
    assert disk_faults(files.load(tables='[optimizer]\ntype = "muon"')) == []
    monkeypatch.setattr(disk, "find_spec", lambda name: object())
    assert disk_faults(files.load(tables=PRODIGY)) == []
    monkeypatch.setattr(disk, "find_spec", lambda name: None)
    files.denoiser("sd3/transformer")
    fault = only_fault(model="", tables="[adapter]\nbase_bits = 4")
    assert (fault.key, fault.value) == ("adapter.base_bits", "4")
    assert fault.hint == "run `pip install 'sd3-light[bnb]'`, or write base_bits = 8"
