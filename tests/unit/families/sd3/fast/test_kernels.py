"""The kernels match their torch reference: every sum, every element, and no write out of bounds."""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.fp8 import E4M3, FLOOR, LARGEST, Fp8Rows, Fp8Weight, RowForm
from sd3_light.families.sd3.fast.row_layout import RowLayout, make_layout
from tests.cases import combinations
from tests.modules import load_module

HEADS, UNITS = 3, 8
WIDTH = HEADS * UNITS  # not a power of two: masks matter
LAYOUTS = {"one-length": None, "real": [5, 1, 40, 33]}


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """Load the kernels on a CPU emulation of Triton, whether or not Triton is installed."""
    emulation = load_module("small_triton", Path(__file__).with_name("small_triton.py"))
    replaced = {**emulation.modules(), "sd3_light.families.sd3.fast.kernels_fp8": None}
    before = {name: sys.modules.pop(name, None) for name in replaced}
    sys.modules.update(emulation.modules())
    package = sys.modules["sd3_light.families.sd3.fast"]
    vars(package).pop("kernels_fp8", None)  # an earlier test's, which an import would find here
    yield load_module("kernels_under_test", Path(reference.__file__).with_name("kernels.py"))
    vars(package).pop("kernels_fp8", None)
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(params=LAYOUTS)
def layout(request: Any) -> RowLayout:
    return make_layout(4, 35, 40, LAYOUTS[request.param], torch.device("cpu"))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_close(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    elif expected is None:
        assert actual is None
    elif isinstance(expected, Fp8Rows):
        assert_close((actual.scale, actual.plain), (expected.scale, expected.plain))
        assert actual.values.dtype == expected.values.dtype == E4M3
        # a value halfway between two e4m3 numbers may round to either
        step = (actual.values.float() - expected.values.float()).abs() / expected.values.float().abs().clamp(min=2**-6)
        assert float(step.max()) <= 0.126
        assert float((step > 0).float().mean()) < 1e-3
    else:
        assert len(actual) == len(expected)
        for actual_part, expected_part in zip(actual, expected, strict=True):
            assert_close(actual_part, expected_part)


def pending(count: int, samples: int) -> reference.PendingUpdate:
    modulation = normal(samples, 6 * WIDTH)
    return normal(count, WIDTH) + 1, normal(WIDTH), modulation[:, 2 * WIDTH : 3 * WIDTH]


@pytest.mark.parametrize("form", get_args(RowForm))
@pytest.mark.parametrize("is_pending", [False, True])
def test_norm(kernels: ModuleType, layout: RowLayout, is_pending: bool, form: RowForm) -> None:
    for rows in (layout.image, layout.text):
        x, modulation = 2 * normal(rows.count, WIDTH), normal(layout.samples, 5 * WIDTH)
        added = pending(rows.count, layout.samples) if is_pending else None
        shift, scale = modulation.chunk(5, dim=1)[:2]
        actual, expected = (ops.residual_norm(x, added, scale, shift, rows, form) for ops in (kernels, reference))
        assert_close(actual, expected)


BOTH = (False, True)


@pytest.mark.parametrize(
    ("layout", "is_pending", "is_stream"),
    combinations(LAYOUTS, BOTH, BOTH, fast=[("one-length", True, True), ("real", True, False), ("real", False, True)]),
    indirect=["layout"],
)
def test_norm_backward(kernels: ModuleType, layout: RowLayout, is_pending: bool, is_stream: bool) -> None:
    kernels.TUNING["norm_backward"]["R"] = kernels.TUNING["norm_backward_fp8"]["R"] = 2  # tiles cross sample ends
    for rows in (layout.image, layout.text):
        x, scale = 2 * normal(rows.count, WIDTH), normal(layout.samples, 5 * WIDTH)[:, :WIDTH]
        dh, gx = normal(WIDTH, rows.count).t().contiguous(), normal(rows.count, WIDTH).flip(0) if is_stream else None
        args = (dh, gx, x, pending(rows.count, layout.samples) if is_pending else None, scale, rows)
        shift = normal(layout.samples, 5 * WIDTH)[:, WIDTH : 2 * WIDTH]
        for recompute_shift, form in product((None, shift), ("plain", "both")):
            actual, expected = (
                ops.residual_norm_backward(*args, recompute_shift, form) for ops in (kernels, reference)
            )
            assert_close(actual, expected)
        assert_close(expected[-1], reference.residual_norm(x, None, scale, shift, rows)[1])


@pytest.mark.parametrize("recompute", [False, True])
def test_gelu_and_its_backward(kernels: ModuleType, recompute: bool) -> None:
    u, dg = 2 * normal(70, 96), normal(96, 70).t().contiguous()
    kernels.TUNING["gelu_backward"]["BLOCK"] = 64  # two blocks of columns, one of them partial
    for form in ("plain", "both"):
        assert_close(kernels.gelu_backward(dg, u, recompute, form), reference.gelu_backward(dg, u, recompute, form))
    leaf = u.clone().requires_grad_()
    reference.gelu(leaf).backward(dg)
    assert_close(reference.gelu_backward(dg, u, recompute)[0], leaf.grad)
    u = 2 * normal(33, 96)
    for form in ("both", "fp8"):
        actual, expected = (ops.gelu(u, form) for ops in (kernels, reference))
        assert_close(actual, expected)


@pytest.mark.parametrize(
    ("layout", "is_normed"),
    combinations(LAYOUTS, BOTH, fast=[("one-length", False), ("real", True)]),
    indirect=["layout"],
)
def test_join_and_join_backward(kernels: ModuleType, layout: RowLayout, is_normed: bool) -> None:
    qkv = (normal(layout.image.count, 3 * WIDTH), normal(layout.text.count, 3 * WIDTH))
    pairs: Any = [(normal(UNITS), normal(UNITS).flip(0) + 1) if is_normed else None] * 2
    actual, expected = (ops.join(qkv, tuple(pairs), HEADS, layout) for ops in (kernels, reference))
    assert_close(actual, expected)
    buffers = tuple(torch.zeros_like(part) for part in expected)
    assert kernels.join(qkv, tuple(pairs), HEADS, layout, buffers)[0] is buffers[0]
    assert_close(buffers, expected)
    grads = tuple(normal(len(part), HEADS, UNITS) * (at + 1) for at, part in enumerate(expected))
    for stream, pair, rows in zip(qkv, pairs, (layout.image, layout.text), strict=True):
        for form in ("plain", "both"):
            actual, expected = (
                ops.join_backward(grads, stream, pair, HEADS, rows, form) for ops in (kernels, reference)
            )
            assert_close(actual, expected)


def test_gather_and_scatter_rows(kernels: ModuleType, layout: RowLayout) -> None:
    image, text = normal(layout.image.count, WIDTH), normal(layout.text.count, WIDTH)
    joined = kernels.scatter_rows(image, text, layout)
    assert torch.equal(joined, reference.scatter_rows(image, text, layout))
    assert torch.equal(kernels.gather_rows(joined, layout.image), image)
    assert torch.equal(reference.gather_rows(joined, layout.text), text)
    for form in ("both", "fp8"):
        assert_close(kernels.gather_rows(joined, layout.text, form), reference.gather_rows(joined, layout.text, form))
    first = layout.starts[1]
    assert torch.equal(joined[:first], torch.cat([image[:35], text[: first - 35]])), "image rows come first"


def odd_rows() -> Tensor:
    """Return rows of zeros, tiny and huge numbers, a single value, NaN and infinity."""
    rows = normal(9, 40)
    rows[0] = 0.0
    rows[1] *= 1e-37
    rows[2] *= 1e37
    rows[3] = 0.0
    rows[3, 5] = -3e38
    rows[4, 7] = float("nan")
    rows[5, 2] = float("inf")
    return rows


def test_extreme_rows_are_rounded(kernels: ModuleType) -> None:
    rows = odd_rows()
    actual, expected = kernels.round_rows(rows), reference.round_rows(rows)
    assert actual.plain is rows
    finite = [0, 1, 2, 3, 6, 7, 8]
    for rounded in (actual, expected):
        values = rounded.dequantized()
        assert torch.isfinite(values[finite]).all(), "no row overflows"
        peak = rows[finite].abs().amax(1, keepdim=True)
        assert bool(((values[finite] - rows[finite]).abs() <= torch.maximum(peak / 28, torch.tensor(FLOOR))).all())
        assert float(values[3, 5]) == pytest.approx(-3e38)
        assert float(rounded.values[6].float().abs().max()) == LARGEST, "a row uses the whole range"
        assert not torch.isfinite(values[4, 7])
        assert not torch.isfinite(values[5, 2]), "a non-finite gradient must stay visible"
    assert_close(
        Fp8Rows(actual.values[finite], actual.scale[finite]), Fp8Rows(expected.values[finite], expected.scale[finite])
    )


@pytest.mark.parametrize("sizes", [[30], [20, 20, 20]], ids=["one", "three"])
def test_weights_are_rounded_both_ways(kernels: ModuleType, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.TUNING["weight"] |= {"N": 16, "K": 8}
    monkeypatch.setattr(kernels.kernels_fp8, "TILE", 8 * 32)  # several tiles of rows, one of them partial
    weights = [(1 + at) * normal(size, 20) for at, size in enumerate(sizes)]
    weights[0][:, 3] = 0.0
    results = []
    for ops in (kernels, reference):
        target = [
            Fp8Rows(torch.empty(n, k, dtype=E4M3), torch.full((n, 1), -1.0))
            for n, k in ((sum(sizes), 20), (20, sum(sizes)))
        ]
        ops.round_weight(weights, Fp8Weight(target[0], target[1]))
        results.append(target)
    assert_close(results[0], results[1])
    stacked, (rows, columns) = torch.cat(weights), results[0]
    torch.testing.assert_close(rows.dequantized(), stacked, rtol=0.0626, atol=1e-2)
    torch.testing.assert_close(columns.dequantized(), stacked.t(), rtol=0.0626, atol=1e-2)
