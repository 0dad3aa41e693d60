"""Folders of small random models that compare images: a CLIP model and a vision model."""

import shutil
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model

from sd3_light.assets import DEMO
from sd3_light.evaluate.feature_model import save_feature_model

SIDE = 32
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


def write_clip(folder: Path) -> Path:
    """Write a CLIP model with the demo's tokenizer."""
    text = {**SIZES, "intermediate_size": 16, "vocab_size": 4096, "eos_token_id": 1, "bos_token_id": 0}
    vision = {**SIZES, "intermediate_size": 16, "image_size": SIDE, "patch_size": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    save_feature_model(model, _NoTokenizer(), SIDE, folder)
    for file in (DEMO / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


def write_vision(folder: Path) -> Path:
    """Write a DINOv2 model, which reads no text."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Dinov2Model(Dinov2Config(**SIZES, mlp_ratio=1, image_size=SIDE, patch_size=8))
    save_feature_model(model, _NoTokenizer(), SIDE, folder)
    return folder
