"""Exports of large models: what is in memory beside the copies of their weights, and what the proof holds of a base."""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.checkpoint.progress import Progress
from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.registry import family_named
from sd3_light.export import diffusers_folder, proof_process
from sd3_light.export.diffusers_folder import WeightsOnDemand, checked_copy, host_copy
from sd3_light.export.export_spec import ExportSpec
from sd3_light.export.lora_merge import denoiser_state, merge_loras, merged_on_demand
from sd3_light.export.of_run import RAW, Saver
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.model.loading import load_diffusers_model, stand_in_model
from sd3_light.model.lora_layers import LoraModule
from tests.families import make_denoiser, save_pipeline

SD3 = family_named("sd3")
TINY = SIZES["tiny2"].transformer_config()
KIND = diffusers.SD3Transformer2DModel
LAYER = "transformer_blocks.0.attn.to_q"
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(params=["float32", "bfloat16", "mixed"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "transformer"
    denoiser = new_transformer(TINY, 0)
    denoiser.proj_out.weight.data.normal_(0, 0.05)
    denoiser.to(torch.float32 if request.param == "float32" else torch.bfloat16).save_pretrained(folder)
    if request.param == "mixed":
        weights = {name: value.float() if "norm" in name else value for name, value in load_file(folder / FILE).items()}
        save_file(weights, folder / FILE, {"format": "pt"})
    return folder


def spec(**fields: Any) -> ExportSpec:
    return ExportSpec(**{"family": SD3, "base": DEMO, "transformer_config": TINY, **fields})


def test_a_base_that_is_read_layer_by_layer_computes_the_same_bits(base: Path) -> None:
    inputs = SD3.files.denoiser_inputs(TINY, base)
    for dtype in (torch.float32, torch.bfloat16):
        model, read = stand_in_model(KIND, base, dtype)
        loaded = load_diffusers_model(KIND, base, dtype)
        updates: dict[str, Callable[[Tensor], Tensor]] = {LAYER: lambda weight: 2 * weight}
        for more in ({}, updates):
            expected = proof_process.denoise(loaded, inputs, more)
            assert expected.abs().max() > 0
            assert torch.equal(proof_process.denoise(model, inputs, more, read), expected)


def test_a_large_table_computes_in_its_own_dtype(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are cropped, then added to float32: the same bits, without a copy of all rows."""
    inputs = SD3.files.denoiser_inputs(TINY, base)
    model = load_diffusers_model(KIND, base, torch.bfloat16)
    stand_in, read = stand_in_model(KIND, base, torch.bfloat16)
    expected = proof_process.denoise(model, inputs)
    monkeypatch.setattr(proof_process, "LARGE_TABLE", 1)
    seen: list[torch.dtype] = []
    model.pos_embed.proj.register_forward_hook(lambda *_: seen.append(model.pos_embed.pos_embed.dtype))
    assert torch.equal(proof_process.denoise(model, inputs), expected)
    assert torch.equal(proof_process.denoise(stand_in, inputs, None, read), expected)
    assert seen == [torch.bfloat16]


def test_only_the_layer_that_computes_has_its_weights_in_memory(base: Path) -> None:
    model, read = stand_in_model(KIND, base, torch.bfloat16)
    parameters = dict(model.named_parameters())
    held: list[set[str]] = []

    def in_memory() -> set[str]:
        return {name for name, value in parameters.items() if value.untyped_storage().nbytes() > 4}

    def look(weight: Tensor) -> Tensor:
        held.append(in_memory())
        return weight

    proof_process.denoise(model, SD3.files.denoiser_inputs(TINY, base), {LAYER: look}, read)
    assert held == [{f"{LAYER}.weight", f"{LAYER}.bias"}]
    assert in_memory() == set()


def test_weights_on_demand_are_asked_for_once_and_not_kept() -> None:
    state = new_transformer(TINY, 0).state_dict()
    asked: list[str] = []
    alive: list[weakref.ref[Tensor]] = []

    def read(name: str) -> Tensor:
        assert all(tensor() is None for tensor in alive), "an earlier weight is still in memory"
        asked.append(name)
        tensor = state[name].clone()
        alive.append(weakref.ref(tensor))
        return tensor

    lazy = WeightsOnDemand({name: lambda name=name: read(name) for name in state})
    copies = checked_copy(lazy, spec(), owned=True)
    assert asked == list(state)
    assert len(lazy) == len(state)
    assert all(torch.equal(copies[name], state[name].bfloat16()) for name in state)


def test_weights_are_freed_before_the_clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = denoiser_state(DEMO)
    config = json.loads((DEMO / "transformer" / "config.json").read_text(encoding="utf-8"))
    copies: list[weakref.ref[Tensor]] = []

    def copied(*arguments: Any) -> dict[str, Tensor]:
        tensors = checked_copy(*arguments)
        copies.extend(weakref.ref(tensor) for tensor in tensors.values())
        return tensors

    monkeypatch.setattr(diffusers_folder, "checked_copy", copied)
    monkeypatch.setattr(diffusers_folder, "prove", lambda *_: {"alive": sum(copy() is not None for copy in copies)})
    arguments = {name: value for name, value in config.items() if not name.startswith("_")}
    lazy = WeightsOnDemand({name: lambda name=name: state[name].clone() for name in state})
    out = diffusers_folder.write_folder(tmp_path / "out", lazy, spec(transformer_config=arguments), owned=True)
    assert json.loads((out / "proof.json").read_text(encoding="utf-8")) == {"alive": 0}
    assert copies


def test_a_run_frees_its_copies_before_the_clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"type": "wan", "diffusers_path": str(save_pipeline("wan", tmp_path / "base"))}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model, "save_dtype": "float32"}
    config = TrainConfig.model_validate(table, context={"base": tmp_path})
    denoiser = make_denoiser("wan")
    saver = Saver.of(config, denoiser, tmp_path / "exports")
    trained = {name: saver.to_host(name, weight) for name, weight in denoiser.named_parameters()}
    copies = [weakref.ref(tensor) for tensor in trained.values()]
    monkeypatch.setattr(diffusers_folder, "prove", lambda *_: {"alive": sum(copy() is not None for copy in copies)})
    out = saver.save_model(trained, RAW, Progress(step=1))
    assert json.loads((out / "proof.json").read_text(encoding="utf-8")) == {"alive": 0}
    assert copies


def test_owned_weights_are_not_copied_and_host_copies_are_cast_unless_that_loses_values() -> None:
    state = {name: tensor.bfloat16() for name, tensor in new_transformer(TINY, 0).state_dict().items()}
    owned = checked_copy(state, spec(), owned=True)
    assert all(owned[name].data_ptr() == state[name].data_ptr() for name in state)
    copied = checked_copy(state, spec())
    assert all(copied[name].data_ptr() != state[name].data_ptr() for name in state)
    live = torch.tensor([1.0, 1e5])
    assert torch.equal(host_copy(live, torch.bfloat16), live.bfloat16())
    for dtype in (torch.float32, torch.float16):  # 1e5 is too large for float16
        copy = host_copy(live, dtype)
        assert torch.equal(copy, live)
        assert copy.data_ptr() != live.data_ptr()


def test_a_run_copies_weights_in_the_dtype_in_which_it_saves_them(tmp_path: Path) -> None:
    model = {"type": "wan", "diffusers_path": str(DEMO), "dtype": "bfloat16", "transformer_dtype": "bfloat16"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model, "save_dtype": "float16"}
    config = TrainConfig.model_validate(table, context={"base": tmp_path})
    denoiser = make_denoiser("wan")
    saver = Saver.of(config, denoiser, tmp_path / "exports")
    dtypes = {name: saver.to_host(name, weight).dtype for name, weight in denoiser.named_parameters()}
    kept = [name for name, dtype in dtypes.items() if dtype == torch.float32]
    assert {dtypes[name] for name in dtypes if name not in kept} == {torch.float16}
    assert kept
    assert all(any(part in name for part in denoiser._keep_in_fp32_modules) for name in kept)


def test_a_merge_on_demand_has_the_weights_of_a_merge() -> None:
    plain = denoiser_state(DEMO)
    width = plain[f"{LAYER}.weight"].shape[0]
    loras = [({LAYER: LoraModule(torch.randn(2, width), torch.randn(width, 2))}, strength) for strength in (0.5, 2.0)]
    lazy = merged_on_demand(DEMO, loras)
    whole = merge_loras(plain, loras)
    assert list(lazy) == list(whole)
    assert all(torch.equal(lazy[name], whole[name]) for name in whole)
    assert not torch.equal(whole[f"{LAYER}.weight"], plain[f"{LAYER}.weight"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_of_a_merge_and_of_its_adapter(tmp_path: Path) -> None:
    """128 M parameters: the process holds little more than the merged weights, and nothing of an adapter's base."""
    script = Path(__file__).with_name("export_peaks.py")
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert peaks["adapter"] < 0.5 * peaks["weights"]
    assert peaks["merge"] < 1.2 * peaks["weights"] + 100 * 2**20
