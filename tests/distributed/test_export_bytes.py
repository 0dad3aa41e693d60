"""Exports do not depend on the layout: one process, two replicas, or two shards."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import SIZES
from sd3_light.export import verb as export
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.train.verb import Resume
from tests.project import Project

ROOT = Path(__file__).parents[2]
STEPS = 2
NOT_COMPARED = {"proof.json", "config.toml"}  # they contain durations, the run's folder and layout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """Two steps in one process, with some frozen weights, exported in half precision."""
    project = cached_project.copy(tmp_path_factory.mktemp("trained") / "project")
    text = project.train_toml.read_text().replace("max_steps = 4", f"max_steps = {STEPS}")
    text = text.replace('save_dtype = "float32"', 'save_dtype = "bfloat16"\nfreeze = ["context_embedder.*"]')
    project.train_toml.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        project.train('output_dir="trained"')
    return project


def resumable(project: Project, name: str) -> Path:
    """Copy the trained run without its export, as after a kill; return its checkpoint."""
    run = project.folder / name
    shutil.copytree(project.folder / "trained", run, ignore=shutil.ignore_patterns("exports"))
    return Path(run / "checkpoints" / checkpoint_name(STEPS))


def resume(project: Project, name: str, parallel: str) -> None:
    """Resume the last checkpoint with two processes: no step is left, but the export is missing."""
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
    assert len(project.events("step", name)) == STEPS, "no further step was trained"


def content(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in NOT_COMPARED}


@pytest.mark.slow  # test_layouts.py covers it too, in fewer launches
def test_every_layout_exports_the_same_bytes(trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, configs, scheduler, facts, card and frozen parts; from the runs and from `sd3-light export`."""
    for parallel in ("ddp", "fsdp2"):
        resume(trained, parallel, parallel)
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    trained.train('output_dir="one"', resume=Resume(resumable(trained, "one")))
    exports = {name: trained.folder / name / "exports" / checkpoint_name(STEPS) for name in ("one", "ddp", "fsdp2")}
    exports["stage"] = export.run(trained.folder / "trained", tmp_path / "stage")
    expected = content(trained.folder / "trained" / "exports" / checkpoint_name(STEPS))
    assert {"transformer/diffusion_pytorch_model.safetensors", "transformer/config.json"} <= set(expected)
    for name, folder in exports.items():
        exported = content(folder)
        assert set(exported) == set(expected), name
        assert not [file for file in expected if exported[file] != expected[file]], name
        assert (folder / "config.toml").is_file()
    proofs = [json.loads((exports[name] / "proof.json").read_text()) for name in ("ddp", "fsdp2")]
    assert proofs[0]["weights_sha256"] == proofs[1]["weights_sha256"]
    assert proofs[0]["picture_sha256"] == proofs[1]["picture_sha256"]


SAVE_SCRIPT = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from sd3_light.config import SIZES, TrainConfig
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.export import of_run as module

out = Path(sys.argv[1])
dist.init_process_group("gloo")
model = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}
table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model}
transformer = new_transformer(SIZES["tiny2"].transformer_config(), 5)
saver = module.Saver.of(TrainConfig.model_validate(table, context={"base": out}), transformer, out / "exports")
mesh = init_device_mesh("cpu", (2,))
for block in transformer.transformer_blocks:
    fully_shard(block, mesh=mesh)
fully_shard(transformer, mesh=mesh)
module.write_folder = lambda path, state, spec, **_: save_file(dict(state), out / f"rank-{dist.get_rank()}.safetensors")
saver.save_full_model("x")
dist.destroy_process_group()
"""


def test_save_full_model_gathers_sharded_weights(tmp_path: Path) -> None:
    """`Saver.save_full_model(name)` on both ranks: rank 0 writes full weights under stock names."""
    (tmp_path / "save.py").write_text(SAVE_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path / "save.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0.safetensors"]
    saved, expected = (
        load_file(tmp_path / "rank-0.safetensors"),
        new_transformer(SIZES["tiny2"].transformer_config(), 5),
    )
    assert set(saved) == set(expected.state_dict())
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.state_dict().items())
