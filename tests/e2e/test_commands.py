"""The commands, each in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

from tests.project import Project
from tests.warm import REAL_PYTHON

ROOT = Path(__file__).parents[2]
STALE = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}


def run(*command: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_plain_train_py_ignores_stale_launcher_variables(project: Project, tmp_path: Path) -> None:
    """From another folder, with relative paths in the TOML, a proven export, and output on stderr only."""
    train_py = ROOT / "train.py"
    done = run(
        sys.executable, train_py, "--config", project.train_toml, "--set", "max_steps=2", folder=tmp_path, **STALE
    )
    assert done.returncode == 0, done.stderr
    assert [event["world"] for event in project.events("start")] == [1]
    assert sorted(project.losses()) == [1, 2]
    assert (project.run / "exports" / "step-00000002" / "proof.json").is_file()
    assert "export at step 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [project.folder], "nothing is written to the working folder"


def test_a_user_error_exits_with_code_2(tmp_path: Path) -> None:
    command = Path(REAL_PYTHON).with_name("sd3-light")
    done = run(command, "train", "nowhere.toml", folder=tmp_path)
    assert done.returncode == 2
    assert "nowhere.toml" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
