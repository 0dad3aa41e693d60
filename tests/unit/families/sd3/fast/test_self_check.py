"""The self-check of the kernels: what it covers, what it finds, and what it remembers."""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.families.sd3 import fast
from sd3_light.families.sd3.fast import reference, self_check
from sd3_light.families.sd3.fast.fp8 import Fp8Rows
from sd3_light.families.sd3.fast.self_check import KernelShape, cases, check_kernels, kernel_problem
from tests.modules import load_module

CPU = torch.device("cpu")
SHAPES = {
    "plain": KernelShape(3, 8, "bfloat16"),
    "fp8": KernelShape(4, 8, "bfloat16", fp8=True),
    "float32": KernelShape(3, 8, "float32"),
}
PLAIN = SHAPES["plain"]


class TritonError(Exception):
    pass


class CompilationError(TritonError):
    pass


class OutOfResources(TritonError):
    def __init__(self, required: int, limit: int, name: str) -> None:
        super().__init__(f"out of resource: {name}, Required: {required}, Hardware limit: {limit}.")
        self.required, self.limit, self.name = required, limit, name


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU's name, Triton's errors, an empty cache folder, and small inputs."""
    torch.set_num_threads(1)
    triton, errors = types.ModuleType("triton"), types.ModuleType("triton.errors")
    vars(triton)["__version__"] = "3.6.0"
    vars(errors)["TritonError"] = TritonError
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.errors", errors)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(self_check, "_IMAGE", 5)
    monkeypatch.setattr(self_check, "_TEXT", 4)
    monkeypatch.setattr(self_check, "_LENGTHS", (3, 4, 2, 1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What the self-check takes for the kernels: the reference, in which tests replace some."""
    kernels = types.SimpleNamespace(**vars(reference))
    monkeypatch.setattr(self_check, "operations", lambda device: kernels)
    return kernels


def raising(error: Exception) -> Any:
    def kernel(*_: Any, **__: Any) -> None:
        raise error

    return kernel


# --- what it covers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulated() -> Iterator[tuple[types.ModuleType, set[str]]]:
    """The kernels on the CPU emulation of Triton, and the names of those that were launched."""

    launched: set[str] = set()
    emulation = load_module("small_triton", Path(__file__).with_name("small_triton.py"))

    class Recorded(emulation.Kernel):  # type: ignore[name-defined,misc]
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.add(self.function.__name__)
            return super().__getitem__(grid)

    modules = emulation.modules()
    modules["triton"].jit = Recorded
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "sd3_light.families.sd3.fast.kernels_fp8", raising=False)
        patch.delattr(fast, "kernels_fp8", raising=False)
        yield load_module("checked_kernels", Path(reference.__file__).with_name("kernels.py")), launched
        del sys.modules["sd3_light.families.sd3.fast.kernels_fp8"], fast.kernels_fp8  # type: ignore[attr-defined]


def test_every_kernel_is_launched_and_passes(emulated: tuple[types.ModuleType, set[str]]) -> None:
    kernels, launched = emulated
    for shape in (PLAIN, SHAPES["fp8"]):
        assert check_kernels(shape, CPU, kernels) is None
    helpers = {"by_row", "store_rows", "_norm_of_heads_backward"}  # called by kernels, never launched
    names = {
        value.function.__name__
        for module in (kernels, kernels.kernels_fp8)
        for value in vars(module).values()
        if hasattr(value, "function")
    }
    assert launched == names - helpers
    assert len(launched) == 11


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_passes(shape: str, operations: Any) -> None:
    assert check_kernels(SHAPES[shape], CPU, operations) is None


# --- what it finds -------------------------------------------------------------------------------

