"""The self-check of the kernels on this GPU: it passes, takes little time, and finds kernels that are broken here."""

import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from sd3_light.core.compiling import why_not_compiled
from sd3_light.families.sd3.fast import kernels, reference
from sd3_light.families.sd3.fast.self_check import KernelShape, check_kernels, kernel_problem

CUDA = torch.device("cuda")
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
SHAPES = [
    KernelShape(24, 64, "bfloat16"),  # sd3_light
    KernelShape(15, 64, "bfloat16"),
    KernelShape(2, 64, "bfloat16"),
    KernelShape(24, 64, "float32"),
    pytest.param(
        KernelShape(24, 64, "bfloat16", fp8=True),
        marks=pytest.mark.skipif(not HAS_FP8, reason="this GPU has no fp8 support"),
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_pass_and_are_remembered(shape: KernelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_problem(shape, CUDA) is None
    started = time.perf_counter()
    assert check_kernels(shape, CUDA, kernels) is None
    assert time.perf_counter() - started < 5, "compiled kernels are compared in about a second"
    monkeypatch.setattr(kernels, "gather_rows", lambda *args: 1.5 * reference.gather_rows(*args))
    assert kernel_problem(shape, CUDA) is None


def test_a_kernel_beyond_the_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.TUNING, "norm_backward", {"R": 1, "STAGES": 16, "num_warps": 4})
    problem = str(check_kernels(KernelShape(64, 64, "float32"), CUDA, kernels))
    assert "the kernel residual_norm_backward does not fit in the shared memory of this GPU: it needs " in problem


def test_broken_kernels_are_named_and_the_fallback_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setitem(kernels.TUNING, "copy", {"R": 3, "num_warps": 4})  # not a power of two
        problem = str(check_kernels(KernelShape(2, 64, "bfloat16"), CUDA, kernels))
    assert "does not compile or run on this GPU" in problem
    real = kernels.scatter_rows
    monkeypatch.setattr(kernels, "scatter_rows", lambda *args: real(*args).roll(1, 0))
    problem = str(check_kernels(KernelShape(2, 64, "bfloat16"), CUDA, kernels))
    assert "the kernel scatter_rows differs from its reference" in problem
    assert why_not_compiled(CUDA) is None
