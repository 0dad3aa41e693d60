"""SD3 and SD3.5."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.config import ModelConfig
from sd3_light.core.columns import Bucket, Column
from sd3_light.core.family import Family
from sd3_light.core.start import WeightsStart

if TYPE_CHECKING:
    from sd3_light.families.sd3.checks import SD3Checks
    from sd3_light.families.sd3.cost import SD3Cost
    from sd3_light.families.sd3.encoding import SD3Encoding
    from sd3_light.families.sd3.fast_blocks import SD3FastBlocks
    from sd3_light.families.sd3.files import SD3Files
    from sd3_light.families.sd3.sampling import SD3Sampling
    from sd3_light.families.sd3.training import SD3Training
    from sd3_light.families.sd3.weights import SD3Weights


class SD3(Family):
    """Stable Diffusion 3 and 3.5: an MMDiT with three text encoders."""

    name = "sd3"
    title = "SD3"
    pipeline = "StableDiffusion3Pipeline"
    denoiser = "SD3Transformer2DModel"
    has_stages = True
    starts_random = True
    has_single_file = True
    comfyui = True
    text_tokens = ("padded", "real")

    @cached_property
    def weights(self) -> "SD3Weights":
        """The denoiser's weights."""
        from sd3_light.families.sd3.weights import SD3Weights

        return SD3Weights()

    @cached_property
    def files(self) -> "SD3Files":
        """Exported folders and their proof, adapter files, single files."""
        from sd3_light.families.sd3.files import SD3Files

        return SD3Files()

    @cached_property
    def encoding(self) -> "SD3Encoding":
        """The frozen networks."""
        from sd3_light.families.sd3.encoding import SD3Encoding

        return SD3Encoding()

    @cached_property
    def sampling(self) -> "SD3Sampling":
        """Images of the denoiser that trains."""
        from sd3_light.families.sd3.sampling import SD3Sampling

        return SD3Sampling()

    @cached_property
    def training(self) -> "SD3Training":
        """What a run needs beside the weights."""
        from sd3_light.families.sd3.training import SD3Training

        return SD3Training()

    @cached_property
    def checks(self) -> "SD3Checks":
        """What `check` and `new` read in a model folder."""
        from sd3_light.families.sd3.checks import SD3Checks

        return SD3Checks()

    @cached_property
    def fast_blocks(self) -> "SD3FastBlocks":
        """The kernels of `model/fast`."""
        from sd3_light.families.sd3.fast_blocks import SD3FastBlocks

        return SD3FastBlocks()

    def cost(self, start: WeightsStart, model: ModelConfig) -> "SD3Cost":
        """See `Family.cost`."""
        from sd3_light.families.sd3.cost import SD3Cost

        return SD3Cost(start.size, model, model.route(start.size.num_layers))

    def columns(self, model: ModelConfig, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
        """See `Family.columns`."""
        from sd3_light.families.sd3.columns import sd3_columns

        return sd3_columns(model, folder, bucket)

    def prepared_columns(self, model: ModelConfig, columns: Sequence[Column]) -> tuple[Column, ...]:
        """See `Family.prepared_columns`."""
        from sd3_light.families.sd3.columns import prepared_columns

        return prepared_columns(model, columns)
