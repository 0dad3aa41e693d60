"""The export stage: weights from a checkpoint or rebuilt from snapshots, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sd3_light.config import load_config, resolved_toml
from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_named, starting_weights
from sd3_light.export import hub
from sd3_light.export import verb as export
from sd3_light.export.hub import Target
from sd3_light.export.model_facts import ModelFacts
from sd3_light.families.sd3.single_file import transformer_from_single_file
from sd3_light.optim.ema import Averages
from sd3_light.optim.post_hoc_ema import power_tracks, snapshot_metadata
from sd3_light.optim.power_function import gamma_from_sigma_rel
from tests.checkpoints import write_checkpoint
from tests.hostile import run_cli
from tests.project import Project
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("unproven")

TRACKS = [{"name": "short", "power_width": 0.05}, {"name": "long", "power_width": 0.1}]
STEPS, SNAPSHOTS = 160, 8
MOVED = "transformer_blocks.0.attn.to_q.weight"


class Trained:
    """A run folder as training leaves it, with weights that follow a known path."""

    def __init__(self, project: Project) -> None:
        project.train_toml.write_text(
            project.train_toml.read_text()
            + "".join(f'[[ema.track]]\nname = "{t["name"]}"\npower_width = {t["power_width"]}\n' for t in TRACKS)
        )
        loaded = load_config(project.train_toml)
        self.run, self.config = project.run, loaded.train
        self.run.mkdir()
        (self.run / "config.toml").write_text(resolved_toml(loaded))
        transformer = family_named("sd3").weights.load(starting_weights(self.config.model), self.config.seed)
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
        self.write("ema", step, tensors, snapshot_metadata(self.config.ema, step))

    def checkpoint(self, step: int) -> None:
        tensors = {f"param/{name}": tensor for name, tensor in self.weights.items()}
        for track, average in self.averages.tracks.items():
            kind = "ema" if track == "ema" else f"ema.{track}"
            tensors |= {f"{kind}/{name}": tensor for name, tensor in average.shadow.items()}
        self.write("checkpoints", step, tensors, {})

    def write(self, kind: str, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        progress = {"step": step, "samples": 4 * step, "skipped": 0, "position": step}
        facts |= {"progress": progress, "model": ModelFacts().as_dict()}
        write_checkpoint(self.run / kind, step, tensors, facts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Trained:
    return Trained(raw_project.copy(tmp_path_factory.mktemp("export") / "project")).train()


def exported(folder: Path) -> tuple[Tensor, dict[str, Any]]:
    state = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return state[MOVED], json.loads((folder / "sd3_light.json").read_text())


@pytest.mark.parametrize("weights", [None, "ema", "raw", "short", "long"])
def test_every_kind_of_weights_can_be_exported(trained: Trained, tmp_path: Path, weights: str | None) -> None:
    tensor, facts = exported(export.run(trained.run, tmp_path / "out", weights=weights))
    name = weights or "ema"
    shadows = {track: average.shadow[MOVED] for track, average in trained.averages.tracks.items()}
    assert torch.equal(tensor, {"raw": trained.at(STEPS), **shadows}[name])
    assert (facts["weights"], facts["step"], facts["samples"]) == (name, STEPS, 4 * STEPS)


def running_average(trained: Trained, length: float, time: int) -> Tensor:
    exponent = gamma_from_sigma_rel(length) + 1
    shares = [(step / time) ** exponent - ((step - 1) / time) ** exponent for step in range(1, time + 1)]
    return sum((share * trained.at(step).double() for step, share in enumerate(shares, start=1)), torch.zeros(()))


@pytest.mark.parametrize("length", [0.04, 0.07, 0.15])
def test_an_average_of_any_length_is_rebuilt(trained: Trained, tmp_path: Path, length: float) -> None:
    tensor, facts = exported(export.run(trained.run, tmp_path / "out", ema_length=length))
    expected = running_average(trained, length, STEPS)
    error = (tensor.double() - expected).norm() / expected.norm()
    nearest = min((running_average(trained, width, STEPS) - expected).norm() / expected.norm() for width in (0.05, 0.1))
    assert error < 1e-3
    assert error < nearest / 5
    assert (facts["weights"], facts["step"], facts["samples"]) == (f"average of length {length:g}", STEPS, 4 * STEPS)


def test_as_of_an_older_checkpoint(trained: Trained, tmp_path: Path) -> None:
    older = trained.run / "checkpoints" / f"step-{STEPS // 2:08d}"
    out = export.run(trained.run, tmp_path / "raw", older, "raw")
    tensor, facts = exported(out)
    assert torch.equal(tensor, trained.at(STEPS // 2))
    assert facts["step"] == STEPS // 2
    assert (out / "config.toml").read_text() == (trained.run / "config.toml").read_text()
    tensor, facts = exported(export.run(trained.run, tmp_path / "out", older, ema_length=0.07))
    expected = running_average(trained, 0.07, STEPS // 2)
    assert (tensor.double() - expected).norm() / expected.norm() < 2e-3
    assert facts["step"] == STEPS // 2
    state = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    unchanged = trained.weights["context_embedder.weight"].half().float()
    torch.testing.assert_close(state["context_embedder.weight"], unchanged, rtol=1e-6, atol=0)


def test_lengths_without_snapshots_are_refused(trained: Trained, tmp_path: Path) -> None:
    for length in (0.001, 0.01, 0.27, 0.5, 0.0, -1.0):
        with pytest.raises(UserError, match=r"16 snapshots of this run cover lengths from 0\.030 to 0\.21\d"):
            export.run(trained.run, tmp_path / "out", ema_length=length)
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


def test_unknown_averages_and_options_that_exclude_each_other_are_refused(trained: Trained, tmp_path: Path) -> None:
    refused("has no 'best'; it has raw, ema, long, short", export.run, trained.run, tmp_path / "out", weights="best")
    refused("exclude each other", export.run, trained.run, tmp_path / "out", weights="ema", ema_length=0.1)
    with pytest.raises(UserError, match=r"--push-to-hub no/such/name: not a valid repository name"):
        export.run(trained.run, tmp_path / "out", push_to_hub=Target("no/such/name"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"ends in \.safetensors"):
        export.run(trained.run, tmp_path / "folder", contents=export.Contents(pad_blocks=False))
    with pytest.raises(UserError, match="--push-to-hub uploads a folder"):
        export.run(trained.run, tmp_path / "m.safetensors", push_to_hub=Target("me/model"))
    assert not (tmp_path / "folder").exists()


def test_a_run_is_exported_and_pushed(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module in (hub, export):
        monkeypatch.setattr(module, "check_push", lambda target: calls.append(f"check {target.repo}"))
    real = Mock(side_effect=lambda plan: calls.append(f"{plan.source.name} to {plan.target.repo}") or "address")
    monkeypatch.setattr(hub, "push", real)
    out = tmp_path / "out"
    assert run_cli("export", trained.run, out, "--push-to-hub", "me/model", "--dry-run").code == 0
    assert calls == [], "nothing is uploaded"
    assert (out / "model_index.json").is_file()
    outcome = run_cli("export", out, "--push-to-hub", "me/model", "--dry-run", "--license", "mit")
    assert outcome.code == 0
    for text in ("transformer/", "me/model: not compared with the hub: ", "not uploaded: config.toml", "license: mit"):
        assert text in outcome.out
    assert calls == []
    assert run_cli("export", out, "--push-to-hub", "me/model", "--license", "mit").out.startswith("pushed to address")
    assert calls == ["check me/model", "out to me/model"]
    assert run_cli("export", trained.run, tmp_path / "more", "--push-to-hub", "me/model").code == 0
    assert calls[2:] == ["check me/model", "more to me/model"]


@pytest.mark.parametrize("options", [["--dry-run"], ["--public"], ["--license", "mit"], []])
def test_options_of_an_upload_need_one(tmp_path: Path, options: list[str]) -> None:
    outcome = run_cli("export", tmp_path, *options)
    assert outcome.code == 2
    assert ("belong to --push-to-hub" if options else "OUT is missing") in outcome.err


def with_config(trained: Trained, run: Path, old: str, new: str) -> Path:
    shutil.copytree(trained.run / "checkpoints", run / "checkpoints")
    text = (trained.run / "config.toml").read_text()
    assert old in text
    (run / "config.toml").write_text(text.replace(old, new))
    return run


def test_missing_trained_weights_are_named_and_frozen_ones_not_expected(trained: Trained, tmp_path: Path) -> None:
    """A config of three blocks with the weights of two: the third would be saved with random weights."""
    run = with_config(trained, tmp_path / "run", 'size = "tiny2"', 'size = "tiny2"\nnum_layers = 3')
    with pytest.raises(UserError, match=r"missing transformer_blocks\.1\.attn\.to_add_out\.weight.* in all"):
        export.run(run, tmp_path / "out", weights="raw")
    assert not (tmp_path / "out").exists()
    run = with_config(trained, tmp_path / "frozen", "freeze = []", 'freeze = ["context_embedder.*"]')
    with pytest.raises(UserError, match=r"unexpected context_embedder\.bias; unexpected context_embedder\.weight"):
        export.run(run, tmp_path / "out", weights="raw")


def test_non_finite_weights_are_named(fresh_project: Project, tmp_path: Path) -> None:
    trained = Trained(fresh_project)
    trained.weights[MOVED][0, 0] = float("nan")
    trained.checkpoint(1)
    refused(f"{MOVED} contains NaN or infinity", export.run, trained.run, tmp_path / "out", weights="raw")


def test_a_name_that_ends_in_safetensors_gives_a_single_file(trained: Trained, tmp_path: Path) -> None:
    file, folder = tmp_path / "m.safetensors", tmp_path / "folder"
    export.run(trained.run, folder, weights="raw")
    export.run(trained.run, file, weights="raw", contents=export.Contents(vae=False))
    assert sorted(path.name for path in tmp_path.glob("*m.*")) == ["m.safetensors"]
    assert not list(tmp_path.glob(".*")), "the intermediate folder is removed"
    _, state = transformer_from_single_file(file)
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_weights_that_are_stored_in_bfloat16_are_read_in_float32() -> None:
    """An export saves them in any dtype."""
    saved: Any = SimpleNamespace(tensor=lambda name: torch.ones(2, dtype=torch.bfloat16))
    assert export._in_float32(saved, "param/x").dtype == torch.float32
