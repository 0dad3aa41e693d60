"""The judge: an image tower and a text tower that compare images with captions.

A judge is a folder in the layout of transformers' dual encoders, as `sd3-light parts` writes it and as CLIP models have
it: `config.json`, `model.safetensors`, `preprocessor_config.json` and a tokenizer. Images are scaled to its square
size and normalised with its mean and deviation; captions are padded to the length of its tokenizer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from sd3_light.config.faults import UserError
from sd3_light.files import write_atomically
from sd3_light.model.part_configs import LOAD_ERRORS, load_part, read_json

PREPROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class Judge:
    """Both towers on one device. Features are vectors of length 1: their products are cosines."""

    model: Any
    tokenizer: Any
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    device: torch.device

    @torch.no_grad()
    def image_features(self, pixels_NHWC: NDArray[np.uint8] | Tensor) -> Tensor:
        """Return the features [N, W] of images of one size."""
        pixels = torch.as_tensor(pixels_NHWC).to(self.device).permute(0, 3, 1, 2).float()
        if pixels.shape[2:] != (self.side, self.side):
            pixels = F.interpolate(pixels, (self.side, self.side), mode="bilinear", antialias=True, align_corners=False)
            pixels = pixels.round().clamp(0, 255)
        mean, std = (torch.tensor(values, device=self.device)[:, None, None] for values in (self.mean, self.std))
        features = self.model.get_image_features(pixel_values=(pixels / 255 - mean) / std)
        return F.normalize(_vectors(features), dim=-1)

    @torch.no_grad()
    def text_features(self, captions: Sequence[str]) -> Tensor:
        """Return the features [N, W] of captions; those longer than the tokenizer's length are cut."""
        length = min(int(self.tokenizer.model_max_length), 512)
        padding = {"padding": "max_length", "truncation": True, "max_length": length}
        ids = self.tokenizer(list(captions), return_tensors="pt", **padding).input_ids
        return F.normalize(_vectors(self.model.get_text_features(input_ids=ids.to(self.device))), dim=-1)


def load_judge(folder: Path, device: torch.device) -> Judge:
    """Load a judge in float32 from safetensors; nothing in the folder is executed."""
    settings = read_json(folder / PREPROCESSOR)
    side, mean, std = (settings.get(key) for key in ("size", "image_mean", "image_std"))
    side = side.get("height", side.get("shortest_edge")) if isinstance(side, dict) else side
    if not isinstance(side, int) or not _is_colour(mean) or not _is_colour(std):
        raise UserError(f"{folder / PREPROCESSOR} has no size, image_mean and image_std; give a judge or a CLIP folder")
    model = load_part(AutoModel, folder, dtype=torch.float32)
    if not hasattr(model, "get_image_features") or not hasattr(model, "get_text_features"):
        kind = type(model).__name__
        raise UserError(f"{folder} is a {kind}, without features of images and texts; give a CLIP folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise UserError(f"{folder} has no usable tokenizer ({error!s:.200}); write the folder again") from error
    model = model.to(device).eval().requires_grad_(False)
    return Judge(model, tokenizer, side, tuple(mean), tuple(std), device)


def save_judge(model: Any, tokenizer: Any, side: int, folder: Path) -> None:
    """Write a judge whose images have values from -1 to 1."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"height": side, "width": side},
        "do_center_crop": False, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True, "resample": 2,
    }  # fmt: skip
    write_atomically(folder / PREPROCESSOR, (json.dumps(settings, indent=2) + "\n").encode())


def _vectors(features: Any) -> Tensor:
    # transformers 5 returns an output object, earlier ones the tensor
    vectors: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return vectors.float()


def _is_colour(value: Any) -> TypeGuard[list[float]]:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(item, int | float) for item in value)
