"""A stock diffusers denoiser in training, for families without custom blocks."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sd3_light.config import TrainConfig
from sd3_light.config.base import Checkpointing, recomputed_blocks
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel, denoiser_blocks, save_products, tapped
from sd3_light.core.objective import Objective, Prediction
from sd3_light.core.start import WeightsStart
from sd3_light.core.training import TrainingParts
from sd3_light.data.prepare import reference_columns
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.stock.prepare import StockPreparer
from sd3_light.flow.objectives import configured_objective
from sd3_light.model.base_values import shift_line
from sd3_light.model.host_inputs import checkpoint_on_host

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily

TEXT_STEP = 32
"""Recorded text is padded to a multiple of this."""


class StockModel(TrainedModel):
    """Runs the denoiser as it is, under autocast on GPUs; its ``family`` says how it is called.

    Its values are in float32, whatever the cache stores.
    """

    def __init__(self, denoiser: nn.Module, config: TrainConfig, family: "StockFamily", objective: Objective) -> None:
        super().__init__(denoiser, objective)
        self.compute_dtype = getattr(torch, config.model.transformer_dtype)
        self._family = family
        self._guidance = 1.0 if config.model.guidance is None else config.model.guidance
        stock: Any = denoiser
        if config.activation_checkpointing:
            stock.enable_gradient_checkpointing(partial(self._checkpoint, config.activation_checkpointing))
        blocks = self.blocks()
        self._kept = set(blocks[recomputed_blocks(config.activation_checkpointing, len(blocks)) :])
        stock.train()  # without it diffusers keeps all activations

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """See `TrainedModel.predict`."""
        if self.text_step is not None:
            batch = self.recordable(batch)
        device = batch["noisy"].device
        if self.dropout is not None:
            self.dropout.forward(device)
        autocast = device.type == "cuda" and self.compute_dtype != torch.float32
        with (
            torch.autocast(device.type, self.compute_dtype, enabled=autocast),
            tapped(self.blocks(), taps, lambda output: self._family.image_part(output, batch)) as features,
        ):
            velocity = self._family.denoise(self.denoiser, batch.map_tensors(_in_float32), self._guidance)
        return Prediction(velocity, features)

    def recordable(self, batch: Batch) -> Batch:
        """See `TrainedModel.recordable`."""
        return self._family.rounded(batch, self.text_step or TEXT_STEP)

    def _checkpoint(self, level: Checkpointing, block: nn.Module, *inputs: Any) -> Any:
        """Run a block whose backward pass computes it again; only an adapter's dropout draws numbers in it."""
        if block in self._kept:
            return block(*inputs)
        draws = self.dropout is not None
        if level == "host":
            return checkpoint_on_host(block, *inputs, preserve_rng_state=draws)
        context: dict[str, Any] = {"context_fn": save_products} if level == "selective" else {}
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws, **context)


def _in_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


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
            references=reference_columns(self.family.reference_count(model)),
        )

    def model(self, denoiser: nn.Module, config: TrainConfig, fast: bool) -> StockModel:
        """See `TrainingParts.model`."""
        assert not fast, f"{self.family.title} has no fast blocks"
        objective = configured_objective(config, len(denoiser_blocks(denoiser)))
        self.family.speed_up(denoiser)
        if not self.family.cudnn_attention:
            torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention takes its place
        return StockModel(denoiser, config, self.family, objective)
