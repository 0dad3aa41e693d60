"""The weights of a stock denoiser: always those of a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.family import Weights
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source, why_source
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.model.loading import StoredWeights


@dataclass(frozen=True)
class StockSize:
    """A denoiser by its `config.json`."""

    name: str
    config: Mapping[str, Any]

    def transformer_config(self) -> dict[str, Any]:
        """Return the arguments of the denoiser's class."""
        return {key: value for key, value in self.config.items() if not key.startswith("_")}


class StockWeights(Weights):
    """See `Weights`. ``title`` and ``kind`` are the family's name in messages and the class of its denoiser."""

    def __init__(self, title: str, kind: str) -> None:
        self.title = title
        self.kind = kind

    def start(self, model: ModelConfig) -> WeightsStart:
        """See `Weights.start`."""
        source = start_source(model)
        if source is None:
            raise UserError(f"{self.title} starts from trained weights only; remove model.train_type and model.init")
        if source.is_file():
            raise UserError(
                f"{source}: {self.title} starts from a diffusers folder, not from a single file; remove model.init to "
                "start from diffusers_path, or give a folder"
            )
        folder = denoiser_folder(source)
        config = self._config(folder)
        return WeightsStart(
            "folder", folder, StockSize(self.title, config), f"weights of {folder} ({why_source(model)})"
        )

    def require(self, folder: Path) -> None:
        """See `Weights.require`."""
        self._config(folder)

    def load(self, start: WeightsStart, seed: int) -> "nn.Module":
        """See `Weights.load`."""
        from sd3_light.model.loading import read_weights

        return read_weights(*self.unread(start))

    def unread(self, start: WeightsStart) -> "tuple[nn.Module, StoredWeights]":
        """See `Weights.unread`."""
        import diffusers

        from sd3_light.model.loading import open_diffusers_model

        assert start.folder is not None, "random weights are in no file"
        return open_diffusers_model(getattr(diffusers, self.kind), start.folder)

    def empty(self, config: Mapping[str, Any]) -> "nn.Module":
        """See `Weights.empty`."""
        import diffusers

        from sd3_light.model.loading import empty_model

        denoiser: nn.Module = empty_model(getattr(diffusers, self.kind), config)
        return denoiser

    def from_state(self, config: Mapping[str, Any], state: "Mapping[str, Tensor]") -> "nn.Module":
        """See `Weights.from_state`."""
        from sd3_light.model.loading import assign_weights, mismatches

        denoiser = self.empty(config)
        wrong = [*mismatches(denoiser, state), *(state.keys() - denoiser.state_dict().keys())]
        assert not wrong, wrong
        assign_weights(denoiser, lambda name, _: state[name])
        return denoiser.eval()

    def _config(self, folder: Path) -> dict[str, Any]:
        path = folder / "config.json"
        config = read_json(path)
        if config.get("_class_name") != self.kind:
            raise UserError(f"{path} describes a {config.get('_class_name')!r:.80}, {self.title} has a {self.kind}")
        return config
