"""SD3's denoiser: its size, its initial weights and its module."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source, why_source
from sd3_light.families.sd3.start import configured_size, folder_size, named_size, single_file_config
from sd3_light.families.stock.weights import StockWeights

if TYPE_CHECKING:
    from diffusers import SD3Transformer2DModel
    from torch import nn

    from sd3_light.model.loading import StoredWeights


class SD3Weights(StockWeights):
    """See `Weights`: also random ones, and those of a single file."""

    def __init__(self) -> None:
        super().__init__("SD3", "SD3Transformer2DModel")

    def start(self, model: ModelConfig) -> WeightsStart:
        """See `Weights.start`."""
        source = start_source(model)
        if source is None:
            size = configured_size(model)
            return WeightsStart("random", None, size, f"random weights of size {size.name}, drawn from the seed")
        if source.is_file():
            size = named_size(single_file_config(source), source)
            return WeightsStart(
                "file", None, size, f"weights of the single file {source} ({why_source(model)})", source
            )
        folder = denoiser_folder(source)
        size = folder_size(folder)
        return WeightsStart("folder", folder, size, f"weights of {folder} ({why_source(model)})")

    def require(self, folder: Path) -> None:
        """See `Weights.require`."""
        folder_size(folder)

    def load(self, start: WeightsStart, seed: int) -> "nn.Module":
        """See `Weights.load`."""
        from sd3_light.families.sd3.random_weights import new_transformer

        if start.source is not None:
            return super().load(start, seed)
        denoiser: nn.Module = new_transformer(start.size.transformer_config(), seed, start.size.position_step)
        return denoiser

    def unread(self, start: WeightsStart) -> "tuple[nn.Module, StoredWeights]":
        """See `Weights.unread`."""
        from diffusers import SD3Transformer2DModel

        from sd3_light.families.sd3.single_file import open_denoiser
        from sd3_light.model.loading import empty_model

        if start.file is not None:
            config, stored = open_denoiser(start.file)
            return empty_model(SD3Transformer2DModel, config).eval(), stored
        denoiser, weights = super().unread(start)
        if unexpected := weights.keys() - denoiser.state_dict().keys():
            raise UserError(
                f"the weights in {start.folder} do not match its config.json: {min(unexpected)}; download or export it "
                "again"
            )
        return denoiser, weights

    def empty(self, config: Mapping[str, Any]) -> "SD3Transformer2DModel":
        """See `Weights.empty`."""
        import torch
        from diffusers import SD3Transformer2DModel

        with torch.device("meta"):
            return SD3Transformer2DModel(**config)
