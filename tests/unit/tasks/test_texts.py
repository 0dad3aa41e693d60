"""Text dropout belongs to the sample and its epoch; texts of unequal length share a batch under a mask."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.tasks import DiffusionTrainingModule, drop_text, unit
from tests.unit.tasks.toy import process

CALLS: list[str] = []


@unit("text", "length", uses="encoder")
def encode_text(module: Any, prompt: str) -> tuple[Tensor, int]:
    CALLS.append(prompt)
    return module.encoder.weight * torch.tensor([[float(ord(letter))] for letter in f"{prompt}."]), len(prompt)


class Module(DiffusionTrainingModule):
    reads, pads = ("text", "length"), ("text",)

    def __init__(self, *units: Any) -> None:
        super().__init__(nn.Linear(4, 4), units or drop_text(encode_text, 0.3))
        self.encoder = nn.Linear(1, 1)
        nn.init.ones_(self.encoder.weight)
        self.seen: list[Any] = []

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        self.seen.append(inputs)
        text = (inputs["text"].squeeze(2) * inputs["text_mask"]).sum(1) / inputs["text_mask"].sum(1)
        return self.transformer(noisy) + text[:, None] / 100  # type: ignore[no-any-return]


def sample(index: int, epoch: int = 0, prompt: str = "") -> dict[str, Any]:
    data = {"prompt": prompt or "ab" * (1 + index % 3), "latents": torch.full((4,), float(index))}
    return {"data": data, "data_id": index, "epoch": epoch, "repeat": 0}


def lengths(module: Module, samples: list[Any], quantile: float | None = None) -> list[int]:
    module.each(samples, quantile)
    return [int(length) for length in module.seen[-1]["length"]]


def test_texts_are_dropped_together_again_in_each_epoch_and_never_in_validation() -> None:
    module = Module()
    epochs = [lengths(module, [sample(index, epoch) for index in range(300)]) for epoch in (0, 1, 0)]
    shares = [sum(length == 0 for length in epoch) / 300 for epoch in epochs]
    assert all(0.2 < share < 0.4 for share in shares), shares
    assert epochs[0] == epochs[2] != epochs[1]
    alone = [lengths(module, [sample(index)])[0] for index in range(20)]
    assert alone == epochs[0][:20], "a sample's draw does not depend on its batch"
    module.each([sample(index) for index in range(50)])
    inputs = module.seen[-1]
    assert [int(count) for count in inputs["text_mask"].sum(1)] == [int(length) + 1 for length in inputs["length"]]
    module = Module()
    CALLS.clear()
    assert 0 not in lengths(module, [sample(index) for index in range(50)], quantile=0.5)
    assert CALLS.count("") == 1


def test_a_data_process_stores_both_texts(tmp_path: Path) -> None:
    samples = [sample(index) for index in range(8)]
    module = Module()
    expected = module.each(samples)
    data = process(tmp_path, [item["data"] for item in samples], module)
    CALLS.clear()
    stored = [{**item, "data": data[index]} for index, item in enumerate(samples)]
    assert torch.equal(module.each(stored), expected)
    assert CALLS == []


def test_texts_of_unequal_length_have_the_losses_of_single_samples() -> None:
    module = Module(encode_text)
    samples = [sample(index) for index in range(3)]
    together = module.each(samples)
    assert module.seen[-1]["text"].shape == (3, 7, 1)
    alone = torch.cat([module.each([item]) for item in samples])
    assert torch.allclose(together, alone, rtol=1e-6)
    module.pads = ()
    with pytest.raises(UserError, match=r"'text' of shapes .* name texts of unequal length in pads"):
        module.each([sample(0), sample(1)])


@pytest.mark.parametrize(
    ("encode", "probability", "empty", "message"),
    [
        (print, 0.1, {}, "is not a unit; give the unit that encodes the text"),
        (encode_text, 1.5, {}, "drop_text: probability is 1.5; give a number >= 0 and <= 1"),
        (encode_text, 0.1, {"caption": ""}, "unit encode_text does not read 'caption'"),
    ],
)
def test_a_wrong_call_is_an_error(encode: Any, probability: Any, empty: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        drop_text(encode, probability, **empty)
