"""The export stage: which weights it takes, from a checkpoint or rebuilt from snapshots, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sd3_light.config import load_config, resolved_toml
from sd3_light.config.faults import UserError
from sd3_light.export.single_file import transformer_from_single_file
from sd3_light.model.start import where_weights_start
from sd3_light.optim.ema import Averages
from sd3_light.optim.post_hoc_ema import power_tracks, snapshot_metadata
from sd3_light.optim.power_function import gamma_from_sigma_rel
from sd3_light.stages import export
from sd3_light.training.sd3 import starting_transformer
from tests.checkpoints import write_checkpoint
from tests.project import Project

TRACKS = [{"name": "short", "power_width": 0.05}, {"name": "long", "power_width": 0.1}]
STEPS, SNAPSHOTS = 160, 8
MOVED = "transformer_blocks.0.attn.to_q.weight"


class Trained:
    """A run's folder as training leaves it, of weights that walk on a known path."""

    def __init__(self, project: Project) -> None:
        project.train_toml.write_text(
            project.train_toml.read_text()
            + "".join(f'[[ema.track]]\nname = "{t["name"]}"\npower_width = {t["power_width"]}\n' for t in TRACKS)
        )
        loaded = load_config(project.train_toml)
        self.run, self.config = project.run, loaded.train
        self.run.mkdir()
        (self.run / "config.toml").write_text(resolved_toml(loaded))
        transformer = starting_transformer(where_weights_start(self.config.model), self.config.seed)
        self.weights = {name: p.detach().clone() for name, p in transformer.named_parameters()}
        self.start = self.weights[MOVED].clone()
        assert self.start.any()
        self.averages = Averages(self.weights, self.config.ema)

    def train(self) -> "Trained":
        for step in range(1, STEPS + 1):
            self.weights[MOVED].copy_(self.at(step))
            self.averages.update(self.weights, step)
            if step % (STEPS // SNAPSHOTS) == 0:
                self.snapshot(step)
            if step in (STEPS // 2, STEPS):
                self.checkpoint(step)
        return self

    def at(self, step: int) -> Tensor:
        return self.start * (1 + step / STEPS) ** 2

    def snapshot(self, step: int) -> None:
        tensors = {
            f"ema.{track}/{name}": tensor.half()
            for track in power_tracks(self.config.ema)
            for name, tensor in self.averages.tracks[track].shadow.items()
        }
        progress = {"step": step, "samples": 4 * step, "skipped": 0, "position": step}
        facts = {**snapshot_metadata(self.config.ema, step), "progress": progress}
        write_checkpoint(self.run / "ema", step, tensors, facts)

    def checkpoint(self, step: int) -> None:
        tensors = {f"param/{name}": tensor for name, tensor in self.weights.items()}
        for track, kept in self.averages.tracks.items():
            kind = "ema" if track == "ema" else f"ema.{track}"
            tensors |= {f"{kind}/{name}": tensor for name, tensor in kept.shadow.items()}
        progress = {"step": step, "samples": 4 * step, "skipped": 0, "position": step}
        write_checkpoint(self.run / "checkpoints", step, tensors, {"progress": progress})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Trained:
    return Trained(raw_project.copy(tmp_path_factory.mktemp("export") / "project")).train()


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof's process: it belongs to sd3_light/export."""
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})


def exported(folder: Path) -> tuple[Tensor, dict[str, Any]]:
    state = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return state[MOVED], json.loads((folder / "sd3_light.json").read_text())


# --- from a checkpoint ------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, "ema", "raw", "short", "long"])
def test_every_kind_of_weights_can_be_exported(trained: Trained, tmp_path: Path, weights: str | None) -> None:
    tensor, facts = exported(export.run(trained.run, tmp_path / "out", weights=weights))
    name = weights or "ema"
    shadows = {track: kept.shadow[MOVED] for track, kept in trained.averages.tracks.items()}
    assert torch.equal(tensor, {"raw": trained.at(STEPS), **shadows}[name])
    assert (facts["weights"], facts["step"], facts["samples"]) == (name, STEPS, 4 * STEPS)


