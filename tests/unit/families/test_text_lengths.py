"""Text that is padded to few lengths: the same velocities and gradients as without padding, and few shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, _dynamo, nn

from sd3_light.config import TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.registry import family_of_folder
from sd3_light.families.stock.attention import QwenAttention, ZImageAttention, attend, rotate
from sd3_light.families.stock.model import StockModel
from tests.families import TinyFolder

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDED = ["qwen_image", "z_image", "sana"]


def text_batch(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(len(lengths))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size = len(lengths)
    text = torch.stack([nn.functional.pad(draw(length, 32), (0, 0, 0, max(lengths) - length)) for length in lengths])
    values = {"noisy": draw(size, 4, 8, 8), "t": torch.linspace(0.2, 0.9, size), "text": text}
    return Batch(size, {**values, "target": draw(size, 4, 8, 8)}, {"text.length": torch.tensor(lengths)})


class Model:
    """A tiny model of a family with random weights, the padding of Z-Image's text among them."""

    def __init__(self, name: str, folder: Path, **keys: Any) -> None:
        family: Any = family_of_folder(folder)
        self.family = family
        model = {"diffusers_path": str(folder), "dtype": "float32", "text_max_length": 64}
        table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
        config = family.completed(TrainConfig.model_validate(table, context={"base": Path()}))
        self.config = config
        denoiser = family.weights.load(family.weights.start(config.model), 0)
        generator = torch.Generator().manual_seed(5)
        for weight in denoiser.parameters():
            if not weight.any():
                weight.data.normal_(0, 0.3, generator=generator)
        self.model: StockModel = family.training.model(denoiser, config, fast=False)

    def run(self, batch: Batch, step: int | None) -> dict[str, Tensor]:
        """Return the velocity, and the gradients of all weights."""
        self.model.text_step = step
        self.model.zero_grad()
        self.model(batch)["loss"].backward()
        grads = {name: weight.grad for name, weight in self.model.trainable().items() if weight.grad is not None}
        with torch.no_grad():
            return {"velocity": self.model.denoise(batch), **grads}


@pytest.fixture(params=ROUNDED)
def make(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Callable[..., Model]:
    return lambda **keys: Model(request.param, tiny_folder(request.param), **keys)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() >= expected.keys()  # compiled blocks also return gradients of zero
    for name, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5 * scale + 1e-7, msg=name)


@pytest.mark.parametrize("lengths", [[7], [32], [40], [3, 11], [20, 50, 33]])
def test_padding_changes_nothing(make: Callable[..., Model], lengths: list[int]) -> None:
    tiny = make()
    batch = text_batch(lengths)
    plain = tiny.run(batch, None)
    assert plain["velocity"].std() > 1e-3
    for step in tiny.family.text_steps[:3]:
        assert_same(tiny.run(batch, step), plain)


def test_the_padding_of_z_image_is_its_own(tiny_folder: TinyFolder) -> None:
    tiny = Model("z_image", tiny_folder("z_image"))
    plain = tiny.run(text_batch([7]), None)
    rounded = tiny.run(text_batch([7]), 32)
    assert all(torch.equal(rounded[name], value) for name, value in plain.items())
    assert plain["cap_pad_token"].any(), "the denoiser attends to it"
    several = text_batch([20, 50])
    assert tiny.model.recordable(several) is several, "images are at other positions"


def test_checkpointed_blocks_see_the_same_padding(make: Callable[..., Model]) -> None:
    tiny = make(activation_checkpointing=True)
    batch = text_batch([9])
    assert_same(tiny.run(batch, 32), tiny.run(batch, None))
    model = make().model
    batches = [model.recordable(text_batch(lengths)) for lengths in ([3, 20], [31, 32], [1, 1])]
    assert len({batch.shapes() for batch in batches}) == 1
    assert not any(batch.host for batch in batches)
    assert model.recordable(batches[0]) is batches[0]


@pytest.mark.parametrize("name", ["krea2", "prx"])
def test_other_families_say_why_not(name: str, tiny_folder: TinyFolder) -> None:
    family: Any = family_of_folder(tiny_folder(name))
    assert not family.text_steps
    model = {"diffusers_path": str(tiny_folder(name)), "text_max_length": 64}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model}
    config = family.completed(TrainConfig.model_validate(table, context={"base": Path()}))
    reason = family.cost(family.weights.start(config.model), config.model).why_no_graphs
    assert reason == "captions are not padded, as the mask that they would need slows attention down"


@pytest.mark.parametrize(("name", "processor"), [("qwen_image", QwenAttention), ("z_image", ZImageAttention)])
@pytest.mark.parametrize("lengths", [[7], [40], [3, 11], [20, 50]])
def test_attention_is_that_of_the_stock_processor(
    name: str, processor: type, lengths: list[int], tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Model(name, tiny_folder(name))
    batch = text_batch(lengths)
    for step in (None, 32):
        stock = tiny.run(batch, step)
        with monkeypatch.context() as patch:
            patch.setattr(processor, "device", "cpu")
            assert_same(tiny.run(batch, step), stock)


def test_compiled_attention_is_the_same(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, without machine code."""
    from torch._dynamo.testing import CompileCounterWithBackend

    for name, processor in (("qwen_image", QwenAttention), ("z_image", ZImageAttention)):
        tiny = Model(name, tiny_folder(name))
        batch = text_batch([7])
        stock = tiny.run(batch, 32)
        monkeypatch.setattr(processor, "device", "cpu")
        _dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        for block in tiny.model.blocks():
            block.forward = torch.compile(block.forward, dynamic=False, backend=counter)
        assert_same(tiny.run(batch, 32), stock)
        frames = counter.frame_count
        tiny.run(text_batch([19]), 32)
        assert counter.frame_count == frames, "another length is compiled again"
    _dynamo.reset()


def test_rows_after_the_lengths_are_not_attended_to() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 6, 4, 8)
    output = attend(query, key, value, torch.tensor([6, 2]))
    short = attend(query[1:, :2], key[1:, :2], value[1:, :2], None)
    torch.testing.assert_close(output[1:, :2], short)
    torch.testing.assert_close(output[:1], attend(query[:1], key[:1], value[:1], None))
    torch.manual_seed(0)
    rows = torch.randn(2, 5, 3, 8)
    for shape in ((5, 4), (2, 5, 4)):
        angles = torch.polar(torch.ones(shape), torch.randn(shape))
        product = torch.view_as_complex(rows.unflatten(-1, (-1, 2))) * angles.unsqueeze(-2)
        torch.testing.assert_close(rotate(rows, angles), torch.view_as_real(product).flatten(-2))
