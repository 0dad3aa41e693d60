"""Where the parts of a pipeline are while it draws."""

from typing import Any

import pytest
import torch
from torch import nn

from sd3_light.sample import residence


class Pipe:
    """Stands in for a pipeline with two networks of 40 bytes."""

    def __init__(self) -> None:
        self.components = {"transformer": nn.Linear(4, 2), "vae": nn.Linear(4, 2), "tokenizer": object()}
        self.calls: list[tuple[str, Any]] = []

    def to(self, device: torch.device) -> None:
        self.calls.append(("to", device.type))

    def enable_model_cpu_offload(self, device: torch.device) -> None:
        self.calls.append(("offload", device.type))


@pytest.mark.parametrize(
    ("device", "free", "expected"), [("cuda", 1 << 40, "to"), ("cuda", 1000, "offload"), ("cpu", 1000, "to")]
)
def test_parts_take_turns_on_a_gpu_that_is_too_small(
    device: str, free: int, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(residence, "free_memory", lambda _: free)
    pipe: Any = Pipe()
    residence.move_to(pipe, torch.device(device))
    assert pipe.calls == [(expected, device)]
    assert ("do not fit on the GPU" in capfd.readouterr().err) == (expected == "offload")
