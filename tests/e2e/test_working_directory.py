"""A whole run in a stranger's folder: none of its processes executes a file that lies there."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.planted import plant
from tests.project import Project
from tests.warm import REAL_PYTHON

WORKERS = ("caching_num_workers=2", "num_dataloader_workers=2", "max_steps=2")
COMMAND = [REAL_PYTHON, str(Path(REAL_PYTHON).with_name("sd3-light"))]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(folder: Path, *command: object, **variables: str) -> None:
    executed = plant(folder)
    environment = {**os.environ, **variables}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert not executed.exists(), executed.read_text(encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_workers_and_the_proof_execute_nothing_of_the_working_directory(fresh_project: Project, tmp_path: Path) -> None:
    """Workers that decode images, workers of the data loader, and the process that proves the export."""
    settings = [f"--set={setting}" for setting in WORKERS]
    run(tmp_path / "stranger", *COMMAND, "train", fresh_project.train_toml, *settings)
    assert (fresh_project.run / "exports").is_dir()


def test_the_workers_of_ray_execute_nothing_of_the_working_directory(fresh_project: Project, tmp_path: Path) -> None:
    """Ray puts the working directory of its driver first on the path of its workers."""
    pytest.importorskip("ray", reason="caching on Ray needs ray")
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets have short paths
    try:
        variables = {"RAY_TMPDIR": folder, "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "300"}
        run(tmp_path / "stranger", *COMMAND, "cache", "../project/train.toml", "--ray", "local", **variables)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert (fresh_project.cache / "manifest.json").is_file()
