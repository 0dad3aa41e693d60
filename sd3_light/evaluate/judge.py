"""The judge: an image tower and a text tower that compare images with captions.

A judge is a folder in the layout of transformers' dual encoders, as `sd3-light parts` writes it and as CLIP models have
it: `config.json`, `model.safetensors`, `preprocessor_config.json` and a tokenizer. Images are scaled to its square
size and normalised with its mean and deviation; captions are padded to the length of its tokenizer. A vision model
(ViT, DINOv2, ...) is a judge without texts: its features are the pooled output.
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
from sd3_light.model.folder import JUDGE
from sd3_light.model.part_configs import LOAD_ERRORS, check_files, load_part, read_json

PREPROCESSOR = "preprocessor_config.json"
MADE = "made.json"
"""What made a part, beside its weights."""
_MAX_SIDE = 4096


@dataclass(frozen=True)
class Judge:
    """Both towers on one device; without a tokenizer there is only the image tower. Features are vectors of length 1:
    their products are cosines."""

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
        encode = self.model.get_image_features if self.reads_text else self.model
        return F.normalize(_vectors(encode(pixel_values=(pixels / 255 - mean) / std)), dim=-1)

    @property
    def reads_text(self) -> bool:
        """Whether there is a text tower."""
        return self.tokenizer is not None

    @torch.no_grad()
    def text_features(self, captions: Sequence[str]) -> Tensor:
        """Return the features [N, W] of captions; those longer than the tokenizer's length are cut."""
        length = min(int(self.tokenizer.model_max_length), 512)
        padding = {"padding": "max_length", "truncation": True, "max_length": length}
        ids = self.tokenizer(list(captions), return_tensors="pt", **padding).input_ids
        return F.normalize(_vectors(self.model.get_text_features(input_ids=ids.to(self.device))), dim=-1)


def shares_captions(folder: Path) -> bool:
    """Return whether a folder is one of `sd3-light parts` whose judge is one of its text encoders."""
    made = folder / JUDGE / MADE
    return made.is_file() and not read_json(made).get("judge_share")


def load_judge(folder: Path, device: torch.device) -> Judge:
    """Load a judge in float32 from safetensors; nothing in the folder is executed.

    ``folder`` may also be one that `sd3-light parts` wrote, with a judge inside.
    """
    folder = folder / JUDGE if (folder / JUDGE).is_dir() else folder
    if not (folder / PREPROCESSOR).is_file():
        kinds = "a folder of `sd3-light parts`, or of a CLIP or vision model"
        raise UserError(f"{folder} has no judge and no {PREPROCESSOR}; give {kinds}")
    settings = read_json(folder / PREPROCESSOR)
    side, mean, std = _side(settings), settings.get("image_mean"), settings.get("image_std")
    if side is None or not _is_colour(mean) or not _is_colour(std):
        raise UserError(f"{folder / PREPROCESSOR} has no size, image_mean and image_std; give a judge or a CLIP folder")
    model = load_part(AutoModel, folder, dtype=torch.float32, trust_remote_code=False)
    is_dual = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")
    if not is_dual and model.main_input_name != "pixel_values":
        kind = type(model).__name__
        raise UserError(f"{folder} is a {kind}, without features of images; give a CLIP or vision model folder")
    model = model.to(device).eval().requires_grad_(False)
    return Judge(model, _tokenizer(folder) if is_dual else None, side, tuple(mean), tuple(std), device)


def _tokenizer(folder: Path) -> Any:
    check_files(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise UserError(f"{folder} has no usable tokenizer ({error!s:.200}); write the folder again") from error


def _side(settings: dict[str, Any]) -> int | None:
    """Return the side of the square images: of the crop if there is one."""
    size = (settings.get("crop_size") if settings.get("do_center_crop") else None) or settings.get("size")
    side = size.get("height", size.get("shortest_edge")) if isinstance(size, dict) else size
    return side if isinstance(side, int) and 0 < side <= _MAX_SIDE else None


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
    # transformers 5 returns an output object, earlier ones the tensor; a vision model without pooling has its tokens
    if isinstance(features, Tensor):
        return features.float()
    pooled: Tensor | None = getattr(features, "pooler_output", None)
    pooled = features.last_hidden_state.mean(1) if pooled is None else pooled
    return pooled.float().flatten(1)


def _is_colour(value: Any) -> TypeGuard[list[float]]:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(item, int | float) for item in value)
