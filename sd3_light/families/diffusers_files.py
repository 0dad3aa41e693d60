"""The files of a family that has diffusers' own layouts only: defaults for most of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from sd3_light.core.files import AdapterNames, CardTexts, CustomPipeline, Files, SingleFiles
from sd3_light.export.proof_process import sample_image
from sd3_light.model.folder import missing_components

_CODE = """import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("this folder", dtype=torch.float32)
seed = torch.Generator("cpu").manual_seed(0)
image = pipe("a prompt", generator=seed).images[0]"""


class DiffusersFiles(Files):
    """See `Files`. A family adds its text policy, its fixed inputs, and the name of its pipeline's class."""

    pipeline: ClassVar[str]

    @property
    def adapters(self) -> AdapterNames:
        """See `Files.adapters`."""
        return AdapterNames()

    @property
    def single(self) -> SingleFiles | None:
        """See `Files.single`."""
        return None

    def missing(self, folder: Path, denoiser: bool) -> tuple[str, ...]:
        """See `Files.missing`."""
        return missing_components(folder, denoiser)

    def custom_pipeline(self, text: Mapping[str, Any]) -> CustomPipeline | None:
        """See `Files.custom_pipeline`."""
        return None

    def reference_image(self, pipe: Any, inputs: Mapping[str, Any]) -> Tensor:
        """See `Files.reference_image`."""
        return sample_image(pipe, inputs)

    def card(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> CardTexts:
        """See `Files.card`."""
        blocks = f"{config['num_layers']} blocks" if "num_layers" in config else "of the base model's size"
        length = f"up to {text['t5_max_length']} tokens" if "t5_max_length" in text else "as in the stock pipeline"
        return CardTexts(blocks, length, _CODE.format(pipeline=self.pipeline), "", "stock diffusers")
