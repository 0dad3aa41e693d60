"""The kernels compute what their reference does: each sum, each place, nothing outside."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.model.fast import reference
from sd3_light.model.fast.rows import Plan, make_plan

HEADS, UNITS = 3, 8
WIDTH = HEADS * UNITS  # not a power of two: masks matter
PLANS = {"one-length": None, "real": [5, 1, 40, 33]}


def by_path(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The kernels over a small Triton of our own, whether or not the real one is here."""
    small = by_path("small_triton", Path(__file__).with_name("small_triton.py"))
    before = {name: sys.modules.get(name) for name in small.modules()}
    sys.modules.update(small.modules())
    yield by_path("kernels_under_test", Path(reference.__file__).with_name("kernels.py"))
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(params=PLANS)
def plan(request: Any) -> Plan:
    return make_plan(4, 35, 40, PLANS[request.param], torch.device("cpu"))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    elif wanted is None:
        assert found is None
    else:
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)


def pending(count: int, samples: int) -> reference.Pending:
    modulation = normal(samples, 6 * WIDTH)
    return normal(count, WIDTH) + 1, normal(WIDTH), modulation[:, 2 * WIDTH : 3 * WIDTH]


@pytest.mark.parametrize("is_pending", [False, True])
def test_norm(kernels: ModuleType, plan: Plan, is_pending: bool) -> None:
    for rows in (plan.image, plan.text):
        x, modulation = 2 * normal(rows.count, WIDTH), normal(plan.samples, 5 * WIDTH)
        added = pending(rows.count, plan.samples) if is_pending else None
        shift, scale = modulation.chunk(5, dim=1)[:2]
        same(kernels.residual_norm(x, added, scale, shift, rows), reference.residual_norm(x, added, scale, shift, rows))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_pending", [False, True])
def test_norm_backward(kernels: ModuleType, plan: Plan, is_pending: bool, is_stream: bool) -> None:
    kernels.TUNING["norm_backward"]["R"] = 2  # tiles that reach over the end of a sample
    for rows in (plan.image, plan.text):
        x, scale = 2 * normal(rows.count, WIDTH), normal(plan.samples, 5 * WIDTH)[:, :WIDTH]
        dh, gx = normal(WIDTH, rows.count).t().contiguous(), normal(rows.count, WIDTH).flip(0) if is_stream else None
        given = (dh, gx, x, pending(rows.count, plan.samples) if is_pending else None, scale, rows)
        shift = normal(plan.samples, 5 * WIDTH)[:, WIDTH : 2 * WIDTH]
        for wanted in (None, shift):
            found, expected = (ops.residual_norm_backward(*given, wanted) for ops in (kernels, reference))
            same(found, expected)
        same(expected[-1], reference.residual_norm(x, None, scale, shift, rows)[1])


@pytest.mark.parametrize("again", [False, True])
def test_gelu_backward(kernels: ModuleType, again: bool) -> None:
    u, dg = 2 * normal(70, 96), normal(96, 70).t().contiguous()
    kernels.TUNING["gelu_backward"]["BLOCK"] = 64  # two blocks of columns, one of them cut
    same(kernels.gelu_backward(dg, u, again), reference.gelu_backward(dg, u, again))
    leaf = u.clone().requires_grad_()
    reference.gelu(leaf).backward(dg)
    same(reference.gelu_backward(dg, u, again)[0], leaf.grad)


@pytest.mark.parametrize("is_normed", [False, True])
def test_join_and_back(kernels: ModuleType, plan: Plan, is_normed: bool) -> None:
    qkv = (normal(plan.image.count, 3 * WIDTH), normal(plan.text.count, 3 * WIDTH))
    pairs: Any = [(normal(UNITS), normal(UNITS).flip(0) + 1) if is_normed else None] * 2
    found, wanted = (ops.join(qkv, tuple(pairs), HEADS, plan) for ops in (kernels, reference))
    same(found, wanted)
    places = tuple(torch.zeros_like(part) for part in wanted)
    assert kernels.join(qkv, tuple(pairs), HEADS, plan, places)[0] is places[0]
    same(places, wanted)
    grads = tuple(normal(len(part), HEADS, UNITS) * (at + 1) for at, part in enumerate(wanted))
    for stream, pair, rows in zip(qkv, pairs, (plan.image, plan.text), strict=True):
        found, wanted = (ops.join_backward(grads, stream, pair, HEADS, rows) for ops in (kernels, reference))
        same(found, wanted)


def test_take_and_give(kernels: ModuleType, plan: Plan) -> None:
    image, text = normal(plan.image.count, WIDTH), normal(plan.text.count, WIDTH)
    joined = kernels.give(image, text, plan)
    assert torch.equal(joined, reference.give(image, text, plan))
    assert torch.equal(kernels.take(joined, plan.image), image)
    assert torch.equal(reference.take(joined, plan.text), text)
    first = plan.starts[1]
    assert torch.equal(joined[:first], torch.cat([image[:35], text[: first - 35]])), "a sample's image, then its text"
