"""ComfyUI's own code maps every key of the LoRA files that are written for the families that it has."""

import io
import json
import os
import subprocess
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from sd3_light.assets import DEMO
from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.config.schema_tables import LORA_TARGETS
from sd3_light.core.registry import family_named
from sd3_light.export.lora_file import write_lora
from sd3_light.model.lora_layers import LoraModule, target_layers
from tests.e2e import comfyui_client
from tests.families import make_denoiser
from tests.warm import REAL_PYTHON

pytestmark = pytest.mark.slow
COMFYUI = "SD3_LIGHT_COMFYUI"
"""A checkout of ComfyUI, perhaps with folders of libraries that it needs, as in PYTHONPATH; see CONTRIBUTING.md."""
ARCHIVE = "https://codeload.github.com/comfyanonymous/ComfyUI/zip/refs/heads/master"
FLUX2 = "to_qkv_mlp_proj"
"""A name of Flux.2 that ComfyUI knows since it maps all of them."""
NEWER = {"krea2"}
"""Families that ComfyUI has, and `comfyui_client.py` has no config for."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of imports: the given checkout, or a downloaded one."""
    if given := os.environ.get(COMFYUI):
        return given
    folder = tmp_path_factory.mktemp("comfyui")
    try:
        with urllib.request.urlopen(ARCHIVE, timeout=60) as answer:
            zipfile.ZipFile(io.BytesIO(answer.read())).extractall(folder)
    except (OSError, urllib.error.URLError, zipfile.BadZipFile) as error:
        pytest.skip(f"{COMFYUI} is not set, and ComfyUI cannot be downloaded ({error})")
    return str(next(folder.iterdir()))


def denoiser(name: str) -> Any:
    if name == "sd3":
        kind = diffusers.SD3Transformer2DModel
        config = {**kind.load_config(DEMO / "transformer"), "num_layers": 2}
        return kind.from_config(config)
    return make_denoiser(name)


def lora_of(name: str, path: Path) -> Path:
    """Write a LoRA of every layer that a family trains by default."""
    model = denoiser(name)
    family: Any = family_named(name)
    modules = {}
    for layer in target_layers(model, LORA_TARGETS if name == "sd3" else family.adapter_targets):
        rows, columns = model.get_submodule(layer).weight.shape
        modules[layer] = LoraModule(torch.ones(2, columns), torch.ones(rows, 2))
    return write_lora(path, modules, names=family.files.adapters)


@pytest.fixture(scope="module")
def unmatched(checkout: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Family -> keys that ComfyUI does not map."""
    folder = tmp_path_factory.mktemp("loras")
    arguments: list[str] = []
    for name in comfyui_client.MODELS:
        arguments += [name, str(lora_of(name, folder / f"{name}.safetensors"))]
    environment = {**os.environ, "PYTHONPATH": checkout}
    command = [REAL_PYTHON, comfyui_client.__file__, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in done.stderr and "comfy" in done.stderr.splitlines()[-1]:
        pytest.fail(f"{checkout} has no ComfyUI: {done.stderr.splitlines()[-1]}")
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"ComfyUI needs a library that is not installed: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", comfyui_client.MODELS)
def test_comfyui_maps_every_key(checkout: str, unmatched: dict[str, list[str]], name: str) -> None:
    source = Path(checkout.split(os.pathsep)[0]) / "comfy" / "utils.py"
    if name == "flux2" and FLUX2 not in source.read_text(encoding="utf-8"):
        assert all("single_transformer_blocks" in key or ".ff" in key for key in unmatched[name])
        pytest.skip("this ComfyUI does not know diffusers' names of Flux.2 yet (pull requests 11981 and 11997)")
    assert unmatched[name] == []


def test_every_family_of_comfyui_is_mapped() -> None:
    stated = {name for name in FAMILY_NAMES if family_named(name).files.adapters.comfyui}
    assert stated == set(comfyui_client.MODELS) | NEWER
