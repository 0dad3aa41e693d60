"""Batches that workers stack: the results of single samples, bit for bit, without work in the trainer."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.engines import Launch
from sd3_light.engines.prefetch import DeviceSender, prefetch_steps
from sd3_light.engines.torch import micro_losses
from sd3_light.model.device_copy import to_device
from sd3_light.tasks import DiffusionTrainingModule, PipelineUnit, drop_text, unit
from sd3_light.tasks.batches import SampleOrder, TaskBatches, item_of
from sd3_light.tasks.models import UnitModel
from sd3_light.tasks.prepare import batch_values, rows_of, sample_values
from tests.unit.tasks import toy

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def item(index: int, **changes: Any) -> dict[str, Any]:
    """Return a sample with tensors of several dtypes, a number, texts and a list of tensors."""
    random = torch.Generator().manual_seed(index)
    values = {
        "latents": torch.randn(3, 4, 4, generator=random),
        "text": torch.randn(5, 8, generator=random).bfloat16(),
        "ids": torch.tensor([index, index + 1]),
        "loss_weight": 0.5 + index,
        "frames": [torch.full((2,), float(index))],
        "name": "x" * (1 + index % 3),
        "unread": torch.zeros(1000),
    }
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


@unit("latents", uses="encoder")
def encode(module: Any, image: Tensor) -> Tensor:
    latents: Tensor = module.encoder(image[None])[0]
    return latents


@unit("latents")
def draw_latents(module: Any, moments: Tensor, draw: Any) -> Tensor:
    return moments + draw("posterior", tuple(moments.shape))


@unit("text")
def encode_name(module: Any, name: str) -> Tensor:
    return torch.full((2 + len(name), 8), float(len(name)), device=module.device)


@unit("context", uses="transformer")
def learned(module: Any, text: Tensor) -> Tensor:
    context: Tensor = module.transformer.text(text.float())
    return context


class Model(DiffusionTrainingModule):
    reads = ("text", "ids", "frames", "name?")

    def __init__(self, *units: Any, pads: tuple[str, ...] = ()) -> None:
        torch.manual_seed(0)
        net = nn.Conv2d(3, 3, 3, padding=1)
        net.text, net.ids = nn.Linear(8, 3), nn.Embedding(16, 3)
        super().__init__(net, units)
        self.encoder, self.pads = nn.Conv2d(3, 3, 1), pads

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        assert [len(inputs[name]) for name in ("frames", "name", "text", "noise")] == [len(noisy)] * 4
        net: Any = self.transformer
        text = inputs["context"] if "context" in inputs else net.text(inputs["text"].float())
        frames = to_device(torch.stack([frame[0].sum() for frame in inputs["frames"]])[:, None], noisy.device)
        velocity: Tensor = net(noisy) + (text.sum(1) + net.ids(inputs["ids"]).sum(1) + frames)[:, :, None, None]
        return velocity


def noisy_image(index: int) -> dict[str, Any]:
    return item(index, image=item(index)["latents"] * 2, latents=None)


def other_length(index: int) -> dict[str, Any]:
    return item(index, text=item(index)["text"][: 1 + index % 4])


def only_moments(index: int) -> dict[str, Any]:
    return item(index, moments=item(index)["latents"], latents=None)


def other_dtype(index: int) -> dict[str, Any]:
    return item(index, text=torch.ones(5, 8, dtype=(torch.float32, torch.bfloat16)[index % 2]) / 3)


def some_masked(index: int) -> dict[str, Any]:
    return item(index, mask=torch.ones(4, 4) if index % 2 else torch.eye(4))


CASES: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[], Model]]] = {
    "no units": (item, Model),
    "a gradient unit": (item, partial(Model, learned)),
    "a cached unit": (noisy_image, partial(Model, encode)),
    "a cached unit whose result is in the data": (item, partial(Model, encode)),
    "a drawn unit": (only_moments, partial(Model, draw_latents)),
    "text dropout": (item, partial(Model, *drop_text(encode_name, 0.5, name=""), pads=("text",))),
    "padded text": (other_length, partial(Model, pads=("text",))),
    "a mask": (some_masked, Model),
    "two dtypes": (other_dtype, Model),
}


def samples(make: Callable[[int], dict[str, Any]], count: int = 4) -> list[dict[str, Any]]:
    return [{"data": make(index), "data_id": index, "epoch": 2, "repeat": index % 2} for index in range(count)]


def loss_and_gradients(model: Model, batch: Batch) -> list[Tensor]:
    losses, bands = micro_losses(UnitModel(model), batch, model.device)
    losses["loss"].backward()
    return [losses["loss"], bands, *(weight.grad for weight in model.trainable_modules())]  # type: ignore[list-item]


def stacked(model: Model, batch: list[dict[str, Any]]) -> Batch:
    return model.preparer().prepare_inputs(rows_of(batch))


def unstacked(batch: Batch) -> Batch:
    """Return the batch as if no value could be stacked."""
    lists = {name: [sample_values(batch, at, CPU)[name] for at in range(batch.size)] for name in batch.values}
    return Batch(batch.size, {}, {**batch.host, **{name: lists[name] for name in lists if name != "noise"}})


@pytest.mark.parametrize("case", CASES)
def test_a_stacked_batch_has_the_loss_and_gradients_of_its_samples(case: str) -> None:
    make, model = CASES[case]
    batch = stacked(model(), samples(make))
    expected = loss_and_gradients(model(), unstacked(batch))
    actual = loss_and_gradients(model(), batch)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(model()(samples(make)), actual[0])


def test_a_batch_holds_what_is_read_and_stacks_what_is_equal() -> None:
    batch = stacked(Model(), samples(some_masked))
    shapes = {"latents": (4, 3, 4, 4), "text": (4, 5, 8), "ids": (4, 2), "mask": (4, 4, 4), "noise": (4, 3, 4, 4)}
    assert {name: tuple(value.shape) for name, value in batch.values.items()} == shapes
    lists = {name for name, column in batch.host.items() if isinstance(column, list)}
    assert lists == {"loss_weight", "frames", "name"}
    assert stacked(Model(encode), samples(noisy_image)).get("noise") is None, "the latents' shape is not known yet"
    # fSDP would cast times and noise to bfloat16.
    batch = stacked(Model(), samples(item))
    assert pytree.tree_leaves(batch) == [batch]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_length, r"'text' of shapes .* name the samples of one shape with bucket_of"),
        (lambda index: item(index, ids=None), "sample 0: 'ids' is read, but it is neither in the data nor written"),
        (lambda index: item(index, latents=None), "sample 0: 'latents', which the loss compares with, is missing"),
        (lambda index: item(index, latents=torch.ones(3, 4, 4, dtype=torch.uint8)), "'latents', .* is torch.uint8"),
        (lambda index: item(index, mask=torch.ones(4, 4) if index == 0 else None), "some samples .* have 'mask'"),
    ],
)
def test_the_errors_are_those_of_the_samples(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Model()(samples(make))
    with pytest.raises(UserError, match=message):
        UnitModel(Model())(stacked(Model(), samples(make)))


class Items(list[Any]):
    def __init__(self, make: Callable[[int], dict[str, Any]]) -> None:
        super().__init__(make(index) for index in range(8))


def train(out: Path, model: Model, data: Any, **settings: Any) -> list[Any]:
    settings = {"batch_size": 2, "max_steps": 4, "save_steps": 9, "num_epochs": 2, **settings}
    return toy.steps(toy.train(out, model, data, **settings), "loss", "grad_norm")


@pytest.mark.parametrize("case", ["no units", "text dropout"])
def test_a_task_with_workers_trains_as_one_without_and_as_samples_do(tmp_path: Path, case: str) -> None:
    make, model = CASES[case]

    class Overridden(Model):
        """Gets its batches as lists of samples."""

        def forward(self, batch: Any) -> Tensor:
            assert isinstance(batch, list)
            return super().forward(batch)

    plain = model()
    overridden = Overridden(*plain.units, pads=plain.pads)
    expected = train(tmp_path / "samples", overridden, Items(make))
    for workers in (0, 2):
        trained = model()
        assert train(tmp_path / str(workers), trained, Items(make), num_workers=workers) == expected
        pairs = zip(trained.parameters(), overridden.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_the_trainer_splits_the_units_once_and_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit the patch; only calls in this process are counted."""
    calls: list[str] = []
    freeze = DiffusionTrainingModule.freeze_the_rest
    monkeypatch.setattr(DiffusionTrainingModule, "freeze_the_rest", lambda self: calls.append("freeze") or freeze(self))
    generator = np.random.Generator
    monkeypatch.setattr(np.random, "Generator", lambda bits: calls.append("draw") or generator(bits))
    train(tmp_path, Model(), Items(item), num_workers=1, max_steps=3)
    order = calls.count("draw")
    calls.clear()
    train(tmp_path / "more", Model(), Items(item), num_workers=1, max_steps=4)
    assert calls.count("freeze") == 1
    assert calls.count("draw") == order, "the order of the epoch may be drawn here, nothing per step"


