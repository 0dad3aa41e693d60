"""Linear layers in int8 and fp8: rounding errors, gradients, compiled, in host memory; products as on a GPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sd3_light.model import linear8
from sd3_light.model.block_swap import BlockSwap
from sd3_light.model.linear8 import Linear8, has_fp8, round_rows

CPU = torch.device("cpu")
FORMATS = {"int8": False, "fp8": True}
STORAGE = {"int8": 0.01, "fp8": 0.03}
"""Relative errors of a product with a rounded weight."""
BOTH = {"int8": 0.015, "fp8": 0.045}
"""Those with a rounded input, too."""


def layers(form: str, bias: bool = True) -> tuple[nn.Linear, Linear8]:
    torch.manual_seed(0)
    layer = nn.Linear(256, 192, bias)
    return layer, Linear8(layer, CPU, FORMATS[form])


def error(value: Tensor, exact: Tensor) -> float:
    return ((value.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in 8 bits on the CPU, with stand-ins of the products of a GPU."""

    def fits(rows: Tensor, weight: Tensor) -> bool:
        return rows.shape[0] >= 17

    def int_product(left: Tensor, right: Tensor) -> Tensor:
        return left.int() @ right.int()

    def scaled(left: Tensor, right: Tensor, first: Tensor, second: Tensor, out_dtype: Any, **_: Any) -> Tensor:
        assert left.dtype == right.dtype == torch.float8_e4m3fn
        assert first.shape == (len(left), 1)
        assert second.shape == (1, right.shape[1])
        assert right.stride(0) == 1, "by columns"
        return ((left.float() * first) @ (right.float() * second)).to(out_dtype)

    monkeypatch.setattr(linear8, "_fits", fits)
    monkeypatch.setattr(torch, "_int_mm", int_product)
    monkeypatch.setattr(torch, "_scaled_mm", scaled)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_a_rounded_weight_changes_the_output_little(form: str, bias: bool) -> None:
    layer, rounded = layers(form, bias)
    x = torch.randn(2, 9, 256)
    assert rounded(x).shape == (2, 9, 192)
    assert 1e-4 < error(rounded(x), layer(x)) < STORAGE[form]
    assert error(rounded.dequantize(), layer.weight) < STORAGE[form]
    assert rounded.weight.element_size() == 1
    assert not rounded.weight.is_floating_point()
    assert error(nn.functional.linear(x, rounded.dequantize(), rounded.bias), rounded(x)) < 1e-5


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("form", FORMATS)
def test_products_in_8_bits_round_the_rows_of_the_input(form: str) -> None:
    layer, rounded = layers(form)
    x = torch.randn(3, 9, 256, dtype=torch.bfloat16) * torch.logspace(-4, 4, 9, dtype=torch.bfloat16)[:, None]
    with torch.no_grad():
        bare = rounded(x).float() - layer.bias
        exact = layer(x.float()) - layer.bias
    assert rounded(x).dtype == torch.bfloat16
    for row in range(9):  # each row has its own scale; the smallest ones vanish beside the bias
        if row > 3:
            assert 1e-3 < error(bare[:, row], exact[:, row]) < BOTH[form], row


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("form", FORMATS)
def test_non_finite_values_stay_visible(form: str) -> None:
    _, rounded = layers(form)
    for value in (float("nan"), float("inf")):
        x = torch.randn(20, 256, dtype=torch.bfloat16)
        x[3, 5] = value
        out = rounded(x)
        assert not out[3].isfinite().all()
        assert out[[0, 1, 2, 4]].isfinite().all()
    assert rounded(torch.zeros(20, 256, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_rounded_weight(form: str, dtype: torch.dtype) -> None:
    _, rounded = layers(form)
    x = torch.randn(2, 20, 256, dtype=dtype, requires_grad=True)
    gradient = torch.randn(2, 20, 192, dtype=dtype)
    rounded(x).backward(gradient)
    assert x.grad.dtype == dtype
    assert error(x.grad, gradient.float() @ rounded.dequantize()) < (1e-5 if dtype == torch.float32 else 0.01)
    assert all(weight.grad is None for weight in rounded.parameters())


class _LargeResults(TorchDispatchMode):
    """Counts operations whose results have as many elements as the input, by name, without views."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.elements and not func.is_view:
            self.names[func._schema.name.removeprefix("aten::").removesuffix("_")] += 1
        return result


@pytest.mark.parametrize("form", FORMATS)
def test_rounding_reads_and_writes_an_input_in_few_passes(form: str) -> None:
    """Beside its largest values: one product, one rounding. Gradients are scaled in one pass."""
    rows = torch.randn(64, 320, dtype=torch.bfloat16)
    dtype = torch.float8_e4m3fn if FORMATS[form] else torch.int8
    with _LargeResults(rows.numel()) as large:
        round_rows(rows, dtype)
    assert large.names == {"mul": 1, "_to_copy": 1, **({"round": 1} if dtype == torch.int8 else {})}
    _, rounded = layers(form)
    x = torch.randn(20, 256, dtype=torch.bfloat16, requires_grad=True)
    out = rounded(x)
    with _LargeResults(out.numel()) as large:
        out.backward(torch.ones_like(out))
    assert large.names["mul"] == 1
    assert large.names["_to_copy"] == 0


@pytest.mark.parametrize("form", FORMATS)
def test_it_can_be_compiled_and_its_weight_swapped(form: str) -> None:
    _, rounded = layers(form)
    torch.compiler.reset()
    x = torch.randn(20, 256, requires_grad=True)
    results = []
    for function in (rounded, torch.compile(rounded, backend="aot_eager", fullgraph=True)):
        out = function(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        results.append((out, gradient))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-4)
    blocks = nn.ModuleList(nn.Sequential(layers(form)[1]) for _ in range(3))
    x = torch.randn(4, 256)
    expected = [block(x) for block in blocks]
    swap = BlockSwap(CPU)
    for block in blocks:
        swap.add(block)
    swap.start()
    assert swap.host_bytes >= 3 * 256 * 192
    assert all(torch.equal(block(x), out) for block, out in zip(blocks, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_rows_use_the_whole_range(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 64) * torch.logspace(-20, 20, 7)[:, None]
    values, scale = round_rows(rows, dtype)
    largest = {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
    assert (values.float().abs().amax(1) == largest).all()
    assert torch.allclose(values.float().abs().amax(1, keepdim=True) * scale, rows.abs().amax(1, keepdim=True))
    assert not has_fp8(CPU)
    assert Linear8(nn.Linear(4, 4), CPU).weight.dtype == torch.int8
