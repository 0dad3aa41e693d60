"""A fake SD3 folder (JSON and empty weights), a few images, and the TOML files that name them."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from sd3_light.config import SIZES, LoadedConfig, load_config
from sd3_light.tensor_file import header_bytes

CLIP = {"hidden_size": 112, "projection_dim": 112, "max_position_embeddings": 77}
JSONS: dict[str, dict[str, Any]] = {
    "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
    "vae/config.json": {"latent_channels": 16, "block_out_channels": [8, 8, 8, 8]},
    **{f"{name}/config.json": CLIP for name in ("text_encoder", "text_encoder_2")},
    "text_encoder_3/config.json": {"d_model": 256},
    **{f"{name}/tokenizer.json": {} for name in ("tokenizer", "tokenizer_2", "tokenizer_3")},
    "tokenizer/tokenizer_config.json": {"model_max_length": 20},
    "scheduler/scheduler_config.json": {},
}
ENCODERS = tuple(f"text_encoder{suffix}/model.safetensors" for suffix in ("", "_2", "_3"))
WEIGHTS = ("vae/diffusion_pytorch_model.safetensors", *ENCODERS)
TOP = {"output_dir": '"runs"', "dataset": '"data.toml"', "max_steps": "10", "save_every_n_steps": "5"}
MODEL = {"diffusers_path": '"sd3"', "t5_max_length": "12"}
PRETRAIN = 'size = "demo"\ntrain_type = "sd3_light_pretrain"'
DATASET = 'resolutions = [64]\n[[directory]]\npath = "images"\n'


class FakeProject:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sd3 = folder / "sd3"
        for name, content in JSONS.items():
            self.json(f"sd3/{name}", content)
        for name in WEIGHTS:
            (self.sd3 / name).touch()
        (folder / "images").mkdir()

    def json(self, name: str, content: object) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    def denoiser(self, name: str, size: str = "demo", **other: Any) -> Path:
        """Create a denoiser folder ``name`` inside the test's folder."""
        config = {"_class_name": "SD3Transformer2DModel", **SIZES[size].transformer_config(), **other}
        folder = self.json(f"{name}/config.json", config).parent
        (folder / "diffusion_pytorch_model.safetensors").write_bytes(header_bytes([]))
        return folder

    def squares(self, count: int, side: int = 64) -> None:
        for number in range(count):
            self.image(f"{number}.png", side, side)

    def image(self, name: str, width: int, height: int, caption: str | None = "an image") -> None:
        path = self.folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (width, height)).save(path)
        if caption is not None:
            path.with_suffix(".txt").write_text(caption, encoding="utf-8")

    def load(self, top: str = "", model: str = PRETRAIN, tables: str = "", dataset: str = DATASET) -> LoadedConfig:
        """Load a config with these keys, completed by valid ones."""
        lines = [f"{key} = {value}" for key, value in TOP.items() if f"\n{key} =" not in f"\n{top}"]
        lines = [top, *lines, "[model]", model]
        lines += [f"{key} = {value}" for key, value in MODEL.items() if f"\n{key} =" not in f"\n{model}"]
        path = self.folder / "train.toml"
        path.write_text("\n".join([*lines, tables]), encoding="utf-8")
        (self.folder / "data.toml").write_text(dataset, encoding="utf-8")
        return load_config(path)
