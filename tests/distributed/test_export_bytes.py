"""One checkpoint, exported by one process, by two, and by two that hold halves: the same bytes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.stages import export
from sd3_light.stages.train import Resume

ROOT = Path(__file__).parents[2]
STEPS = 2
Project = Any  # the class is in tests/conftest.py
PROVEN_APART = {"proof.json", "config.toml"}  # seconds; the run's own folder and layout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """Two steps in one process, a part of the weights frozen, saved in half precision."""
    project = cached_project.copy(tmp_path_factory.mktemp("trained") / "project")
    text = project.train_toml.read_text().replace("max_steps = 4", f"max_steps = {STEPS}")
    text = text.replace('save_dtype = "float32"', 'save_dtype = "bfloat16"\nfreeze = ["context_embedder.*"]')
    project.train_toml.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.folder.prove", lambda *_: {})
        project.train('output_dir="trained"')
    return project


def resumable(project: Project, name: str) -> Path:
    """The trained run under another name, as a kill before its export would have left it; its checkpoint."""
    run = project.folder / name
    shutil.copytree(project.folder / "trained", run, ignore=shutil.ignore_patterns("exports"))
    return Path(run / "checkpoints" / checkpoint_name(STEPS))


def resume(project: Project, name: str, parallel: str) -> None:
    """Two processes go on from the last checkpoint: no step is left, but its export is due and not there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "train.py"), "--config", str(project.train_toml)]
    command += ["--resume_from_checkpoint", str(resumable(project, name))]
    command += ["--set", f'output_dir="{name}"', "--set", f'parallel="{parallel}"', "--set"]
    command += ["micro_batch_size_per_gpu=2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    (event,) = project.events("resume", name)
    assert (event["world"], event["step"], event["engine"]) == (2, STEPS, f"torch {parallel}")
    assert len(project.events("step", name)) == STEPS, "nothing more was trained"


def content(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in PROVEN_APART}


def test_every_layout_exports_the_same_bytes(trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, configs, scheduler, facts, card and frozen parts; by the runs and by `sd3-light export`."""
    for parallel in ("ddp", "fsdp2"):
        resume(trained, parallel, parallel)
    monkeypatch.setattr("sd3_light.export.folder.prove", lambda *_: {})
    trained.train('output_dir="one"', resume=Resume(resumable(trained, "one")))
    exports = {name: trained.folder / name / "exports" / checkpoint_name(STEPS) for name in ("one", "ddp", "fsdp2")}
    exports["stage"] = export.run(trained.folder / "trained", tmp_path / "stage")
    whole = content(trained.folder / "trained" / "exports" / checkpoint_name(STEPS))
    assert {"transformer/diffusion_pytorch_model.safetensors", "transformer/config.json"} <= set(whole)
    for name, folder in exports.items():
        found = content(folder)
        assert set(found) == set(whole), name
        assert not [file for file in whole if found[file] != whole[file]], name
        assert (folder / "config.toml").is_file()
    proofs = [json.loads((exports[name] / "proof.json").read_text()) for name in ("ddp", "fsdp2")]
    assert proofs[0]["weights_sha256"] == proofs[1]["weights_sha256"]
    assert proofs[0]["picture_sha256"] == proofs[1]["picture_sha256"]
