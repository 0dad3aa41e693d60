"""The half-precision encoder computes what the VAE computes, and is used only where its error does not matter."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.config.faults import UserError
from sd3_light.encoding import half_vae
from sd3_light.encoding.half_vae import PrecisionError, TorchOperations, resolve_vae_dtype, to_half_encoder
from sd3_light.encoding.vae import encode_pixels, load_vae
from tests.modules import load_module

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """Load the kernels on the CPU emulation of Triton."""
    emulation = load_module("small_triton", Path(__file__).parents[1] / "families/sd3/fast/small_triton.py")
    before = {name: sys.modules.pop(name, None) for name in emulation.modules()}
    sys.modules.update(emulation.modules())
    yield load_module("vae_kernels_under_test", Path(half_vae.__file__).with_name("vae_kernels.py"))
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(2, 12, 17, 19), (1, 64, 3, 5)])
def test_kernels_equal_their_torch_versions(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    x, y = (normal(*shape).add(index).contiguous(memory_format=torch.channels_last) for index in (3, 0))
    bias, weight, shift = (normal(shape[1], index + 1)[:, 0] for index in range(3))
    actual = kernels.norm_silu(x, bias, 4, weight, shift, 1e-6)
    torch.testing.assert_close(actual, TorchOperations.norm_silu(x, bias, 4, weight, shift, 1e-6), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(kernels.add(x, y, bias), TorchOperations.add(x, y, bias))
    assert actual.is_contiguous(memory_format=torch.channels_last)


def test_kernels_do_not_depend_on_the_rest_of_the_batch(kernels: ModuleType) -> None:
    x, bias, ones = normal(3, 8, 20, 20), normal(8), torch.ones(8)
    together = kernels.norm_silu(x, bias, 4, ones, bias, 1e-6)
    alone = kernels.norm_silu(x[1:2], bias, 4, ones, bias, 1e-6)
    assert torch.equal(together[1:2], alone)


def test_the_converted_encoder_equals_the_stock_one_and_the_decoder_stays_in_float32() -> None:
    pixels = half_vae.probe_pixels()[:1, :64, 100:164]
    with torch.inference_mode():
        stock = encode_pixels(load_vae(DEMO, CPU, torch.float32), pixels)
        converted = to_half_encoder(load_vae(DEMO, CPU, torch.float32), torch.float32)
        assert any(isinstance(module, half_vae._HalfResnet) for module in converted.modules())
        torch.testing.assert_close(encode_pixels(converted, pixels), stock, rtol=1e-4, atol=1e-4)
    vae: Any = to_half_encoder(load_vae(DEMO, CPU, torch.float32), torch.float16)
    assert vae.encoder.conv_in.weight.dtype == torch.float16
    assert {parameter.dtype for parameter in vae.decoder.parameters()} == {torch.float32}


def test_the_error_of_a_precision_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs add up float16 products in float16, so bfloat16 stands for half precision here."""
    monkeypatch.setattr(half_vae, "PROBE_SIDE", 16)
    monkeypatch.setattr(half_vae, "PROBE_IMAGES", 1)
    half, full = (half_vae.measure_precision(DEMO, CPU, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert full.share < 1e-3
    assert 10 * full.error < half.error
    assert half.share < half_vae.ERROR_LIMIT
    assert half.posterior == full.posterior > 0
    assert half.rounding == full.rounding > 0


@pytest.mark.parametrize(
    ("error", "expected"), [(0.1, torch.float16), (0.9, torch.float32), (float("nan"), torch.float32)]
)
def test_auto_is_float16_only_where_it_is_precise(monkeypatch: Any, error: float, expected: torch.dtype) -> None:
    monkeypatch.setattr(half_vae, "measure_precision", lambda *_: PrecisionError(error, 1.0, 0.5))
    monkeypatch.setattr(half_vae, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert resolve_vae_dtype("auto", DEMO, GPU) == expected
    assert resolve_vae_dtype("bfloat16", DEMO, GPU) == torch.bfloat16
    assert resolve_vae_dtype("auto", DEMO, CPU) == torch.float32
    assert resolve_vae_dtype("float16", DEMO, CPU) == torch.float32


def test_kernels_that_do_not_compile_leave_float32(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(*_: object) -> PrecisionError:
        raise RuntimeError("Failed to find C compiler.\nmore")

    errors = ModuleType("triton.errors")
    errors.TritonError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.errors", errors)
    monkeypatch.setattr(half_vae, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(half_vae, "measure_precision", fail)
    assert resolve_vae_dtype("auto", DEMO, GPU) == torch.float32
    assert "do not run on this GPU (RuntimeError: Failed to find C compiler.)" in capsys.readouterr().err


def test_half_precision_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_vae, "find_spec", lambda _: None)
    with pytest.raises(UserError, match='vae_dtype = "bfloat16" needs Triton'):
        resolve_vae_dtype("bfloat16", DEMO, GPU)
    assert resolve_vae_dtype("auto", DEMO, GPU) == resolve_vae_dtype("float32", DEMO, GPU) == torch.float32
