"""SD3 and SD3.5."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig, TrainConfig
from sd3_light.config.schema_tables import LORA_TARGETS
from sd3_light.config.sizes import IMAGE_ATTENTION
from sd3_light.core.columns import Bucket, Column
from sd3_light.core.family import Family
from sd3_light.core.sampling import OwnDrawing
from sd3_light.core.start import WeightsStart, denoiser_folder
from sd3_light.core.training import FastBlocks
from sd3_light.families.sd3.fast.choice import why_stock_on_device
from sd3_light.model.base_values import drawing_of_run, drawn_as, few_step_values
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sd3_light.families.sd3.checks import SD3Checks
    from sd3_light.families.sd3.cost import SD3Cost
    from sd3_light.families.sd3.encoding import SD3Encoding
    from sd3_light.families.sd3.files import SD3Files
    from sd3_light.families.sd3.module import SD3Training
    from sd3_light.families.sd3.sampling import SD3Sampling
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
    sets_references = True

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
        from sd3_light.families.sd3.module import SD3Training

        return SD3Training()

    @cached_property
    def checks(self) -> "SD3Checks":
        """What `check` and `new` read in a model folder."""
        from sd3_light.families.sd3.checks import SD3Checks

        return SD3Checks()

    @property
    def fast_blocks(self) -> "SD3FastBlocks":
        """The kernels of `fast`."""
        return SD3FastBlocks()

    def drawing(self, config: TrainConfig) -> OwnDrawing:
        """See `Family.drawing`."""
        return drawing_of_run(config, unguided=1.0)

    def completed(self, config: TrainConfig) -> TrainConfig:
        """See `Family.completed`: how images are drawn."""
        return few_step_values(drawn_as(self.drawing(config), config))

    def recipe(self, folder: Path) -> Mapping[str, Any]:
        """See `Family.recipe`: the second attention of SD3.5 is adapted too."""
        path = denoiser_folder(folder) / "config.json"
        if not path.is_file() or not read_json(path).get("dual_attention_layers"):
            return {}
        return {"adapter.target_modules": [*LORA_TARGETS, *(f"attn2.{name}" for name in IMAGE_ATTENTION)]}

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


class SD3FastBlocks(FastBlocks):
    """See `FastBlocks`."""

    def why_not(self, config: TrainConfig, device: "torch.device", denoiser: "nn.Module | None") -> str | None:
        """See `FastBlocks.why_not`."""
        from sd3_light.families.sd3.fast.forward import why_stock

        reason = why_stock_on_device(config, device.type)
        return reason or (why_stock(denoiser) if denoiser is not None else None)

    def kernel_problem(
        self, config: TrainConfig, device: "torch.device", denoiser: "nn.Module", fp8: bool
    ) -> str | None:
        """See `FastBlocks.kernel_problem`; a CPU runs the kernels' reference."""
        from sd3_light.families.sd3.fast.self_check import KernelShape, kernel_problem

        if device.type != "cuda":
            return None
        model: Any = denoiser.config
        shape = KernelShape(model.num_attention_heads, model.attention_head_dim, config.model.transformer_dtype, fp8)
        return kernel_problem(shape, device)
