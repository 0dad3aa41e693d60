"""No process that we start executes a file of its working directory (`tests/e2e/test_working_directory.py`: a whole
run)."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sd3_light
from sd3_light.other_process import start_training
from tests.planted import plant
from tests.waiting import HANG_SECONDS
from tests.warm import REAL_PYTHON

PACKAGE = Path(sd3_light.__file__).parent
ROOT = PACKAGE.parent


@pytest.mark.parametrize("python", [REAL_PYTHON, None])
def test_training_executes_nothing_of_its_folder(tmp_path: Path, monkeypatch: Any, python: str | None) -> None:
    executed = plant(tmp_path / "stranger")
    monkeypatch.chdir(tmp_path / "stranger")
    monkeypatch.setattr(sys, "executable", python or sys.executable)
    code = start_training(Path("no.toml"), [], tmp_path / "run").wait(HANG_SECONDS)
    printed = (tmp_path / "run" / "console.txt").read_text(encoding="utf-8")
    assert not executed.exists(), executed.read_text(encoding="utf-8")
    assert (code, "no.toml" in printed) == (2, True), printed


def test_a_checkout_that_is_not_installed_starts_its_own_code(tmp_path: Path) -> None:
    """In the place of the installed package, whose version differs."""
    checkout, stranger = tmp_path / "checkout", tmp_path / "stranger"
    executed = plant(stranger)
    shutil.copytree(PACKAGE, checkout / "sd3_light", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    (checkout / "sd3_light" / "__init__.py").write_text('__version__ = "0.0.7"\n', encoding="utf-8")
    command = [sys.executable, "-P", str(checkout / "sd3_light" / "__main__.py"), "--version"]
    done = subprocess.run(command, cwd=stranger, capture_output=True, text=True, check=False)
    assert "0.0.7" in done.stdout, done.stderr
    assert not executed.exists()


@pytest.mark.parametrize("command", ["main", "launch"])
def test_processes_that_libraries_start_do_not_import_from_the_working_directory(command: str) -> None:
    """Such as the resource tracker of multiprocessing and the services of trackers, which are `python -c` or `-m`."""
    code = "import os, sys; print(os.environ.get('PYTHONSAFEPATH'))"
    call = {"main": "main()", "launch": "launch(['--config', 'no.toml'])"}[command]
    script = (
        "import atexit, subprocess, sys\n"
        f"atexit.register(lambda: subprocess.run([sys.executable, '-c', {code!r}]))\n"
        f"from sd3_light.cli import launch, main\nsys.argv[1:] = ['train', 'no.toml']\n{call}\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([REAL_PYTHON, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["1"], done.stderr


def test_every_interpreter_that_we_start_ignores_the_working_directory() -> None:
    """`-m` and `-c` put it before all libraries. A script's own folder is used beside it by scripts and benchmarks."""
    faults = []
    for path in [file for folder in (PACKAGE, ROOT / "scripts", ROOT / "benchmarks") for file in folder.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.List):
                continue
            parts = [ast.unparse(part) for part in node.elts]
            if "sys.executable" not in parts:
                continue
            follows = parts[parts.index("sys.executable") + 1 :][:1]
            if follows != ["'-P'"] and (PACKAGE in path.parents or follows in (["'-m'"], ["'-c'"])):
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno}: add -P after sys.executable")
    assert not faults, "\n".join(faults)
