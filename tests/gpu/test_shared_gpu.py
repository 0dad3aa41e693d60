"""Two processes on one GPU, over gloo: they train, checkpoint and export like one."""

import subprocess
from pathlib import Path

import pytest
import torch

from sd3_light.checkpoint.reading import open_checkpoint
from tests.project import Project
from tests.warm import REAL_PYTHON

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_on_one_gpu_train_like_one(project: Project, parallel: str) -> None:
    project.train('output_dir="alone"', 'model.transformer_dtype="float32"')
    # a new interpreter: what imports DeepSpeed has initialised CUDA, which a fork cannot use
    command = [REAL_PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "train.py"), "--config", str(project.train_toml), "--set", 'output_dir="shared"']
    command += ["--set", f'parallel="{parallel}"']
    command += ["--set", "micro_batch_size_per_gpu=2", "--set", 'model.transformer_dtype="float32"']
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    if torch.cuda.device_count() == 1:
        assert "2 processes share 1 GPU(s)" in done.stderr
    (start,) = project.events("start", "shared")
    assert (start["world"], start["engine"]) == (2, f"torch {parallel}")
    assert list(project.losses("shared").values()) == pytest.approx(list(project.losses("alone").values()), rel=1e-4)
    actual, expected = (
        open_checkpoint(max((project.folder / run / "checkpoints").iterdir())) for run in ("shared", "alone")
    )
    assert actual.shapes == expected.shapes
    for name in actual.shapes:
        if name.startswith("param/"):
            assert torch.allclose(actual.tensor(name), expected.tensor(name), atol=1e-4), name
    (export,) = (project.folder / "shared" / "exports").iterdir()
    assert (export / "proof.json").is_file()
