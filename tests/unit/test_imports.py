"""The large libraries that each command imports: an import of torch and diffusers takes seconds."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.project import Project
from tests.warm import REAL_PYTHON

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


def test_check_reads_a_project_without_torch(raw_project: Project) -> None:
    assert imported("check", raw_project.train_toml) == ["pyarrow"]


def test_inspect_reads_a_cache_without_torch(cached_project: Project) -> None:
    assert imported("inspect", cached_project.cache) == ["pyarrow"]


def test_report_reads_a_run_without_torch(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "start", "time": 1.0, "step": 0, "samples": 0}\n', encoding="utf-8")
    assert imported("report", tmp_path, "--out", tmp_path / "page.html") == []
