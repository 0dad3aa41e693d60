"""A feature model: an image tower and a text tower that compare images with captions.

It is a folder in the layout of transformers' dual encoders, as the judge of `sd3-light parts` and CLIP models have
it: `config.json`, `model.safetensors`, `preprocessor_config.json` and a tokenizer. Images are scaled to its square
size and normalised with its mean and deviation; captions are padded to the length of its tokenizer. A vision model
(ViT, DINOv2, ...) is one without texts: its features are the pooled output.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from sd3_light.config.faults import UserError
from sd3_light.encoding.teacher import load_vision_model, scaled_pixels
from sd3_light.files import write_atomically
from sd3_light.model.folder import JUDGE
from sd3_light.model.part_configs import LOAD_ERRORS, check_files, read_json
from sd3_light.model.vision import PREPROCESSOR, vision_settings

MADE = "made.json"
"""What made a part, beside its weights."""


@dataclass(frozen=True)
class FeatureModel:
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
        pixels = scaled_pixels(torch.as_tensor(pixels_NHWC).to(self.device), self.side, self.mean, self.std)
        encode = self.model.get_image_features if self.reads_text else self.model
        return F.normalize(_vectors(encode(pixel_values=pixels)), dim=-1)

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


def load_feature_model(folder: Path, device: torch.device) -> FeatureModel:
    """Load a feature model in float32 from safetensors; nothing in the folder is executed.

    ``folder`` may also be one that `sd3-light parts` wrote, with a judge inside.
    """
    settings = vision_settings(folder)
    folder = settings.folder
    model = load_vision_model(folder)
    is_dual = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")
    if not is_dual and model.main_input_name != "pixel_values":
        kind = type(model).__name__
        raise UserError(f"{folder} is a {kind}, without features of images; give a CLIP or vision model folder")
    tokenizer = _tokenizer(folder) if is_dual else None
    return FeatureModel(model.to(device), tokenizer, settings.side, settings.mean, settings.std, device)


def _tokenizer(folder: Path) -> Any:
    check_files(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise UserError(f"{folder} has no usable tokenizer ({error!s:.200}); write the folder again") from error


def save_feature_model(model: Any, tokenizer: Any, side: int, folder: Path) -> None:
    """Write a feature model whose images have values from -1 to 1."""
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