def test_units_are_split_again_after_a_task(tmp_path: Path) -> None:
    model = Model(encode)
    train(tmp_path, model, Items(noisy_image), max_steps=1)
    model.units = ()
    with pytest.raises(UserError, match="'latents', which the loss compares with, is missing"):
        model(samples(noisy_image))


def micro_batches(model: Model, make: Callable[[int], dict[str, Any]], workers: int = 0, pin: Any = None) -> Any:
    """Yield the micro-batches of a loader, two per step."""
    data: Any = Items(make)
    batches = TaskBatches(data, SampleOrder(data, 0, 4), Launch(), 2, item_of)
    preparer = model.preparer()
    return iter(PipelineDataLoader(batches, None, 2, preparer, workers, 1, range(8), pin, preparer.prepare_into))


def losses(model: Model, batches: Iterable[Any]) -> list[list[Tensor]]:
    return [loss_and_gradients(model, batch)[:2] for batch in batches]


@pytest.mark.parametrize("case", CASES)
def test_prefetched_batches_train_the_same(case: str) -> None:
    """As on a GPU: two buffers alternate, and the memory of the workers is used again."""
    make, new_model = CASES[case]
    model = new_model()
    expected = losses(model, micro_batches(model, make))
    steps: Iterator[Any] = prefetch_steps(micro_batches(model, make, workers=2 if "text" in case else 0), 2, CPU)
    actual = losses(model, (batch for step in steps for batch in step))
    assert len(actual) == 8
    for pair, other in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if case != "a cached unit"])  # its encoder reads numbers