PROBLEMS = {
    "does not compile": (
        "gelu_backward",
        raising(CompilationError("at 3:4:\n    x = tl.load(pointer)\n        ^\nunsupported dtype")),
        "the kernel gelu_backward does not compile or run on this GPU: CompilationError unsupported dtype",
    ),
    "does not fit in shared memory": (
        "join_backward",
        raising(OutOfResources(131072, 101376, "shared memory")),
        "the kernel join_backward does not fit in the shared memory of this GPU: it needs 131072, the GPU has 101376",
    ),
    "disagrees": (
        "gather_rows",
        lambda *args: 1.5 * reference.gather_rows(*args),
        "the kernel gather_rows differs from its reference by 0.36, more than 0.02",
    ),
    "not a number": (
        "scatter_rows",
        lambda *args: torch.nan * reference.scatter_rows(*args),
        "the kernel scatter_rows differs from its reference by inf, more than 0.02",
    ),
    "no C compiler": (
        "join",
        raising(RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")),
        "the kernel join does not compile or run on this GPU: RuntimeError Failed to find C compiler. Please specify",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_broken_kernel_is_named(problem: str, operations: Any) -> None:
    name, kernel, words = PROBLEMS[problem]
    setattr(operations, name, kernel)
    assert str(check_kernels(PLAIN, CPU, operations)).startswith(words)


def wrong_at_the_end(result: Any) -> Any:
    """Change the last element of the last tensor of a result, which stays in its dtype and range."""
    if isinstance(result, torch.Tensor):
        changed = result.clone()
        changed.view(-1)[-1] += 0.5 * (result.float().square().mean().sqrt() + result.view(-1)[-1].abs())
        return changed
    if isinstance(result, Fp8Rows):
        return Fp8Rows(result.values, wrong_at_the_end(result.scale), result.plain)
    *parts, last = result
    return (*parts, wrong_at_the_end(last)) if last is not None else (*wrong_at_the_end(parts), last)


@pytest.mark.parametrize("shape", ["plain", "fp8"])
def test_one_wrong_element_is_found(shape: str, operations: Any) -> None:
    names = {name for name, _, _ in cases(SHAPES[shape], CPU)} - {"attention", "fp8 product", "round_weight"}
    assert len(names) >= 6
    for name in sorted(names):
        kernel = getattr(reference, name)
        setattr(operations, name, lambda *args, kernel=kernel: wrong_at_the_end(kernel(*args)))
        assert f"the kernel {name} differs" in str(check_kernels(SHAPES[shape], CPU, operations))
        setattr(operations, name, kernel)


@pytest.mark.parametrize(("name", "shape"), [("attend", "plain"), ("multiply", "fp8")])
def test_products_are_checked_too(name: str, shape: str, operations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, name, raising(RuntimeError("CUDA error: no kernel image is available")))
    assert "no kernel image" in str(check_kernels(SHAPES[shape], CPU, operations))


# --- what it remembers ---------------------------------------------------------------------------


def verdicts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))[3:]  # without cache/sd3_light/kernels


def test_a_verdict_is_remembered(tmp_path: Path, operations: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert kernel_problem(PLAIN, CPU) is None
    assert "checking the kernels on this GPU (NVIDIA Test)" in capfd.readouterr().err
    (path,) = verdicts(tmp_path)
    facts = json.loads(path.read_text())["facts"]
    assert facts["gpu"] == "NVIDIA Test"
    assert (facts["capability"], facts["triton"], facts["torch"]) == ([8, 6], "3.6.0", torch.__version__)
    operations.join = raising(TritonError("broken"))
    assert kernel_problem(PLAIN, CPU) is None, "it did not run"
    assert capfd.readouterr().err == ""
    path.unlink()
    problem = kernel_problem(PLAIN, CPU)
    assert "broken" in str(problem)
    operations.join = reference.join
    assert kernel_problem(PLAIN, CPU) == problem, "a problem is remembered, too"


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "gpu": (torch.cuda, "get_device_name", lambda device: "NVIDIA Other"),
    "capability": (torch.cuda, "get_device_capability", lambda device: (12, 0)),
    "torch": (torch, "__version__", "9.0"),
    "sources": (self_check, "_sources_hash", lambda: "other"),
}


@pytest.mark.parametrize("key", [*CHANGES, "triton", "shape"])
def test_another_gpu_or_source_is_checked_again(key: str, operations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_problem(PLAIN, CPU) is None
    operations.join = raising(TritonError("checked again"))
    monkeypatch.setattr(
        *CHANGES.get(key, (sys.modules["triton"], "__version__", "9.0" if key == "triton" else "3.6.0"))
    )
    shape = KernelShape(4, 8, "bfloat16") if key == "shape" else PLAIN
    assert "checked again" in str(kernel_problem(shape, CPU))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"problem": null}', b'{"facts": FACTS, "problem": 3}', None])
def test_a_damaged_verdict_is_replaced(content: bytes | None, tmp_path: Path, operations: Any) -> None:
    operations.join = raising(TritonError("broken"))
    problem = kernel_problem(PLAIN, CPU)
    operations.join = reference.join
    (path,) = verdicts(tmp_path)
    facts = json.dumps(json.loads(path.read_text())["facts"]).encode()
    if content is None:
        path.unlink()
        path.mkdir()  # cannot be read or replaced
    else:
        path.write_bytes(content.replace(b"FACTS", facts))
    assert problem is not None
    assert kernel_problem(PLAIN, CPU) is None
    assert content is None or json.loads(path.read_text())["problem"] is None
    assert verdicts(tmp_path) == [path], "no temporary file is left"


def test_a_cache_folder_that_cannot_be_written_is_ignored(tmp_path: Path, operations: Any) -> None:
    (tmp_path / "cache").write_text("a file")
    assert kernel_problem(PLAIN, CPU) is None
    operations.join = raising(TritonError("checked again"))
    assert "checked again" in str(kernel_problem(PLAIN, CPU))


def test_a_full_gpu_is_not_a_verdict(tmp_path: Path, operations: Any) -> None:
    operations.join = raising(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        kernel_problem(PLAIN, CPU)
    assert verdicts(tmp_path) == []


def test_a_crashed_gpu_needs_a_new_start(operations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = raising(RuntimeError("CUDA error: an illegal memory access was encountered"))
    operations.join_backward = crash
    monkeypatch.setattr(torch.cuda, "synchronize", crash)
    with pytest.raises(UserError, match=r"join_backward .* illegal memory access .*; start again, and the stock"):
        kernel_problem(PLAIN, CPU)
    assert "join_backward" in str(kernel_problem(PLAIN, CPU)), "the next start knows it"
