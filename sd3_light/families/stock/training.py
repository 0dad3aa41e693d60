"""A stock denoiser in training."""

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.core.model import denoiser_blocks
from sd3_light.core.start import WeightsStart
from sd3_light.core.training import TrainingParts
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.stock.model import StockModel
from sd3_light.families.stock.prepare import StockPreparer
from sd3_light.flow.objectives import configured_objective
from sd3_light.model.base_values import shift_line

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily


class StockTraining(TrainingParts):
    """See `TrainingParts`."""

    def __init__(self, family: "StockFamily") -> None:
        self.family = family

    def preparer(self, config: TrainConfig, start: WeightsStart, empty_text: dict[str, Tensor] | None) -> StockPreparer:
        """See `TrainingParts.preparer`."""
        model = config.model
        columns = self.family.text_columns(model, model.diffusers_path)
        ragged = {
            column.name: column.shape[0] if self.family.pads_text else None for column in columns if column.ragged
        }
        return StockPreparer(
            config.seed,
            model,
            LatentScale.of_folder(model.diffusers_path),
            ragged=ragged,
            fixed=tuple(column.name for column in columns if not column.ragged),
            empty_text=empty_text or {},
            patch=self.family.patch,
            line=shift_line(model),
        )

    def model(self, denoiser: nn.Module, config: TrainConfig, fast: bool) -> StockModel:
        """See `TrainingParts.model`."""
        assert not fast, f"{self.family.title} has no fast blocks"
        guidance = self.family.training_guidance(config.model)
        denoise = partial(self.family.denoise, guidance=guidance)
        objective = configured_objective(config, len(denoiser_blocks(denoiser)))
        return StockModel(denoiser, config, denoise, objective, self.family.image_part)
