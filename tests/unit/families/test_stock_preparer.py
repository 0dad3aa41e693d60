"""Batches of stock denoisers: columns of captions as they are, dropped together, from shards and from memory alike."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Bucket, Column
from sd3_light.data.order import Order
from sd3_light.data.resident import ResidentCache
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.stock.prepare import StockPreparer
from sd3_light.flow.timesteps import open_interval, quantile_to_time, shift_time
from sd3_light.model.base_values import ShiftLine
from sd3_light.randomness import first_words, occurrence_words, uniforms
from tests.made_up_cache import LABEL, write_cache

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = 3
LONGEST = 7
SEED = 5
DROPS = {"enable_uncond_text_dropout": True, "uncond_text_dropout": "joint", "uncond_text_dropout_prob": 0.4}


class Words:
    """A family with two ragged columns and a fixed one."""

    def columns(self, model: Any, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
        latent = (-(-bucket.height // 8), -(-bucket.width // 8))
        return (
            Column("moments", "image", "float16", (8, *latent), ()),
            Column("mask", "mask", "uint8", latent, ()),
            Column("text", "caption", "bfloat16", (LONGEST, 4), (), ragged=True),
            Column("layers", "caption", "bfloat16", (5, 2, 3), (), ragged=True),
            Column("pooled", "caption", "bfloat16", (6,), ()),
        )


def table(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"diffusers_path": "m", **keys}, context={"base": Path()})


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "masked"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CachedDataset:
    family: Any = Words()
    folder = tmp_path_factory.mktemp("cache") / "cache"
    write_cache(folder, family, table(), {Bucket(64, 64): 7, Bucket(96, 48): 5}, masked=request.param)
    return CachedDataset(LocalStore(folder), columns=partial(family.columns, None, Path()))


def order_of(data: CachedDataset, batch: int = BATCH) -> Order:
    return data.order(SEED, {LABEL: 1.0}, lambda resolution: batch)


@pytest.fixture
def make(data: CachedDataset) -> Callable[..., StockPreparer]:
    def preparer(exact: int | None = None, **keys: Any) -> StockPreparer:
        ragged = {"text": exact, "layers": None}
        scale = LatentScale(0.5, 0.1)
        return StockPreparer(SEED, table(**keys), scale, ragged=ragged, fixed=("pooled",), empty_text=data.empty_text())

    return preparer


def assert_equal(one: Batch, two: Batch) -> None:
    assert list(one.values) == list(two.values)
    for name, value in one.values.items():
        assert value.dtype == two[name].dtype
        assert torch.equal(value, two[name]), name
    assert sorted(one.host) == sorted(two.host)
    for name, value in one.host.items():
        assert torch.equal(value, two.host[name]), name


@pytest.mark.parametrize("exact", [None, LONGEST + 2])
@pytest.mark.parametrize("drops", [{}, DROPS])
def test_batches_from_memory_are_those_from_shards(
    data: CachedDataset, make: Callable[..., StockPreparer], exact: int | None, drops: dict[str, Any]
) -> None:
    preparer, order = make(exact, **drops), order_of(data)
    resident = preparer.resident(ResidentCache(data, torch.device("cpu")), SEED)
    for step in range(3 * order.steps_per_epoch):
        picks = order.picks(step)
        clean = preparer.prepare_clean(data.read(picks, SEED))
        assert_equal(resident.gather(resident.indices(picks)), clean)
        allocated: list[torch.Size] = []

        def empty(shape: Sequence[int], dtype: torch.dtype, sizes: list[torch.Size] = allocated) -> torch.Tensor:
            sizes.append(torch.Size(shape))
            return torch.full(tuple(shape), float("nan"), dtype=dtype)

        assert_equal(resident.gather(resident.indices(picks), empty), clean)
        assert clean["text"].shape in allocated


def test_ragged_texts_are_padded_to_the_longest(data: CachedDataset, make: Callable[..., StockPreparer]) -> None:
    order = order_of(data)
    lengths = []
    for step in range(order.steps_per_epoch):
        rows = data.read(order.picks(step), SEED)
        batch = make().prepare_inputs(rows)
        for name in ("text", "layers"):
            own = batch.lengths(name)
            assert own.tolist() == rows[f"{name}.length"].tolist()
            assert batch[name].shape[1] == int(own.max())
            for values, source, count in zip(batch[name], rows[name], own.tolist(), strict=True):
                assert torch.equal(values[:count], source[:count])
                assert not values[count:].any()
            lengths.append(tuple(own.tolist()))
        assert torch.equal(batch["pooled"], rows["pooled"])
        assert batch["text"].dtype == torch.bfloat16
        assert (batch.get("mask") is None) == (rows["mask"] is None)
    assert len(set(lengths)) > 2


def test_exact_texts_have_zeros_and_no_lengths(data: CachedDataset, make: Callable[..., StockPreparer]) -> None:
    rows = data.read(order_of(data).picks(0), SEED)
    batch = make(LONGEST).prepare_inputs(rows)
    assert batch["text"].shape == (BATCH, LONGEST, 4)
    assert batch.lengths("text") is None
    for values, source, count in zip(batch["text"], rows["text"], rows["text.length"].tolist(), strict=True):
        assert torch.equal(values[:count], source[:count])
        assert not values[count:].any()
    (half, _, _) = batch.split(BATCH)
    assert half["text"].shape == (1, LONGEST, 4), "parts of a batch keep the length"
    keys = {**DROPS, "uncond_text_dropout_prob": 1.0}
    rows = data.read(order_of(data).picks(0), SEED)
    assert torch.equal(make(**keys).prepare_inputs(rows, 0.5)["pooled"], rows["pooled"])
    dropped = make(**keys).prepare_inputs(rows)["pooled"]
    assert all(torch.equal(row, data.empty_text()["pooled"]) for row in dropped)
    line = ShiftLine(0.2, 0.9, 16, 8192)
    model = table(flux_shift=True)
    preparer = StockPreparer(SEED, model, LatentScale(1.0, 0.0), patch=1, line=line)
    occurrences = np.array([occurrence_words(0, 0, [number])[0] for number in range(5)])
    drawn = uniforms(first_words(SEED, "timestep", occurrences)[0]).tolist()
    times = preparer.times(occurrences, torch.Size((5, 8, 6, 10)))
    factor = float(np.exp(0.2 + (0.9 - 0.2) * (6 * 10 - 16) / (8192 - 16)))
    expected = [shift_time(quantile_to_time(open_interval(u), "logit_normal"), factor) for u in drawn]
    torch.testing.assert_close(times, torch.tensor(expected))


def test_text_is_dropped_by_one_draw_per_occurrence(data: CachedDataset, make: Callable[..., StockPreparer]) -> None:
    empty, preparer = data.empty_text(), make(**DROPS)
    dropped: dict[tuple[int, int, int], bool] = {}
    for batch_size in (BATCH, 1):
        order = order_of(data, batch_size)
        for step in range(2 * order.steps_per_epoch):
            rows = data.read(order.picks(step), SEED)
            batch = preparer.prepare_inputs(rows)
            own = batch.lengths("text")
            assert own is not None
            for at in range(batch.size):
                key = int(rows["epoch"][at]), int(rows["repeat"][at]), int(rows["sample_id"][at])
                is_dropped = torch.equal(batch["pooled"][at], empty["pooled"])
                assert torch.equal(batch["text"][at, : int(own[at])], empty["text"]) == is_dropped
                assert dropped.setdefault(key, is_dropped) == is_dropped, "whatever batch it is in"
            assert torch.equal(rows["pooled"], data.read(order.picks(step), SEED)["pooled"]), "the rows are not changed"
    draws = uniforms(
        first_words(SEED, "text-dropout", np.array([occurrence_words(*key[:2], [key[2]])[0] for key in dropped]))[0]
    )
    assert [draw < 0.4 for draw in draws] == list(dropped.values())
    assert {True, False} == set(dropped.values())
