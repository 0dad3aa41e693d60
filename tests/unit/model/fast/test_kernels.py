"""The kernels compute what their reference does: each sum, each place, nothing outside."""

import importlib.util
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sd3_light.model.fast import reference
from sd3_light.model.fast.fp8 import E4M3, FLOOR, LARGEST, Eight, EightWeight, Form
from sd3_light.model.fast.row_plan import Plan, make_plan

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
    borrowed = {**small.modules(), "sd3_light.model.fast.kernels_fp8": None}
    before = {name: sys.modules.pop(name, None) for name in borrowed}
    sys.modules.update(small.modules())
    yield by_path("kernels_under_test", Path(reference.__file__).with_name("kernels.py"))
    for name, module in before.items():
        sys.modules.pop(name, None)
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
    elif isinstance(wanted, Eight):
        same((found.scale, found.plain), (wanted.scale, wanted.plain))
        assert found.values.dtype == wanted.values.dtype == E4M3
        # a value between two e4m3 numbers may go to either
        step = (found.values.float() - wanted.values.float()).abs() / wanted.values.float().abs().clamp(min=2**-6)
        assert float(step.max()) <= 0.126
        assert float((step > 0).float().mean()) < 1e-3
    else:
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)


def pending(count: int, samples: int) -> reference.Pending:
    modulation = normal(samples, 6 * WIDTH)
    return normal(count, WIDTH) + 1, normal(WIDTH), modulation[:, 2 * WIDTH : 3 * WIDTH]


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("is_pending", [False, True])
def test_norm(kernels: ModuleType, plan: Plan, is_pending: bool, form: Form) -> None:
    for rows in (plan.image, plan.text):
        x, modulation = 2 * normal(rows.count, WIDTH), normal(plan.samples, 5 * WIDTH)
        added = pending(rows.count, plan.samples) if is_pending else None
        shift, scale = modulation.chunk(5, dim=1)[:2]
        found, wanted = (ops.residual_norm(x, added, scale, shift, rows, form) for ops in (kernels, reference))
        same(found, wanted)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_pending", [False, True])
def test_norm_backward(kernels: ModuleType, plan: Plan, is_pending: bool, is_stream: bool) -> None:
    kernels.TUNING["norm_backward"]["R"] = kernels.TUNING["norm_backward_fp8"]["R"] = 2  # over the end of a sample
    for rows in (plan.image, plan.text):
        x, scale = 2 * normal(rows.count, WIDTH), normal(plan.samples, 5 * WIDTH)[:, :WIDTH]
        dh, gx = normal(WIDTH, rows.count).t().contiguous(), normal(rows.count, WIDTH).flip(0) if is_stream else None
        given = (dh, gx, x, pending(rows.count, plan.samples) if is_pending else None, scale, rows)
        shift = normal(plan.samples, 5 * WIDTH)[:, WIDTH : 2 * WIDTH]
        for wanted, form in product((None, shift), ("plain", "both")):
            found, expected = (ops.residual_norm_backward(*given, wanted, form) for ops in (kernels, reference))
            same(found, expected)
        same(expected[-1], reference.residual_norm(x, None, scale, shift, rows)[1])


@pytest.mark.parametrize("again", [False, True])
def test_gelu_backward(kernels: ModuleType, again: bool) -> None:
    u, dg = 2 * normal(70, 96), normal(96, 70).t().contiguous()
    kernels.TUNING["gelu_backward"]["BLOCK"] = 64  # two blocks of columns, one of them cut
    for form in ("plain", "both"):
        same(kernels.gelu_backward(dg, u, again, form), reference.gelu_backward(dg, u, again, form))
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
        for form in ("plain", "both"):
            found, wanted = (ops.join_backward(grads, stream, pair, HEADS, rows, form) for ops in (kernels, reference))
            same(found, wanted)


def test_take_and_give(kernels: ModuleType, plan: Plan) -> None:
    image, text = normal(plan.image.count, WIDTH), normal(plan.text.count, WIDTH)
    joined = kernels.give(image, text, plan)
    assert torch.equal(joined, reference.give(image, text, plan))
    assert torch.equal(kernels.take(joined, plan.image), image)
    assert torch.equal(reference.take(joined, plan.text), text)
    for form in ("both", "eight"):
        same(kernels.take(joined, plan.text, form), reference.take(joined, plan.text, form))
    first = plan.starts[1]
    assert torch.equal(joined[:first], torch.cat([image[:35], text[: first - 35]])), "a sample's image, then its text"


def test_gelu_in_eight_bits(kernels: ModuleType) -> None:
    u = 2 * normal(33, 96)
    for form in ("both", "eight"):
        found, wanted = (ops.gelu(u, form) for ops in (kernels, reference))
        same(found, wanted)


def odd_rows() -> Tensor:
    """Zeros, the smallest and the largest numbers, one among zeros, and what is no number."""
    rows = normal(9, 40)
    rows[0] = 0.0
    rows[1] *= 1e-37
    rows[2] *= 1e37
    rows[3] = 0.0
    rows[3, 5] = -3e38
    rows[4, 7] = float("nan")
    rows[5, 2] = float("inf")
    return rows


def test_any_row_can_be_rounded(kernels: ModuleType) -> None:
    rows = odd_rows()
    found, wanted = kernels.round_rows(rows), reference.round_rows(rows)
    assert found.plain is rows
    finite = [0, 1, 2, 3, 6, 7, 8]
    for eight in (found, wanted):
        wide = eight.wide()
        assert torch.isfinite(wide[finite]).all(), "nothing overflows"
        peak = rows[finite].abs().amax(1, keepdim=True)
        assert bool(((wide[finite] - rows[finite]).abs() <= torch.maximum(peak / 28, torch.tensor(FLOOR))).all())
        assert float(wide[3, 5]) == pytest.approx(-3e38)
        assert float(eight.values[6].float().abs().max()) == LARGEST, "the range is used"
        assert not torch.isfinite(wide[4, 7])
        assert not torch.isfinite(wide[5, 2]), "a gradient that is not finite must be seen to be so"
    same(Eight(found.values[finite], found.scale[finite]), Eight(wanted.values[finite], wanted.scale[finite]))


@pytest.mark.parametrize("sizes", [[30], [20, 20, 20]], ids=["one", "three"])
def test_weights_are_rounded_by_row_and_by_column(
    kernels: ModuleType, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.TUNING["weight"] |= {"N": 16, "K": 8}
    monkeypatch.setattr(kernels.kernels_fp8, "TILE", 8 * 32)  # several tiles of rows, one of them cut
    weights = [(1 + at) * normal(size, 20) for at, size in enumerate(sizes)]
    weights[0][:, 3] = 0.0
    made = []
    for ops in (kernels, reference):
        room = [
            Eight(torch.empty(n, k, dtype=E4M3), torch.full((n, 1), -1.0))
            for n, k in ((sum(sizes), 20), (20, sum(sizes)))
        ]
        ops.round_weight(weights, EightWeight(room[0], room[1]))
        made.append(room)
    same(made[0], made[1])
    whole, (rows, columns) = torch.cat(weights), made[0]
    torch.testing.assert_close(rows.wide(), whole, rtol=0.0626, atol=1e-2)
    torch.testing.assert_close(columns.wide(), whole.t(), rtol=0.0626, atol=1e-2)
