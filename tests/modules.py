"""Load a Python file that is not part of a package."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch


def load_module(name: str, path: Path) -> ModuleType:
    """Run a file as a module; it is not added to `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def emulated_kernel(path: Path) -> Iterator[ModuleType]:
    """Return a module of Triton kernels that run on the CPU inside the block."""
    emulation = load_module("small_triton", Path(__file__).with_name("unit") / "families/sd3/fast/small_triton.py")
    with patch.dict(sys.modules, emulation.modules()):
        yield load_module(f"{path.stem}_under_test", path)
