"""Compiled blocks: what they share, their hooks, and what is printed; where torch keeps compiled code."""

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light import system
from sd3_light.core import compiling
from sd3_light.core.compiling import CompileTime, compile_blocks, why_not_compiled
from sd3_light.core.model import tapped
from sd3_light.system import COMPILED_CODE, keep_compiled_code

SHAPES = ((2, 4), (3, 4), (5, 4), (2, 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.second(self.first(tokens).relu())


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Blocks are traced but not turned into machine code; returns the list of what was traced."""
    from torch import _dynamo

    traced: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        traced.append(len(inputs))
        return graph

    monkeypatch.setattr(compiling.torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep its long records
    with _dynamo.config.patch(recompile_limit=8, suppress_errors=False):
        _dynamo.reset()
        yield traced
    _dynamo.reset()


@pytest.mark.parametrize(("per_shape", "count"), [(True, 3), (False, 2)])
def test_blocks_share_code(compiled: list[int], per_shape: bool, count: int) -> None:
    plain = Denoiser()
    inputs = [torch.randn(shape, requires_grad=True) for shape in SHAPES]  # as between blocks
    expected = [plain(values) for values in inputs]
    compile_blocks(plain, per_shape)
    for values, result in zip(inputs, expected, strict=True):
        torch.testing.assert_close(plain(values), result)
    assert len(compiled) == count
    assert list(plain.state_dict()) == list(Denoiser().state_dict())


def test_hooks_run_in_every_pass(compiled: list[int]) -> None:
    denoiser = Denoiser()
    compile_blocks(denoiser)
    for values in (torch.ones(2, 4, requires_grad=True), torch.zeros(2, 4, requires_grad=True)):
        with tapped(list(denoiser.blocks), (2,), lambda output: output) as features:
            denoiser(values)
        torch.testing.assert_close(features[2], denoiser.blocks[1](denoiser.blocks[0](values)))
    assert len(compiled) == 1


def test_blocks_that_do_not_compile_run_and_are_named_once(compiled: list[int], monkeypatch: Any, capfd: Any) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        raise RuntimeError("no code for it\nand more")

    plain = torch.compile.func  # type: ignore[attr-defined]
    monkeypatch.setattr(compiling.torch, "compile", partial(plain, backend=fail))
    monkeypatch.setattr(compiling, "_NAMED", set())
    denoiser, values = Denoiser(), torch.ones(2, 4)
    expected = denoiser(values)
    compile_blocks(denoiser)
    with pytest.raises(RuntimeError, match="no code for it"):
        denoiser(values)
    compile_blocks(denoiser, lenient=True)
    assert torch.equal(denoiser(values), expected)
    for size in (3, 5):
        denoiser(torch.ones(size, 4))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("blocks: some cannot be compiled and run as they are (BackendCompilerFailed: ")
    assert "no code for it" not in line, "only the first line of the reason"


def test_other_records_of_the_compiler_stay_and_failures_are_named_once(monkeypatch: Any, capfd: Any) -> None:
    error = (RuntimeError, RuntimeError("no code"), None)
    for level, details in ((logging.ERROR, None), (logging.INFO, error)):
        assert compiling._name_failure(logging.LogRecord("dynamo", level, "", 1, "text", None, details))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(compiling, "_NAMED", set())
    for _ in range(2):
        assert not compiling._name_failure(logging.LogRecord("dynamo", logging.ERROR, "", 1, "text", None, error))
    assert capfd.readouterr().err.count("(RuntimeError: no code)") == 1


def test_the_time_is_printed_once(compiled: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    watched = CompileTime()
    watched.report()
    denoiser = Denoiser()
    compile_blocks(denoiser)
    denoiser(torch.ones(2, 4))
    assert watched.seconds > 0
    watched.seconds = 31.2
    watched.report()
    watched.report()
    folder = os.environ[COMPILED_CODE]
    assert capfd.readouterr().err == f"blocks: compiled in 31 s; later runs find the code in {folder}\n"


def test_a_machine_without_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(compiling.torch, "compile", fail)
    assert why_not_compiled(torch.device("cpu")) == "torch.compile does not work here (RuntimeError)"


def test_compiled_code_is_kept_in_the_folder_or_the_cache_of_the_user(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(COMPILED_CODE, raising=False)
    (tmp_path / "sd3_light").write_text("a file", encoding="utf-8")
    keep_compiled_code()
    assert COMPILED_CODE not in os.environ, "torch chooses"
    (tmp_path / "sd3_light").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(system.os, "access", lambda path, mode: False)
        keep_compiled_code()
    assert COMPILED_CODE not in os.environ
    keep_compiled_code()
    folder = Path(os.environ[COMPILED_CODE])
    assert folder == tmp_path / "sd3_light" / "compiled"
    assert folder.is_dir()
    monkeypatch.setenv(COMPILED_CODE, "/elsewhere")
    keep_compiled_code()
    assert os.environ[COMPILED_CODE] == "/elsewhere"
