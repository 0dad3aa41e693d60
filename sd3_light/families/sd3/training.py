"""SD3 in training."""

from diffusers import SD3Transformer2DModel
from torch import nn

from sd3_light.config import TrainConfig
from sd3_light.core.start import WeightsStart
from sd3_light.core.training import TrainingParts
from sd3_light.data.shards import CaptionFeatures
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.prepare import InputPreparer
from sd3_light.model.base_values import shift_line


class SD3Training(TrainingParts):
    """See `TrainingParts`."""

    def preparer(self, config: TrainConfig, start: WeightsStart, empty_text: CaptionFeatures | None) -> InputPreparer:
        """See `TrainingParts.preparer`."""
        model = config.model
        used = empty_text if model.uncond_text == "empty" else None
        scale = LatentScale.of_folder(model.diffusers_path)
        line = shift_line(model)
        return InputPreparer(config.seed, model, scale, used, start.size.pos_embed_max_size, line=line)

    def model(self, denoiser: nn.Module, config: TrainConfig, fast: bool) -> SD3TrainingModule:
        """See `TrainingParts.model`."""
        assert isinstance(denoiser, SD3Transformer2DModel)
        return SD3TrainingModule(denoiser, config, fast)
