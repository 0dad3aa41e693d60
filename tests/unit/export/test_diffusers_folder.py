"""An export is complete and proven and matches its config, or an error names what is wrong."""

import ast
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.config import SIZES, ModelConfig
from sd3_light.core.registry import family_named
from sd3_light.export import diffusers_folder, proof_process
from sd3_light.export import diffusers_folder as folder_module
from sd3_light.export import proof as proof_module
from sd3_light.export.diffusers_folder import checked_copy, read_facts, write_folder
from sd3_light.export.export_spec import ExportError, ExportSpec
from sd3_light.export.of_run import model_spec
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.export.proof import ProofError, combined_digest, expectation, prove
from sd3_light.families.sd3 import real_pipeline
from sd3_light.model.folder import FROZEN
from sd3_light.system import machine
from tests.project import with_nan
from tests.unit.export.denoisers import having, live_denoiser, without
from tests.warm import REAL_PYTHON

CONFIG = SIZES["tiny2"].transformer_config()
TEXT = {"text_tokens": "padded", "uncond_text": "zero", "t5_max_length": 16}
WEIGHT = "transformer_blocks.0.attn.to_q.weight"
FILE = Path("transformer", "diffusion_pytorch_model.safetensors")
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def trained() -> State:
    """A denoiser's weights and buffers in float32; gates and output, zero before training, have values here."""
    return dict(live_denoiser(CONFIG, seed=7).state_dict())


@pytest.fixture
def state(trained: State) -> State:
    return dict(trained)


def spec(base: Path, **keys: Any) -> ExportSpec:
    defaults = {"save_dtype": torch.float16, "shift": 3.0, "text": TEXT, "facts": {"weights": "ema", "step": 5}}
    return ExportSpec(base, CONFIG, family=family_named("sd3"), **{**defaults, **keys})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path, trained: State) -> Path:
    """One real export with its proof, in float16. Read only."""
    return write_folder(tmp_path_factory.mktemp("exports") / "step-5", trained, spec(demo_parts))


def prefixed(state: State) -> State:
    return {f"module.{name}": tensor for name, tensor in state.items()}


