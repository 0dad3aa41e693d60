"""Saving during a run: exports for use, in a series with a retention rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import SD3Transformer2DModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.store import checkpoint_name, remove
from sd3_light.config import DatasetConfig, LoadedConfig, ModelConfig, TrainConfig, resolved_toml
from sd3_light.export.diffusers_folder import ExportError, ExportSpec, write_folder
from sd3_light.training.card_facts import card_facts

RAW = "raw"


def model_spec(model: ModelConfig, transformer_config: Mapping[str, object], **more: Any) -> ExportSpec:
    """What an export of this [model] table must be; ``more`` are other fields of `ExportSpec`."""
    given = {
        "base": model.diffusers_path,
        "transformer_config": dict(transformer_config),
        "save_dtype": getattr(torch, model.dtype),
        "shift": model.shift or 1.0,
        "flux_shift": model.flux_shift,
        "text": text_policy(model),
    }
    return ExportSpec(**{**given, **more})


def text_policy(model: ModelConfig) -> dict[str, Any]:
    """How texts were encoded in training, for `sd3_light.json`."""
    return {
        "text_tokens": model.text_tokens,
        "uncond_text": model.uncond_text,
        "t5_max_length": model.t5_max_length,
    }


def export_spec(
    config: TrainConfig,
    transformer_config: Mapping[str, object],
    weights: str,
    progress: Progress,
    run: Path | None = None,
) -> ExportSpec:
    """What an export of a run must be; its card tells what the folder ``run`` knows."""
    about = {} if run is None else card_facts(config, run, weights, progress)
    return model_spec(
        config.model,
        transformer_config,
        save_dtype=getattr(torch, config.save_dtype),
        facts={"weights": weights, **progress.as_dict()},
        about=about,
        files={"config.toml": config_toml(config)},
    )


def config_toml(config: TrainConfig) -> str:
    """The config, secrets removed, as the run's folder has it."""
    dataset = DatasetConfig(config.dataset, config.cache_dir or config.dataset, ())
    return resolved_toml(LoadedConfig(config.output_dir, config, dataset, {}))


def model_config(transformer: SD3Transformer2DModel) -> dict[str, object]:
    """The constructor's arguments that make this denoiser; private entries left out."""
    return {key: value for key, value in transformer.config.items() if not key.startswith("_")}


def whole_state(
    transformer: SD3Transformer2DModel, trained: Mapping[str, Tensor], freeze: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Every parameter and buffer of the denoiser; those that ``freeze`` does not name are all in ``trained``.

    A trained weight that is not there is an error, never the weight that training started from.
    """
    wanted = [name for name, _ in transformer.named_parameters() if not any(fnmatchcase(name, one) for one in freeze)]
    faults = [f"missing {name}" for name in wanted if name not in trained]
    faults += [f"unexpected {name}" for name in trained if name not in set(wanted)]
    if faults:
        raise ExportError(f"not the weights of this config: {'; '.join(faults[:5])} ({len(faults)} in all)")
    return {**transformer.state_dict(), **trained}


def live_weights(transformer: SD3Transformer2DModel) -> dict[str, Tensor] | None:
    """What trains of a denoiser now, whole and under its stock names; None on ranks that do not write.

    Where FSDP2 has cut the weights all ranks call it together, and one weight at a time is gathered.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    found = {}
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            held = parameter.detach()
            whole = held.full_tensor() if isinstance(held, DTensor) else held
            if writes:
                found[name] = whole.cpu()
    return found if writes else None


class ExportSeries:
    """How a run names its exports and which it keeps. A subclass has ``config``, ``folder`` and ``save_named``."""

    config: TrainConfig
    folder: Path

    def save_named(
        self, name: str, trained: Mapping[str, Tensor] | None, weights: str = RAW, progress: Progress | None = None
    ) -> Path:
        """Write ``<folder>/NAME`` from trained weights, or from those of the moment."""
        raise NotImplementedError

    def save_model(
        self, name: str | Mapping[str, Tensor], weights: str = RAW, progress: Progress | None = None
    ) -> Path:
        """``save_model(name)``: what trains as it is now (of a denoiser that trains as a whole, `save_full_model`).

        ``save_model(trained, weights, progress)``: the export of this step, a part of the series; older ones go when
        there are more than ``keep_last_n_exports``.
        """
        if isinstance(name, str):
            return self.save_named(name, None, weights, progress)
        progress = progress or Progress()
        path = self.save_named(checkpoint_name(progress.step), name, weights, progress)
        if self.config.keep_last_n_exports:
            for old in sorted(self.folder.glob("step-*"))[: -self.config.keep_last_n_exports]:
                if old != path:
                    remove(old)
        return path


@dataclass
class Saver(ExportSeries):
    """Writes ``<run>/exports/NAME``; only the main process writes.

    ``untrained`` are the frozen weights and the buffers. They are copied before an engine lays the denoiser out, so
    that a thread can export without touching a module that is training. ``live`` gives the trained weights of the
    moment, whole, to the calls that are not given any.
    """

    config: TrainConfig
    transformer_config: Mapping[str, object]
    untrained: Mapping[str, Tensor]
    folder: Path
    live: Callable[[], Mapping[str, Tensor] | None]

    @staticmethod
    def of(config: TrainConfig, transformer: SD3Transformer2DModel, folder: Path) -> "Saver":
        """The saver of a run, made before its engine; what trains is chosen already."""
        trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
        rest = {name: tensor for name, tensor in transformer.state_dict().items() if name not in trained}
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rest.items()}
        return Saver(config, model_config(transformer), copies, folder, lambda: live_weights(transformer))

    def save_full_model(
        self,
        name: str,
        trained: Mapping[str, Tensor] | None = None,
        weights: str = RAW,
        progress: Progress | None = None,
    ) -> Path:
        """A complete, proven diffusers folder ``name`` with these trained weights.

        ``save_full_model(name)``: with those of the moment; all ranks call it, the main one writes.
        """
        trained = self.live() if trained is None else trained
        if trained is None:
            return self.folder / name
        spec = export_spec(
            self.config, self.transformer_config, weights, progress or Progress(), run=self.folder.parent
        )
        return write_folder(self.folder / name, {**self.untrained, **trained}, spec)

    def save_named(
        self, name: str, trained: Mapping[str, Tensor] | None, weights: str = RAW, progress: Progress | None = None
    ) -> Path:
        """See `save_full_model`."""
        return self.save_full_model(name, trained, weights, progress)