def test_an_older_checkpoint(trained: Trained, tmp_path: Path) -> None:
    older = trained.run / "checkpoints" / f"step-{STEPS // 2:08d}"
    tensor, facts = exported(export.run(trained.run, tmp_path / "out", older, "raw"))
    assert torch.equal(tensor, trained.at(STEPS // 2))
    assert facts["step"] == STEPS // 2


def test_an_unknown_average_is_refused_with_those_there_are(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no 'best'; it has raw, ema, long, short"):
        export.run(trained.run, tmp_path / "out", weights="best")
    assert not (tmp_path / "out").exists()


# --- rebuilt from snapshots -------------------------------------------------------------------


def directly(trained: Trained, length: float, time: int) -> Tensor:
    """The average as a running one of that length would have been."""
    exponent = gamma_from_sigma_rel(length) + 1
    shares = [(step / time) ** exponent - ((step - 1) / time) ** exponent for step in range(1, time + 1)]
    return sum((share * trained.at(step).double() for step, share in enumerate(shares, start=1)), torch.zeros(()))


@pytest.mark.parametrize("length", [0.04, 0.07, 0.15])
def test_an_average_of_any_length_is_rebuilt(trained: Trained, tmp_path: Path, length: float) -> None:
    tensor, facts = exported(export.run(trained.run, tmp_path / "out", ema_length=length))
    wanted = directly(trained, length, STEPS)
    error = (tensor.double() - wanted).norm() / wanted.norm()
    nearest = min((directly(trained, width, STEPS) - wanted).norm() / wanted.norm() for width in (0.05, 0.1))
    assert error < 1e-3
    assert error < nearest / 5
    assert (facts["weights"], facts["step"], facts["samples"]) == (f"average of length {length:g}", STEPS, 4 * STEPS)


def test_the_weights_that_did_not_move_are_kept(trained: Trained, tmp_path: Path) -> None:
    export.run(trained.run, tmp_path / "out", ema_length=0.07)
    state = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    kept = trained.weights["context_embedder.weight"].half().float()
    torch.testing.assert_close(state["context_embedder.weight"], kept, rtol=1e-6, atol=0)


def test_as_of_an_older_checkpoint(trained: Trained, tmp_path: Path) -> None:
    older = trained.run / "checkpoints" / f"step-{STEPS // 2:08d}"
    tensor, facts = exported(export.run(trained.run, tmp_path / "out", older, ema_length=0.07))
    wanted = directly(trained, 0.07, STEPS // 2)
    assert (tensor.double() - wanted).norm() / wanted.norm() < 2e-3
    assert facts["step"] == STEPS // 2


@pytest.mark.parametrize("length", [0.001, 0.01, 0.27, 0.5, 0.0, -1.0])
def test_a_length_that_cannot_be_had_is_refused_with_the_range(trained: Trained, tmp_path: Path, length: float) -> None:
    with pytest.raises(UserError, match=r"16 snapshots of this run give lengths from 0\.030 to 0\.21\d"):
        export.run(trained.run, tmp_path / "out", ema_length=length)


def test_without_snapshots_it_says_what_to_do(trained: Trained, tmp_path: Path) -> None:
    bare = tmp_path / "run"
    bare.mkdir()
    (bare / "config.toml").write_text((trained.run / "config.toml").read_text())
    with pytest.raises(UserError, match=r"no snapshots to rebuild .* \[\[ema.track\]\] that has power_width"):
        export.run(bare, tmp_path / "out", ema_length=0.1)


def test_a_half_written_snapshot_is_left_out(fresh_project: Project, tmp_path: Path) -> None:
    trained = Trained(fresh_project).train()
    next((trained.run / "ema" / f"step-{STEPS:08d}").glob("*.safetensors")).unlink()
    _, facts = exported(export.run(trained.run, tmp_path / "out", ema_length=0.07))
    assert facts["step"] == STEPS - STEPS // SNAPSHOTS


def test_a_length_and_weights_exclude_each_other(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exclude each other"):
        export.run(trained.run, tmp_path / "out", weights="ema", ema_length=0.1)


# --- what goes along --------------------------------------------------------------------------


def test_the_config_of_the_run_is_in_it(trained: Trained, tmp_path: Path) -> None:
    out = export.run(trained.run, tmp_path / "out")
    assert (out / "config.toml").read_text() == (trained.run / "config.toml").read_text()


def test_an_export_is_pushed_when_it_is_there(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(export, "check_push", lambda repo: done.append(f"may {repo}"))

    def push(folder: Path, repo: str) -> str:
        assert (folder / "model_index.json").is_file()
        done.append(f"{folder.name} to {repo}")
        return "https://huggingface.co/me/model"

    monkeypatch.setattr(export, "push", push)
    export.run(trained.run, tmp_path / "out", push_to_hub="me/model")
    assert done == ["may me/model", "out to me/model"]


def test_who_may_not_push_learns_it_before_the_work(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--push-to-hub no/such/name: no name of a repository"):
        export.run(trained.run, tmp_path / "out", push_to_hub="no/such/name")
    assert not (tmp_path / "out").exists()


# --- what is refused --------------------------------------------------------------------------


def spoiled(trained: Trained, run: Path, old: str, new: str) -> Path:
    """The run with another config."""
    shutil.copytree(trained.run / "checkpoints", run / "checkpoints")
    text = (trained.run / "config.toml").read_text()
    assert old in text
    (run / "config.toml").write_text(text.replace(old, new))
    return run


def test_trained_weights_that_are_not_there_are_named(trained: Trained, tmp_path: Path) -> None:
    """A config of three blocks with the weights of two: the third would be saved as it was drawn."""
    run = spoiled(trained, tmp_path / "run", 'size = "tiny2"', 'size = "tiny2"\nnum_layers = 3')
    with pytest.raises(UserError, match=r"missing transformer_blocks\.1\.attn\.to_add_out\.weight.* in all"):
        export.run(run, tmp_path / "out", weights="raw")
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_train_are_not_expected(trained: Trained, tmp_path: Path) -> None:
    run = spoiled(trained, tmp_path / "run", "freeze = []", 'freeze = ["context_embedder.*"]')
    with pytest.raises(UserError, match=r"unexpected context_embedder\.bias; unexpected context_embedder\.weight"):
        export.run(run, tmp_path / "out", weights="raw")


def test_weights_that_are_not_finite_are_named(fresh_project: Project, tmp_path: Path) -> None:
    trained = Trained(fresh_project)
    trained.weights[MOVED][0, 0] = float("nan")
    trained.checkpoint(1)
    with pytest.raises(UserError, match=f"{MOVED} holds NaN or infinity"):
        export.run(trained.run, tmp_path / "out", weights="raw")


@pytest.mark.usefixtures("unproven")
def test_a_name_that_ends_in_safetensors_gets_a_single_file(trained: Trained, tmp_path: Path) -> None:
    file, folder = tmp_path / "m.safetensors", tmp_path / "folder"
    export.run(trained.run, folder, weights="raw")
    export.run(trained.run, file, weights="raw", contents=export.Contents(vae=False))
    assert sorted(path.name for path in tmp_path.glob("*m.*")) == ["m.safetensors"]
    assert not list(tmp_path.glob(".*")), "the folder it was made of is gone"
    _, state = transformer_from_single_file(file)
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_wishes_for_a_single_file_need_one(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ends in \.safetensors"):
        export.run(trained.run, tmp_path / "folder", contents=export.Contents(pad_blocks=False))
    with pytest.raises(UserError, match="--push-to-hub uploads a folder"):
        export.run(trained.run, tmp_path / "m.safetensors", push_to_hub="me/model")
    assert not (tmp_path / "folder").exists()
