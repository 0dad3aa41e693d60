"""Run the marked commands of the docs, in order, in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.warm import REAL_PYTHON

SHORT = {"sd3-light (sample|evaluate)": " --steps 4"}
SHORT["sd3-light demo"] = " --steps 2 --more-steps 2 --pictures 24 --prompts 2"
"""Options that make commands quick."""
DEMO = "docs/evidence/demo.md"
MORE = ("docs/start/guide.md", "docs/formats/export.md", "docs/reference/training.md")


def shortened(block: str) -> str:
    """Return the block with fewer steps and fewer prompts to score."""
    for start, options in SHORT.items():
        block = re.sub(rf"^{start}.*$", rf"\g<0>{options}", block, flags=re.MULTILINE)
    return block.replace("--prompts 16", "--prompts 2")


def run_block(block: str, folder: Path) -> str:
    """Run a bash block as a reader would, stop at the first failing command, and return the output."""
    own = [str(Path(python).parent) for python in (sys.executable, REAL_PYTHON)]
    path = os.pathsep.join([*own, os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "COLUMNS": "200"}  # wide, so that no table breaks a word
    command = ["bash", "-euxo", "pipefail", "-c", shortened(block)]
    keys: dict[str, Any] = {"cwd": folder, "env": environment, "timeout": 1500}
    result = subprocess.run(command, **keys, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, page: Any) -> tuple[Path, list[str]]:
    """The folder where the blocks of the first two pages ran, and the output of each."""
    blocks = page("docs/start/install.md").to_run + page(DEMO).to_run
    assert len(blocks) == 2
    folder = tmp_path_factory.mktemp("demo")
    return folder, [run_block(block, folder) for block in blocks]


@pytest.mark.timeout(1800)
def test_the_demo_runs(printed: tuple[Path, list[str]]) -> None:
    folder, outputs = printed
    output = "\n".join(outputs)
    for row in ("untrained", "pretrained here", "shipped base"):
        assert row in output, f"the demo's table has no row {row!r}"
    assert "Usage" in output
    assert (folder / "demo_run" / "grid.png").is_file()
    assert (folder / "demo_run" / "my_model" / "proof.json").is_file()
    assert (folder / "demo_run" / "images" / "00001.png").is_file()
    assert [path.name for path in folder.iterdir()] == ["demo_run"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MORE)
def test_other_pages_run_in_its_folder(printed: tuple[Path, list[str]], page: Any, name: str) -> None:
    blocks = page(name).to_run
    if not blocks:
        pytest.skip(f"{name} has no block to run")
    for block in blocks:
        run_block(block, printed[0])
