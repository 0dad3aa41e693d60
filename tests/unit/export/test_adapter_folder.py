"""Adapter exports: the file, its card, and the proof by a clean process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers import SD3Transformer2DModel
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.config import SIZES, AdapterConfig
from sd3_light.core.registry import family_named
from sd3_light.export import adapter_folder as export_adapter
from sd3_light.export import proof_process
from sd3_light.export.adapter_folder import adapter_modules, read_adapter, write_adapter
from sd3_light.export.card import adapter_card
from sd3_light.export.export_spec import AdapterSpec, ExportError
from sd3_light.export.proof import ProofError, run_clean_process
from sd3_light.export.trained_file import write_trained
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.model.adapter_layers import LycorisModule
from sd3_light.model.loading import load_diffusers_model
from tests.unit.export.denoisers import adapter_state, add_trained_adapter, live_denoiser

SD3 = family_named("sd3")
TINY = SIZES["tiny2"].transformer_config()
KINDS: list[dict[str, Any]] = [
    {"type": "lora", "alpha": 2.0, "use_rslora": True},
    {"type": "lora", "alpha": 6.0, "use_dora": True},
    {"type": "lokr", "alpha": 6.0},
    {"type": "loha", "alpha": 6.0},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A denoiser on disk in which every weight matters."""
    folder = tmp_path_factory.mktemp("base") / "transformer"
    live_denoiser(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def half_base(base: Path) -> Path:
    """The same denoiser in bfloat16, as large models are published."""
    folder = base.with_name("half")
    SD3Transformer2DModel.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def trained(base: Path, config: AdapterConfig) -> dict[str, Tensor]:
    return adapter_state(add_trained_adapter(SD3Transformer2DModel.from_pretrained(base), config))


def spec_of(base: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> AdapterSpec:
    config = AdapterConfig.model_validate({"rank": 4, "target_modules": ["attn.to_q", "norm1.linear"], **keys})
    facts = {"weights": "ema", "step": 7}
    return AdapterSpec(base, TINY, dtype, facts=facts, files={"config.toml": "x"}, adapter=config, family=SD3)


SLOW = ("loha", "lora-dora")  # each proof starts a process


def name_of(kind: dict[str, Any]) -> str:
    return str(kind["type"]) + ("-dora" if kind.get("use_dora") else "")


def named(kind: dict[str, Any]) -> Any:
    name = name_of(kind)
    return pytest.param(kind, id=name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize("kind", [named(kind) for kind in KINDS])
def test_an_export_is_proven_and_reads_back(tmp_path: Path, base: Path, kind: dict[str, Any]) -> None:
    spec = spec_of(base, torch.bfloat16, **kind)
    weights = trained(base, spec.adapter)
    out = write_adapter(tmp_path / "out", weights, spec)
    names = {"LICENSE", "README.md", "config.toml", "proof.json", "sd3_light.json"}
    assert {path.name for path in out.iterdir()} == {spec.file, *names}
    record = json.loads((out / "proof.json").read_text())
    assert record["max_difference"] < 1e-4
    assert record["change_of_output"] > 0.005, "the adapter has an effect"
    facts = json.loads((out / "sd3_light.json").read_text())
    assert (facts["adapter"]["type"], facts["adapter"]["rank"], facts["step"]) == (kind["type"], 4, 7)
    card = (out / "README.md").read_text()
    assert ("load_lora_weights" in card) == (kind["type"] == "lora")
    assert not any("default" in name for name in load_file(out / spec.file)), "peft's name of an adapter"
    back: Any = read_adapter(out, kind["type"])
    expected: Any = adapter_modules(weights, spec.adapter)
    assert set(back) == set(expected)
    for name, module in expected.items():
        if isinstance(module, LycorisModule):
            for factor, tensor in module.with_unit_scale().factors.items():
                assert torch.allclose(back[name].factors[factor].float(), tensor, rtol=1e-2)
        else:
            assert torch.allclose(back[name].delta(), module.delta(), atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_an_adapter_of_any_dtype_is_proven_on_a_base_in_half_precision(
    tmp_path: Path, half_base: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], dtype: torch.dtype
) -> None:
    """Both sides hold the base in its own dtype, and the file's values are not rounded to it."""
    process = Mock(wraps=run_clean_process)
    monkeypatch.setattr(export_adapter, "run_clean_process", process)
    spec = spec_of(half_base, dtype, **kind)
    out = write_adapter(tmp_path / "out", trained(half_base, spec.adapter), spec)
    record = json.loads((out / "proof.json").read_text())
    assert [call.args[2]["base_dtype"] for call in process.call_args_list] == ["bfloat16"]
    assert record["max_difference"] < 1e-5
    assert record["change_of_output"] > 0.005, "the adapter has an effect"


def test_a_base_is_held_in_the_dtype_of_most_weights(tmp_path: Path) -> None:
    wide, narrow = torch.zeros(2, 2), torch.zeros(3, 3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        save_file({"a": wide, "b": narrow.to(dtype)}, tmp_path / "diffusion_pytorch_model.safetensors")
        expected = torch.float32 if dtype == torch.float8_e4m3fn else dtype
        assert f"torch.{export_adapter._main_dtype(tmp_path)}" == str(expected)


def test_the_proof_updates_one_layer_at_a_time(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large base would not fit into memory a second time, in float32."""
    stored = load_diffusers_model(SD3Transformer2DModel, base, torch.bfloat16)
    pointers = {name: parameter.data_ptr() for name, parameter in stored.named_parameters()}
    layers = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q"]
    wide: list[list[str]] = []

    def update(weight: Tensor) -> Tensor:
        wide.append([name for name, parameter in stored.named_parameters() if parameter.dtype == torch.float32])
        return 2 * weight

    inputs = SD3.files.denoiser_inputs(TINY, base)
    updated = proof_process.denoise(stored, inputs, dict.fromkeys(layers, update))
    assert wide == [[f"{layer}.weight", f"{layer}.bias"] for layer in layers]
    assert {name: parameter.data_ptr() for name, parameter in stored.named_parameters()} == pointers
    assert not torch.equal(updated, proof_process.denoise(stored, inputs))
    with torch.no_grad():
        for layer in layers:
            stored.get_submodule(layer).weight *= 2
    assert torch.equal(updated, proof_process.denoise(stored, inputs))
    with pytest.raises(AssertionError, match=r"no such layers: \['blocks'\]"):
        proof_process.denoise(stored, inputs, {"blocks": update})


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_a_proof_changes_nothing_shared(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It runs in a thread while the run trains: stock loading patches torch, and adding an adapter seeds it."""
    spec = spec_of(base, type=kind)
    weights = trained(base, spec.adapter)
    for owner, name in ((SD3Transformer2DModel, "from_pretrained"), (torch.random, "fork_rng")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("a change for all threads"))
    monkeypatch.setattr(export_adapter, "run_clean_process", lambda *_: ({}, {"output": torch.zeros(1)}))
    with pytest.raises(ProofError, match="has shape"):
        write_adapter(tmp_path / "out", weights, spec)


@pytest.mark.parametrize("kind", [{"type": "lora", "alpha": 6.0}, {"type": "lokr", "alpha": 6.0}], ids=["lora", "lokr"])
def test_a_proof_rounds_like_the_file(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """A scale of 1.5 is part of the weights that are rounded to bf16. The update is ten times larger than in other
    tests, so that another rounding would be a difference of more than the tolerance."""
    spec = spec_of(base, torch.bfloat16, **kind)
    weights = {name: 10 * weight for name, weight in trained(base, spec.adapter).items()}

    def apply_file(file: Path, work: Path, request: Any, inputs: Any) -> Any:
        """Add the update of the file to the base, in this process."""
        denoiser = SD3Transformer2DModel.from_pretrained(base)
        plain = proof_process.denoise(denoiser, inputs)
        for name, module in read_adapter(file, kind["type"]).items():
            layer = denoiser.get_submodule(name)
            layer.weight.data = module.applied(layer.weight.data)
        return {}, {"output": proof_process.denoise(denoiser, inputs), "plain": plain}

    monkeypatch.setattr(export_adapter, "run_clean_process", apply_file)
    out = write_adapter(tmp_path / "out", weights, spec)
    proof = json.loads((out / "proof.json").read_text())
    assert proof["max_difference"] < 1e-6
    assert proof["change_of_output"] > 0.1


def test_a_lokr_of_a_model_with_more_heads_than_blocks_is_proven_as_comfyui_numbers_it(tmp_path: Path) -> None:
    config = replace(SIZES["tiny2"], num_heads=3).transformer_config()
    base = tmp_path / "transformer"
    new_transformer(config, 0).save_pretrained(base)
    spec = replace(spec_of(base, type="lokr"), transformer_config=config)
    out = write_adapter(tmp_path / "out", trained(base, spec.adapter), spec)
    assert {key.split("_")[3] for key in load_file(out / spec.file)} == {"0", "2"}, "block 1 of 2 becomes 2 of 3"
    assert "Its last block is number 2" in (out / "README.md").read_text()
    assert {layer.split(".")[1] for layer in read_adapter(out, "lokr")} == {"0", "1"}


def test_a_file_of_another_effect_is_not_published(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(base, alpha=8.0)
    weights = trained(base, spec.adapter)
    real = export_adapter.write_adapter_file

    def wrong_scale(path: Path, modules: Any, adapter: AdapterConfig, *rest: Any) -> None:
        wrong: Any = adapter_modules(weights, adapter.model_copy(update={"alpha": 4.0}))
        real(path, wrong, adapter, *rest)

    monkeypatch.setattr(export_adapter, "write_adapter_file", wrong_scale)
    with pytest.raises(ProofError, match="output differs by"):
        write_adapter(tmp_path / "out", weights, spec)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_cannot_be_saved_are_named(tmp_path: Path, base: Path) -> None:
    spec = spec_of(base, torch.float16)
    weights = trained(base, spec.adapter)
    name = next(iter(weights))
    with pytest.raises(ExportError, match=r"lora_A.* has values that torch.float16 cannot hold"):
        write_adapter(tmp_path / "out", {**weights, name: weights[name] + 1e6}, spec)
    with pytest.raises(ExportError, match=f"{name} contains NaN"):
        write_adapter(tmp_path / "out", {**weights, name: weights[name] * float("nan")}, spec)
    assert list(tmp_path.iterdir()) == []


def test_the_card_of_an_adapter_has_the_licence_of_its_base_and_the_scores(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--sd3" / "snapshots" / "aaaa"
    spec = replace(spec_of(cached / "transformer"), about={"losses": {"held": 0.25}, "images": "20"})
    cached.mkdir(parents=True)
    (cached / "README.md").write_text("---\nlicense: openrail++\n---\n# SD3\n")
    card = adapter_card(spec, {})
    data = ModelCardData(**ModelCard(card).data.to_dict()).to_dict()
    assert data["license"] == "openrail++"
    assert data["base_model"] == "owner/sd3"
    assert 'from_pretrained("owner/sd3"' in card
    assert ModelCard(card).data.to_dict()["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.25
    assert "copied from the model that training started from" in card
    assert "| images | 20 |" in card
    card = adapter_card(spec_of(tmp_path / "sd3" / "transformer"), {})
    assert "| base model | sd3 |" in card, "without its folders"
    assert 'from_pretrained("path/to/sd3"' in card
    exports = tmp_path / "runs" / "icons" / "exports"
    (exports / "step-00000400").mkdir(parents=True)
    (exports / "best").symlink_to("step-00000400")
    for name in ("step-00000400", "best"):
        card = adapter_card(spec_of(exports / name / "transformer"), {})
        assert "| base model | icons, step-00000400 |" in card
        assert "base_model" not in card
        assert str(tmp_path) not in card


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_card_of_an_adapter_names_the_library_that_loads_it(tmp_path: Path, kind: dict[str, Any]) -> None:
    """The hub shows how to load a file by this field, and diffusers does not load LoKr and LoHa."""
    data = ModelCard(adapter_card(spec_of(tmp_path, **kind), {})).data.to_dict()
    assert data.get("library_name") == ("diffusers" if kind["type"] == "lora" else None)
    assert (data["pipeline_tag"], kind["type"] in data["tags"]) == ("text-to-image", True)


def test_a_failed_save_keeps_the_earlier_lora(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = SD3Transformer2DModel.from_pretrained(base)
    adapter = AdapterConfig(rank=2, alpha=2, target_modules=["attn.to_q"])
    weights = adapter_state(add_trained_adapter(transformer, adapter))
    path = tmp_path / "lora.safetensors"
    contents = set()
    for factor in (1.0, 2.0):
        write_trained(path, {name: factor * weight for name, weight in weights.items()}, transformer, adapter)
        contents.add(before := path.read_bytes())
    assert len(contents) == 2
    monkeypatch.setattr(export_adapter, "write_lora", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_trained(path, weights, transformer, adapter)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["lora.safetensors"]


def test_the_base_is_a_folder_or_a_file(tmp_path: Path) -> None:
    assert spec_of(tmp_path / "transformer").base_folder == tmp_path
    assert spec_of(tmp_path / "sd3.safetensors").base_folder == tmp_path / "sd3.safetensors"