SQUARE = torch.ones(128, 128)
FAULTS: dict[str, tuple[Callable[[State], State], str]] = {
    "missing": (without(WEIGHT), f"missing {WEIGHT}"),
    "missing buffer": (without("pos_embed.pos_embed"), "missing pos_embed.pos_embed"),
    "unexpected": (having("lora.default.weight", torch.zeros(1)), "unexpected lora.default.weight"),
    "prefixed": (prefixed, r"missing pos_embed.* and \d+ more"),
    "shape": (having(WEIGHT, SQUARE[:, :64]), rf"{WEIGHT} has shape \[128, 64\], not \[128, 128\]"),
    "meta": (having(WEIGHT, SQUARE.to("meta")), rf"{WEIGHT} holds no data \(meta tensor\)"),
    "empty": (lambda state: {}, r"missing pos_embed.* and \d+ more"),
    "type": (having(WEIGHT, SQUARE.bfloat16()), rf"{WEIGHT} has type bfloat16, not float32 \(or float16, the saved "),
    "NaN": (having(WEIGHT, SQUARE * float("nan")), f"{WEIGHT} contains NaN or infinity"),
    "infinity": (having(WEIGHT, SQUARE / 0), f"{WEIGHT} contains NaN or infinity"),
    "too large": (having(WEIGHT, 1e6 * SQUARE), f"{WEIGHT} has values beyond float16, choose another save_dtype"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_weights_are_named(tmp_path: Path, demo_parts: Path, state: State, unproven: None, fault: str) -> None:
    damage, message = FAULTS[fault]
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("an earlier export")
    with pytest.raises(ExportError, match=rf"nothing was saved: .*{message}"):
        write_folder(out, damage(state), spec(demo_parts))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_a_failed_proof(tmp_path: Path, demo_parts: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("an earlier export")

    def fail(folder: Path, *_: object) -> dict[str, Any]:
        assert (folder / "model_index.json").is_file(), "the folder is complete when it is proven"
        raise ProofError("not the same")

    monkeypatch.setattr(folder_module, "prove", fail)
    with pytest.raises(ProofError):
        write_folder(out, state, spec(demo_parts))
    assert (out / "precious").is_file()
    assert os.listdir(tmp_path) == ["out"], "nothing half-written remains"


def test_the_copy_is_cast_and_the_live_weights_are_untouched(demo_parts: Path, state: State) -> None:
    before = {name: tensor.clone() for name, tensor in state.items()}
    copy = checked_copy(state, spec(demo_parts))
    assert set(copy) == set(state)
    assert all(tensor.dtype == torch.float16 for tensor in copy.values())
    assert not {tensor.data_ptr() for tensor in copy.values()} & {tensor.data_ptr() for tensor in state.values()}
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])
    uncast = checked_copy(state, spec(demo_parts, save_dtype=torch.float32))
    assert uncast[WEIGHT].data_ptr() != state[WEIGHT].data_ptr()


def test_the_proof_and_the_text_policy_are_recorded(exported: Path, trained: State) -> None:
    proof = json.loads((exported / "proof.json").read_text())
    assert proof["tensors"] == len(trained)
    assert proof["max_difference"] <= 1e-5
    assert proof["picture_max_difference"] <= 1 / 255
    assert proof["diffusers"].startswith("0.")
    assert {"torch", "transformers", "safetensors", "seconds", "output_sha256", "picture_sha256"} <= set(proof)
    assert proof["weights_sha256"] == digest({name: tensor.half() for name, tensor in trained.items()})
    facts = read_facts(exported)
    assert facts["text"] == TEXT
    assert (facts["weights"], facts["step"]) == ("ema", 5)
    card = (exported / "README.md").read_text()
    (link,) = re.findall(r"^license_link: (\S+)$", card, re.MULTILINE)
    assert (exported / link).is_file()
    assert "max_sequence_length=16" in card
    assert "negative_prompt_embeds" in card, "stock guidance does not use zeros: the card explains it"
    _, policy = open_pipeline(exported, torch.device("cpu"))
    assert (policy.t5_max_length, policy.uncond_text) == (16, "zero")


def test_frozen_parts_are_linked_and_others_can_be_read_as_any_new_file(exported: Path, demo_parts: Path) -> None:
    weights = [path for part in FROZEN for path in (demo_parts / part).iterdir()]
    assert len(weights) > 10
    for path in weights:
        assert (exported / path.relative_to(demo_parts)).samefile(path)
    usual = stat.S_IMODE((exported / "model_index.json").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (exported / "transformer").iterdir()} == {usual}


def test_without_links_parts_are_copied_once_per_series_unless_they_change(
    tmp_path: Path, demo_parts: Path, state: State, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E.g. when the run is on another disk than the model it started from."""
    base = Path(shutil.copytree(demo_parts, tmp_path / "base"))
    link = os.link

    def within_a_disk(source: Path, target: Path) -> None:
        if Path(source).is_relative_to(base):
            raise OSError(18, "Invalid cross-device link")
        link(source, target)

    monkeypatch.setattr(diffusers_folder.os, "link", within_a_disk)
    first, second = (write_folder(tmp_path / "series" / name, state, spec(base)) for name in ("step-1", "step-2"))
    for part in FROZEN:
        for path in (base / part).iterdir():
            copy, link_to_copy = first / part / path.name, second / part / path.name
            assert not copy.samefile(path)
            assert copy.read_bytes() == path.read_bytes()
            assert link_to_copy.samefile(copy), "the second export links to the first one's copy"
    config = base / "vae" / "config.json"
    config.write_text(config.read_text() + " ")
    third = write_folder(tmp_path / "series" / "step-3", state, spec(base))
    assert (third / "vae" / "config.json").read_bytes() == config.read_bytes()


def test_earlier_exports_and_leftovers_go_away(tmp_path: Path, demo_parts: Path, state: State, unproven: None) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    killed, running = (f"{machine()}~{pid}~0.tmp" for pid in (dead.pid, os.getpid()))
    for name in (f".out.{killed}", f".out.{running}", f".other.{killed}", "out"):
        (tmp_path / name / "stale").mkdir(parents=True)
    assert write_folder(tmp_path / "out", state, spec(demo_parts)) == tmp_path / "out"
    assert sorted(os.listdir(tmp_path)) == sorted([f".other.{killed}", f".out.{running}", "out"])
    assert (tmp_path / "out" / "model_index.json").is_file()
    assert not (tmp_path / "out" / "stale").exists()


def test_a_full_disk_keeps_the_earlier_export(
    tmp_path: Path, demo_parts: Path, state: State, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "out", state, spec(demo_parts))
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    disk_full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(SD3Transformer2DModel, "save_pretrained", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path / "out", {name: tensor + 1 for name, tensor in state.items()}, spec(demo_parts))
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("keys", "shift", "dynamic"), [({}, 1.0, False), ({"shift": 3.0}, 3.0, False), ({"flux_shift": True}, 1.0, True)]
)
def test_the_scheduler_is_that_of_training(
    tmp_path: Path, demo_parts: Path, state: State, unproven: None, keys: dict[str, Any], shift: float, dynamic: bool
) -> None:
    model = ModelConfig(diffusers_path=demo_parts, train_type="sd3_light_pretrain", size="tiny2", **keys)
    out = write_folder(tmp_path / "out", state, model_spec(model, CONFIG))
    scheduler = json.loads((out / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert (scheduler["shift"], scheduler["use_dynamic_shifting"]) == (shift, dynamic)


def test_a_large_denoiser_is_split_into_files(tmp_path: Path, demo_parts: Path, state: State, unproven: None) -> None:
    out = write_folder(tmp_path / "out", state, spec(demo_parts, max_shard_size="2MB"))
    files = sorted(path.name for path in (out / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    assert sum(len(load_file(out / "transformer" / name)) for name in files) == len(state)


def flip_a_bit(folder: Path) -> None:
    saved = load_file(folder / FILE)
    saved[WEIGHT].view(torch.int16)[3, 5] ^= 1
    save_file(saved, folder / FILE, {"format": "pt"})


def set_keys(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def add_a_layer(folder: Path) -> None:
    set_keys(folder / "transformer" / "config.json", num_layers=3)


def change_positions(folder: Path) -> None:
    set_keys(folder / "transformer" / "config.json", pos_embed_max_size=4 * CONFIG["pos_embed_max_size"])


def change_shift(folder: Path) -> None:
    set_keys(folder / "scheduler" / "scheduler_config.json", shift=9.0)


def remove_encoder_weights(folder: Path) -> None:
    (folder / "text_encoder_3" / "model.safetensors").unlink()


TAMPERED: list[tuple[Callable[[Path], None], str]] = [
    (flip_a_bit, rf"reloaded weights differ in value: \['{WEIGHT}'\]"),
    (add_a_layer, "a clean process cannot load .*transformer_blocks"),
    (change_positions, "pos_embed"),
    (change_shift, "an image of the reloaded pipeline differs by"),
    (remove_encoder_weights, "lacks text_encoder_3/model.safetensors"),
]


@pytest.mark.parametrize(("tamper", "message"), TAMPERED, ids=[tamper.__name__ for tamper, _ in TAMPERED])
def test_a_modified_folder_fails_the_proof(
    tmp_path: Path, exported: Path, demo_parts: Path, trained: State, tamper: Callable[[Path], None], message: str
) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    tamper(copy)
    weights = {name: tensor.half() for name, tensor in trained.items()}
    with pytest.raises(ProofError, match=message):
        prove(copy, spec(demo_parts), expectation(copy, spec(demo_parts), weights))


def test_names_configs_and_outputs_are_compared() -> None:
    proof_module._compare_weights({"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    with pytest.raises(ProofError, match=r"differ in \['b'\]"):
        proof_module._compare_weights({"a": "1"}, {"a": "1", "b": "2"})
    proof_module._compare_config({"layers": [1, 2], "more": 1}, {"layers": (1, 2)})
    with pytest.raises(ProofError, match=r"config.json says num_layers = 24, not 15"):
        proof_module._compare_config({"num_layers": 24}, {"num_layers": 15})
    output = torch.full((3,), 2.0)
    assert proof_module.compare_outputs("it", output, output, 1e-5) == 0.0
    for other in (output + 1e-3, torch.full((3,), float("nan")), torch.zeros(2)):
        with pytest.raises(ProofError, match=r"it (differs by|has shape)"):
            proof_module.compare_outputs("it", other, output, 1e-5)


def test_the_proof_casts_one_layer_at_a_time_and_restores_the_weights() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).half()
    stored = [parameter.data_ptr() for parameter in layers.parameters()]
    wide: list[list[torch.dtype]] = []
    with proof_process.compute_in_float32(layers):
        layers[1].register_forward_pre_hook(lambda *_: wide.append([p.dtype for p in layers.parameters()]))
        assert layers(torch.ones(1, 4)).dtype == torch.float32
    assert layers(torch.ones(1, 4).half()).dtype == torch.float16, "afterwards it computes as stored"
    wide.pop()
    assert wide == [[torch.float16, torch.float16, torch.float32, torch.float32]]
    assert [parameter.data_ptr() for parameter in layers.parameters()] == stored


@pytest.mark.parametrize("module", [proof_process, real_pipeline])
def test_standalone_files_import_nothing_of_this_package(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "diffusers", "transformers", "safetensors", "PIL"}, "diffusers needs Pillow itself"


def digest(weights: State) -> str:
    return combined_digest(proof_process.digests(weights))


def test_the_digest_depends_on_names_types_and_bits() -> None:
    weights = {"a": torch.zeros(2), "b": torch.ones(2)}
    digests = {
        digest(weights),
        digest({"a": torch.ones(2), "b": torch.zeros(2)}),
        digest({name: tensor.half() for name, tensor in weights.items()}),
        digest({"a": torch.zeros(2, 1), "b": torch.ones(2)}),
    }
    assert len(digests) == 4
    assert digest(dict(reversed(weights.items()))) in digests


def test_a_nan_part_is_named(demo_parts: Path, tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = lambda *_: ({"config": CONFIG, "weights": {}}, {})  # noqa: E731
    monkeypatch.setattr(proof_module, "run_clean_process", nothing)
    base = with_nan(demo_parts, tmp_path / "nan", "vae")
    with pytest.raises(ProofError, match=rf"the VAE of {base} returns NaN or infinity"):
        write_folder(tmp_path / "out", state, spec(base))
    broken = {**state, "proj_out.weight": torch.full_like(state["proj_out.weight"], 3e38)}
    with pytest.raises(ProofError, match="the exported denoiser returns NaN or infinity"):
        write_folder(tmp_path / "out", broken, spec(demo_parts, save_dtype=torch.float32))
    assert not (tmp_path / "out").exists()


def test_a_clean_process_has_its_own_group_and_no_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a terminal signals the whole group of the trainer."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho a warning >&2\necho $(ps -o pgid= -p $$) > {tmp_path}/group\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(proof_module.sys, "executable", str(python))
    with pytest.raises(ProofError, match=r"was ended by SIGKILL; the machine may be out of memory$"):
        proof_module.run_clean_process(tmp_path, tmp_path, {}, {"x": torch.zeros(1)})
    assert int((tmp_path / "group").read_text()) != os.getpgrp()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_clean_process_ignores_signals_during_its_imports(tmp_path: Path, number: int) -> None:
    (tmp_path / "torch.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\nraise SystemExit(7)\n")
    command = [REAL_PYTHON, "-P", proof_process.__file__, "folder", "work"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == 7
