"""Other versions of diffusers and transformers draw from our files what we draw (docs/formats/compatibility.md)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.export.lora_file import write_lora
from sd3_light.export.lora_merge import add_adapters
from sd3_light.export.lora_stack import Lora
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.families.sd3.single_file import write_single_file
from sd3_light.model.lora_layers import LoraModule
from tests.e2e import client
from tests.warm import REAL_PYTHON

OLD_CLIENTS = "SD3_LIGHT_OLD_CLIENTS"
"""A folder with other versions of the libraries; CONTRIBUTING.md describes how to make it."""
LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.3.attn.to_v", "transformer_blocks.2.ff.net.2")
TOLERANCE = 1 / 255


class Files:
    """The demo model as each kind of file, and what this package draws from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = shutil.copytree(DEMO, folder / "demo")
        config = self.folder / "text_encoder_3" / "config.json"  # released T5s have dropout, the demo's has none
        config.write_text(json.dumps({**json.loads(config.read_text()), "dropout_rate": 0.1}), encoding="utf-8")
        pipe: Any = open_pipeline(self.folder, torch.device("cpu"))[0]
        generator = torch.Generator().manual_seed(0)
        modules = {}
        for layer in LAYERS:
            rows, columns = pipe.transformer.get_submodule(layer).weight.shape
            down, up = (torch.randn(*shape, generator=generator) * 0.2 for shape in ((4, columns), (rows, 4)))
            modules[layer] = LoraModule(down, up, 0.5)
        self.lora = write_lora(folder / "lora.safetensors", modules)
        self.single = write_single_file(self.folder, folder / "demo.safetensors", text_encoders=True).path
        self.expected = client.draw(pipe, "folder")
        projection = pipe.text_encoder.text_projection.weight
        trained = projection.data
        projection.data = torch.eye(*trained.shape)  # readers of single files do not apply CLIP-L's projection
        self.expected |= client.draw(pipe, "single")
        projection.data = trained
        add_adapters(pipe, [Lora(self.lora)])
        self.expected |= client.draw(pipe, "lora")

    def drawn_by(self, python: str, out: Path, paths: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Run the client in another process; return its images and versions."""
        arguments = [client.__file__, str(self.folder), str(self.single), str(self.lora), str(out)]
        process = subprocess.run([python, *arguments], env={**os.environ, **paths}, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-3000:]
        return load_file(out), json.loads(Path(f"{out}.json").read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("clients"))


def same_images(files: Files, images: dict[str, Tensor]) -> None:
    for name, expected in files.expected.items():
        assert (images[name] - expected).abs().max() <= TOLERANCE, name
    for language in client.PROMPTS:
        plain = files.expected[f"folder {language}"]
        assert (images[f"lora {language}"] - plain).abs().max() > 0.1, "the LoRA has an effect"


@pytest.mark.slow
def test_the_installed_libraries_draw_the_same_images(files: Files, tmp_path: Path) -> None:
    images, _ = files.drawn_by(sys.executable, tmp_path / "images.safetensors", {})
    same_images(files, images)


@pytest.mark.slow
def test_older_libraries_draw_the_same_images(files: Files, tmp_path: Path) -> None:
    folder = os.environ.get(OLD_CLIENTS)
    if not folder:
        pytest.skip(f"needs older libraries: {OLD_CLIENTS} is not set (CONTRIBUTING.md)")
    images, versions = files.drawn_by(REAL_PYTHON, tmp_path / "images.safetensors", {"PYTHONPATH": folder})
    assert int(versions["transformers"].split(".")[0]) < 5, versions
    same_images(files, images)