def test_samples_of_a_worker_follow_the_model_to_its_device(case: str) -> None:
    """Meta tensors stand for a GPU: they refuse to be mixed with those of the host."""
    make, new_model = CASES[case]
    model = new_model().to("meta")
    batch = stacked(model, samples(make))
    for form in (batch, unstacked(batch)):
        assert UnitModel(model)(form)["loss"].device.type == "meta"


def test_all_values_are_sent_to_the_device_but_not_tensors_inside_lists() -> None:
    batch = stacked(Model(pads=("text",)), samples(other_length))
    sent = DeviceSender(CPU).send(batch)
    before = {id(tensor) for tensor in batch.tensors()}
    assert not before & {id(tensor) for tensor in sent.tensors()}
    storage = sent["noise"].untyped_storage().data_ptr()
    assert {tensor.untyped_storage().data_ptr() for tensor in sent.tensors()} == {storage}
    assert "text" in sent.values
    for at, sample in enumerate(samples(other_length)):
        assert torch.equal(sample_values(sent, at, CPU)["text"], sample["data"]["text"])
        frame = sent.host["frames"][at][0]
        assert frame is batch.host["frames"][at][0]
        for copy in (sample_values(sent, at, CPU)["frames"][0], batch_values(sent, "frames", (), CPU)["frames"][at][0]):
            assert torch.equal(copy, frame)
            assert copy.data_ptr() != frame.data_ptr(), "a unit may keep it, or copy it without waiting"


class ReadsDraw(PipelineUnit):
    reads, writes, draws = ("text",), ("kept",), True

    def run(self, module: Any, text: Tensor, draw: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"kept": draw("a", (2,), on_host=True)}


def test_text_dropout_does_not_read_from_the_device() -> None:
    drop = drop_text(encode_name, 0.5, name="")[1]
    asked: list[bool] = []

    def draw(purpose: str, shape: tuple[int, ...], on_host: bool = False) -> Tensor:
        asked.append(on_host)
        return torch.zeros(shape)

    drop.run(None, draw=draw, full_text=1, empty_text=0)
    assert asked == [True]
    model = Model(ReadsDraw())
    batch = stacked(model, samples(item))
    device, host = (model._draw(batch.host, 0)("a", (2,), on_host) for on_host in (False, True))
    assert torch.equal(device, host)

    # what an encoder passes on from its sample is in memory that later batches overwrite.
    @unit("text", "pooled")
    def passes_on(module: Any, prompt: str, features: Tensor) -> Any:
        return torch.ones(2, 8), features

    both = drop_text(passes_on, 0.5)[0]
    features = torch.ones(3)
    both.run(None, prompt="a", features=features)
    features.zero_()
    assert torch.equal(both.run(None, prompt="a", features=features)["empty_pooled"], torch.ones(3))
