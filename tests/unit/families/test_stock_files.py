"""The files of every stock family: inputs of its proof, and a LoRA that its stock pipeline loads."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from sd3_light.config import AdapterConfig
from sd3_light.core.registry import family_named, family_of_folder
from sd3_light.export.adapter_folder import adapter_modules, write_adapter, write_adapter_file
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.export_spec import AdapterSpec, ExportSpec
from sd3_light.export.lora_file import names_of_file, read_lora
from sd3_light.export.of_run import model_config
from sd3_light.export.proof_process import denoise, make_pipeline, sample_image
from sd3_light.families.base import StockFamily
from sd3_light.flow.scheduler import folder_scheduler
from sd3_light.model.adapter_layers import add_adapter, is_adapter_name
from sd3_light.model.folder import pipeline_settings
from sd3_light.model.loading import load_diffusers_model
from tests.families import TinyFolder

FAMILIES = ("flux", "flux_kontext", "flux2", "krea2", "prx", "qwen_image", "sana", "wan", "z_image")
LOADS = tuple(name for name in FAMILIES if name != "prx")  # its stock pipeline loads no LoRA


def load_denoiser(family: StockFamily, folder: Path) -> Any:
    kind = getattr(diffusers, family.denoiser)
    return load_diffusers_model(kind, folder / "transformer", torch.float32).requires_grad_(False)


def stock_pipeline(family: StockFamily, folder: Path) -> Any:
    """The stock pipeline without text encoders."""
    vae = getattr(diffusers, json.loads((folder / "vae" / "config.json").read_text())["_class_name"])
    parts = {
        "transformer": load_denoiser(family, folder),
        "vae": vae.from_pretrained(folder / "vae"),
        "scheduler": folder_scheduler(folder),
    }
    return make_pipeline(family.pipeline, **parts, **pipeline_settings(folder))


def of(name: str) -> StockFamily:
    family: Any = family_named(name)
    return family


@pytest.mark.parametrize("name", FAMILIES)
def test_inputs_of_a_proof_follow_from_the_family(name: str, stock_folder: TinyFolder) -> None:
    family, folder = of(name), stock_folder(name)
    assert family_of_folder(folder) is family
    pipe = stock_pipeline(family, folder)
    config = model_config(pipe.transformer)
    inputs = family.files.denoiser_inputs(config, folder)
    output = denoise(pipe.transformer, inputs)
    assert output.isfinite().all()
    assert output.std() > 1e-3
    assert torch.equal(output, denoise(pipe.transformer, family.files.denoiser_inputs(config, folder)))
    image = sample_image(pipe, family.files.pipeline_inputs(folder, config, {}))
    assert image.isfinite().all()
    assert image.std() > 1e-3


@pytest.fixture
def adapter(request: Any, stock_folder: TinyFolder) -> tuple[StockFamily, Path, AdapterConfig, Any]:
    """A family, its folder, an adapter's table, and a denoiser with the adapter, whose weights are not zero."""
    family, folder = of(request.param), stock_folder(request.param)
    config = AdapterConfig.model_validate({"rank": 2, "alpha": 2.0, "target_modules": list(family.adapter_targets)})
    denoiser = load_denoiser(family, folder)
    add_adapter(denoiser, config, 0)
    generator = torch.Generator().manual_seed(2)
    for parameter_name, weight in denoiser.named_parameters():
        if is_adapter_name(parameter_name):
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    return family, folder, config, denoiser.eval()


def trained(denoiser: Any) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in denoiser.named_parameters() if is_adapter_name(name)}


