"""Saving during a run: exports for use, in a series with a retention rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.checkpoint.state import Progress
from sd3_light.checkpoint.store import checkpoint_name, remove
from sd3_light.config import TrainConfig
from sd3_light.export.folder import ExportSpec, write_folder


def export_spec(
    config: TrainConfig, transformer_config: Mapping[str, object], weights: str, progress: Progress
) -> ExportSpec:
    """What an export of this run must be."""
    model = config.model
    return ExportSpec(
        base=model.diffusers_path,
        transformer_config=dict(transformer_config),
        save_dtype=getattr(torch, config.save_dtype),
        shift=model.shift or 1.0,
        flux_shift=model.flux_shift,
        text={
            "text_tokens": model.text_tokens,
            "uncond_text": model.uncond_text,
            "t5_max_length": model.t5_max_length,
        },
        facts={"weights": weights, **progress.as_dict()},
    )


def model_config(transformer: SD3Transformer2DModel) -> dict[str, object]:
    """The constructor's arguments that make this denoiser; private entries left out."""
    return {key: value for key, value in transformer.config.items() if not key.startswith("_")}


def whole_state(transformer: SD3Transformer2DModel, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter and buffer of the denoiser, the trained ones replaced by ``trained``."""
    state: dict[str, Tensor] = dict(transformer.state_dict())
    unknown = set(trained) - set(state)
    assert not unknown, f"no such parameters: {sorted(unknown)[:5]}"
    return {**state, **trained}


@dataclass
class Saver:
    """Writes ``<run>/exports/NAME``; only the main process writes.

    ``untrained`` are the frozen weights and the buffers. They are copied before an engine lays the denoiser out, so
    that a thread can export without touching a module that is training.
    """

    config: TrainConfig
    transformer_config: Mapping[str, object]
    untrained: Mapping[str, Tensor]
    folder: Path

    @staticmethod
    def of(config: TrainConfig, transformer: SD3Transformer2DModel, folder: Path) -> "Saver":
        """The saver of a run, made before its engine; what trains is chosen already."""
        trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
        rest = {name: tensor for name, tensor in transformer.state_dict().items() if name not in trained}
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rest.items()}
        return Saver(config, model_config(transformer), copies, folder)

    def save_full_model(self, name: str, trained: Mapping[str, Tensor], weights: str, progress: Progress) -> Path:
        """A complete, proven diffusers folder with these trained weights."""
        spec = export_spec(self.config, self.transformer_config, weights, progress)
        return write_folder(self.folder / name, {**self.untrained, **trained}, spec)

    def save_model(self, trained: Mapping[str, Tensor], weights: str, progress: Progress) -> Path:
        """The export of this step; older ones go when there are more than ``keep_last_n_exports``."""
        path = self.save_full_model(checkpoint_name(progress.step), trained, weights, progress)
        if self.config.keep_last_n_exports:
            for old in sorted(self.folder.glob("step-*"))[: -self.config.keep_last_n_exports]:
                if old != path:
                    remove(old)
        return path
