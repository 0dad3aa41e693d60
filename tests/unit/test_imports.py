"""The large libraries that each command imports (torch and diffusers take seconds), and what is set up before."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.project import Project
from tests.warm import REAL_PYTHON

ROOT = Path(__file__).parents[2]
LARGE = ("accelerate", "diffusers", "peft", "pyarrow", "torch", "transformers")
RUN = f"""
import atexit, sys
atexit.register(lambda: print("imported", *sorted(set({LARGE}) & set(sys.modules))))
from sd3_light.cli import main
main()
"""


def imported(*arguments: object) -> list[str]:
    """Run a command and return the large libraries that it imports."""
    command = [REAL_PYTHON, "-c", RUN, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help")], ids=" ".join)
def test_help_imports_no_large_library(arguments: tuple[str, ...]) -> None:
    assert imported(*arguments) == []


def test_commands_without_torch(cached_project: Project, tmp_path: Path) -> None:
    new = ("new", "icons", "--data", cached_project.images, "--model", cached_project.model, "--out", tmp_path / "new")
    check, inspect = ("check", cached_project.train_toml), ("inspect", cached_project.cache)
    for command in (check, (*new, "--gpu-memory", 24), inspect):
        assert imported(*command) == ["pyarrow"], command[0]
    (tmp_path / "log.jsonl").write_text('{"event": "start", "time": 1.0, "step": 0, "samples": 0}\n', encoding="utf-8")
    assert imported("report", tmp_path, "--out", tmp_path / "page.html") == []


BEFORE_TORCH = """
import gc, os, runpy, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            policies = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
            print(*(f"{policy}={os.environ.get(policy)}" for policy in policies), gc.isenabled())
            sys.stdout.flush()
            os._exit(7)

sys.meta_path.insert(0, Finder())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OURS = "OMP_WAIT_POLICY=None GOMP_SPINCOUNT=20000 KMP_BLOCKTIME=1 False"


def before_torch(*arguments: object, **environment: str) -> str:
    """Start a command and return the wait policies, and whether garbage is collected, when it imports torch."""
    policies = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    inherited = {name: value for name, value in os.environ.items() if name not in policies}
    command = [REAL_PYTHON, "-c", BEFORE_TORCH, *map(str, arguments)]
    variables = {**inherited, **environment}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert process.returncode == 7, process.stderr
    return process.stdout.strip()


def test_idle_threads_do_not_spin_for_long(raw_project: Project) -> None:
    """OpenMP reads the variables when torch is imported."""
    assert before_torch(ROOT / "sd3_light", "train", raw_project.train_toml) == OURS
    assert before_torch(ROOT / "train.py", "--config", raw_project.train_toml) == OURS
    arguments = (ROOT / "sd3_light", "cache", raw_project.train_toml)
    set_by_user = before_torch(*arguments, OMP_WAIT_POLICY="active")
    assert set_by_user == "OMP_WAIT_POLICY=active GOMP_SPINCOUNT=None KMP_BLOCKTIME=None False"
