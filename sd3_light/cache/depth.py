"""Depth of an image, near parts white: any depth-estimation model of transformers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForDepthEstimation
from transformers.models.auto.modeling_auto import MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES

from sd3_light.cache.folder_images import OWN_FILES, model_folder, named_model
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.model.part_configs import check_files

_METRES = ("depth_pro", "glpn", "prompt_depth_anything", "zoedepth")
"""Models whose values grow with the distance, as do those that say that they are metric; those of others shrink."""
_NOT_FINITE = "not_finite: the model returned values that are not finite"


class DepthModel:
    """A depth-estimation model with its processor."""

    def __init__(self, model: Any, processor: Any, device: torch.device, is_distance: bool) -> None:
        self._model = model
        self._processor = processor
        self._device = device
        self._is_distance = is_distance

    @staticmethod
    def load(model: str) -> "DepthModel":
        """Load a folder or a model of the Hugging Face hub; weights are read from safetensors only."""
        folder = model_folder(model)
        device = Launch().device()
        with named_model(model, "depth-estimation model"):
            check_files(folder)
            config = AutoConfig.from_pretrained(folder, **OWN_FILES)
            kind = config.model_type
            if kind not in MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES:
                raise UserError(f"a {kind}; use one such as Depth Anything or DPT")
            processor = AutoImageProcessor.from_pretrained(folder, **OWN_FILES)
            if not hasattr(processor, "post_process_depth_estimation"):
                raise UserError(f"its processor, {type(processor).__name__}, returns no depth of images")
            loaded = AutoModelForDepthEstimation.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **OWN_FILES
            )
        is_distance = kind in _METRES or getattr(config, "depth_estimation_type", None) == "metric"
        return DepthModel(loaded.to(device).eval(), processor, device, is_distance)

    @torch.no_grad()
    def draw(self, images: Sequence[Image.Image]) -> list[Image.Image | str]:
        """Return the depth of each image in shades of grey, or why there is none."""
        inputs = self._processor(images=list(images), return_tensors="pt").to(self._device)
        sizes = [(image.height, image.width) for image in images]
        depths = self._processor.post_process_depth_estimation(self._model(**inputs), target_sizes=sizes)
        return [self._shades(depth["predicted_depth"].float().cpu().numpy()) for depth in depths]

    def _shades(self, values: NDArray[np.float32]) -> Image.Image | str:
        if not np.isfinite(values).all():
            return _NOT_FINITE
        near = 1 / np.maximum(values, 1e-3) if self._is_distance else values
        span = float(near.max() - near.min())
        shades = (near - near.min()) / span if span else np.zeros_like(near)
        return Image.fromarray((255 * shades).round().astype(np.uint8))
