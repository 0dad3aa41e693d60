"""Exports of a family other than SD3: a tiny Flux with its folder, its adapters and their proofs."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor

from sd3_light.config import AdapterConfig, UserError
from sd3_light.core import registry
from sd3_light.core.family import Family
from sd3_light.export import convert, lora
from sd3_light.export.adapter_folder import write_adapter
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.export_spec import AdapterSpec, ExportSpec
from sd3_light.export.lora_file import read_lora, write_lora
from sd3_light.export.lora_merge import denoiser_state, merge_loras
from sd3_light.export.of_run import model_config
from sd3_light.export.proof_process import packed, unpacked
from sd3_light.model.adapter_layers import add_adapter, is_adapter_name
from sd3_light.model.lora_layers import LoraModule
from tests.families import make_denoiser
from tests.refusals import refused
from tests.stock import save_stock

WEIGHT = "transformer_blocks.0.attn.to_q.weight"


@pytest.fixture(scope="module")
def flux() -> Family:
    return registry.family_named("flux")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stock("flux", tmp_path_factory.mktemp("flux") / "model")


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(make_denoiser("flux").state_dict())


@pytest.fixture(scope="module")
def exported(flux: Family, base: Path, trained: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with its proof. Read only."""
    return write_folder(tmp_path_factory.mktemp("exports") / "step-5", trained, spec(flux, base))


def spec(family: Family, base: Path) -> ExportSpec:
    config = model_config(make_denoiser("flux"))
    return ExportSpec(base, config, torch.bfloat16, text={"text_max_length": 48}, family=family)


def test_a_folder_is_exported_and_proven(flux: Family, base: Path, exported: Path, trained: dict[str, Tensor]) -> None:
    proof = json.loads((exported / "proof.json").read_text())
    assert (proof["pipeline"], proof["tensors"]) == ("FluxPipeline", len(trained))
    assert proof["max_difference"] < 1e-5
    assert proof["picture_max_difference"] < 1 / 255
    pipe = FluxPipeline.from_pretrained(exported, dtype=torch.float32)
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(tensor, trained[name].bfloat16().float()), name
    assert pipe.scheduler.config.use_dynamic_shifting
    assert pipe("a red circle", height=64, width=64, num_inference_steps=1).images[0].size == (64, 64)
    card = (exported / "README.md").read_text()
    assert "FluxPipeline.from_pretrained" in card
    assert 'pipe(prompt="a prompt", max_sequence_length=48, generator=seed).images[0]' in card
    assert "StableDiffusion3Pipeline" not in card
    assert "- flux\n" in card
    parts = {path.name for path in exported.iterdir() if path.is_dir()}
    frozen = {"vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"}
    assert parts == {"transformer", "scheduler", *frozen}
    for part in frozen:
        assert (exported / part / "config.json").is_file() or (exported / part / "tokenizer.json").is_file()
    assert flux.files.missing(base, denoiser=True) == ()
    assert flux.files.missing(base / "vae", denoiser=True) == ("model_index.json",)


def test_a_lora_is_proven_and_merged(flux: Family, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = FluxTransformer2DModel.from_pretrained(base / "transformer")
    config = AdapterConfig.model_validate({"rank": 2, "alpha": 4.0, "target_modules": ["attn.to_q", "proj_mlp"]})
    add_adapter(denoiser, config, 0)
    state = {name: torch.ones_like(weight) for name, weight in denoiser.named_parameters() if is_adapter_name(name)}
    arguments = model_config(make_denoiser("flux"))
    spec = AdapterSpec(base / "transformer", arguments, torch.float32, adapter=config, family=flux)
    folder = write_adapter(tmp_path / "out", state, spec)
    proof = json.loads((folder / "proof.json").read_text())
    assert proof["change_of_output"] > 0
    assert proof["layers"] == 6
    assert "FluxPipeline" in (folder / "README.md").read_text()
    assert "ComfyUI" in (folder / "README.md").read_text()
    names = flux.files.adapters
    file = next(folder.glob("*.safetensors"))
    modules = read_lora(file, names=names).modules
    assert set(modules) == {name.partition(".lora_A.")[0] for name in state if ".lora_A." in name}
    plain = denoiser_state(base)
    merged = merge_loras(plain, [(modules, 1.0)])
    assert merged.keys() == plain.keys()
    torch.testing.assert_close(merged[WEIGHT], plain[WEIGHT] + 4.0)
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    out = lora.merge(base, [lora.Lora(file)], tmp_path / "merged")
    written = load_file(next((out / "transformer").glob("*.safetensors")))
    assert torch.equal(written[WEIGHT], merged[WEIGHT])


def test_unfit_exports_are_refused(flux: Family, base: Path, trained: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_bytes((base / "model_index.json").read_bytes())
    with pytest.raises(UserError, match=r"lacks scheduler/scheduler_config.json, text_encoder/config.json, text_enc"):
        write_folder(tmp_path / "out", trained, spec(flux, tmp_path))
    expected = r"Flux has no single file, only SD3 does; use the diffusers folder"
    refused(expected, convert.run, base, tmp_path / "flux.safetensors")
    modules = {WEIGHT.removesuffix(".weight"): LoraModule(torch.ones(2, 32), torch.ones(32, 2))}
    with pytest.raises(UserError, match=r'layout "kohya" is not known'):
        write_lora(tmp_path / "a.safetensors", modules, layout="kohya", names=flux.files.adapters)


def test_arguments_travel_to_the_clean_process_unchanged() -> None:
    arguments = {"x": [torch.ones(2), torch.zeros(1)], "more": {"t": torch.tensor(3.0), "steps": 2}, "off": None}
    tensors: dict[str, Tensor] = {}
    back = unpacked(json.loads(json.dumps(packed(arguments, tensors))), tensors)
    assert len(tensors) == 3
    assert [value.tolist() for value in back["x"]] == [[1.0, 1.0], [0.0]]
    assert (back["more"]["t"].item(), back["more"]["steps"], back["off"]) == (3.0, 2, None)
