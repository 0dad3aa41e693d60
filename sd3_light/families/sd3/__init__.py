"""SD3 and SD3.5."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.config import ModelConfig
from sd3_light.core.columns import Bucket, Column
from sd3_light.core.family import Family

if TYPE_CHECKING:
    from sd3_light.families.sd3.weights import SD3Weights


class SD3(Family):
    """Stable Diffusion 3 and 3.5: an MMDiT with three text encoders."""

    name = "sd3"
    title = "SD3"
    pipeline = "StableDiffusion3Pipeline"
    denoiser = "SD3Transformer2DModel"

    @cached_property
    def weights(self) -> "SD3Weights":
        """The denoiser's weights."""
        from sd3_light.families.sd3.weights import SD3Weights

        return SD3Weights()

    def columns(self, model: ModelConfig, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
        """See `Family.columns`."""
        from sd3_light.families.sd3.columns import sd3_columns

        return sd3_columns(model, folder, bucket)

    def prepared_columns(self, model: ModelConfig, columns: Sequence[Column]) -> tuple[Column, ...]:
        """See `Family.prepared_columns`."""
        from sd3_light.families.sd3.columns import prepared_columns

        return prepared_columns(model, columns)