@pytest.mark.parametrize("adapter", LOADS, indirect=True)
def test_a_lora_changes_the_stock_pipelines_image_as_ours(
    adapter: tuple[StockFamily, Path, AdapterConfig, Any], tmp_path: Path
) -> None:
    family, folder, config, denoiser = adapter
    names = family.files.adapters
    modules = adapter_modules(trained(denoiser), config)
    file = write_adapter_file(tmp_path / "lora.safetensors", modules, config, torch.float32, {}, names)
    assert names_of_file(file) == names
    assert set(read_lora(file, names=names).modules) == set(modules)
    pipe = stock_pipeline(family, folder)
    arguments = family.files.pipeline_inputs(folder, model_config(pipe.transformer), {})
    plain = sample_image(pipe, arguments)
    pipe.load_lora_weights(tmp_path, weight_name=file.name)
    loaded = sample_image(pipe, arguments)
    pipe.transformer = denoiser
    ours = sample_image(pipe, arguments)
    assert (loaded - plain).abs().max() > 1e-3
    assert torch.equal(loaded, ours)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_exported_and_proven(name: str, stock_folder: TinyFolder, tmp_path: Path) -> None:
    family, folder = of(name), stock_folder(name)
    denoiser = load_denoiser(family, folder)
    spec = ExportSpec(folder, model_config(denoiser), torch.bfloat16, family=family)
    out = write_folder(tmp_path / "out", denoiser.state_dict(), spec)
    assert json.loads((out / "proof.json").read_text())["pipeline"] == family.pipeline
    for part in ("scheduler/scheduler_config.json", "vae/config.json", "text_encoder/config.json"):
        assert (out / part).read_bytes() == (folder / part).read_bytes()


@pytest.fixture
def half_folder(adapter: tuple[StockFamily, Path, AdapterConfig, Any], tmp_path: Path) -> Path:
    """The denoiser's folder with every weight in bf16, as many are published."""
    family, folder, _, _ = adapter
    load_denoiser(family, folder).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    return tmp_path / "half"


@pytest.mark.parametrize("adapter", FAMILIES, indirect=True)
def test_a_denoiser_loads_in_bf16(adapter: tuple[StockFamily, Path, AdapterConfig, Any], half_folder: Path) -> None:
    kind = getattr(diffusers, adapter[0].denoiser)
    stock = kind.from_pretrained(half_folder, dtype=torch.bfloat16).state_dict()
    ours = load_diffusers_model(kind, half_folder, torch.bfloat16).state_dict()
    assert ours.keys() == stock.keys()
    assert {name: weight.dtype for name, weight in ours.items()} == {name: one.dtype for name, one in stock.items()}
    assert all(torch.equal(weight, stock[name]) for name, weight in ours.items())


def assert_proven(adapter: tuple[StockFamily, Path, AdapterConfig, Any], base: Path, out: Path) -> None:
    family, folder, config, denoiser = adapter
    arguments = model_config(load_denoiser(family, folder))
    spec = AdapterSpec(base, arguments, torch.float32, adapter=config, family=family, encoders=folder)
    write_adapter(out, trained(denoiser), spec)
    assert json.loads((out / "proof.json").read_text())["change_of_output"] > 0
    assert ("ComfyUI" in (out / "README.md").read_text()) == family.comfyui


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("adapter", LOADS, indirect=True)
def test_a_lora_is_exported_and_proven(adapter: tuple[StockFamily, Path, AdapterConfig, Any], tmp_path: Path) -> None:
    assert_proven(adapter, adapter[1] / "transformer", tmp_path / "out")


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_a_lycoris_adapter_of_wan_is_proven_by_own_names(kind: str, stock_folder: TinyFolder, tmp_path: Path) -> None:
    family, folder = of("wan"), stock_folder("wan")
    table = {"type": kind, "rank": 2, "alpha": 2.0, "target_modules": list(family.adapter_targets)}
    config = AdapterConfig.model_validate(table)
    denoiser = load_denoiser(family, folder)
    add_adapter(denoiser, config, 0)
    for name, weight in denoiser.named_parameters():
        if is_adapter_name(name):
            weight.data.normal_(0, 0.2)
    assert_proven((family, folder, config, denoiser), folder / "transformer", tmp_path / "out")


@pytest.mark.parametrize(
    "adapter", [pytest.param(name, marks=pytest.mark.slow if name != "wan" else ()) for name in LOADS], indirect=True
)
def test_a_lora_on_a_base_in_bf16_is_proven(
    adapter: tuple[StockFamily, Path, AdapterConfig, Any], half_folder: Path, tmp_path: Path
) -> None:
    assert_proven(adapter, half_folder, tmp_path / "out")
