"""Exports of a run: a complete diffusers folder or an adapter's file, in a series with a retention rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.store import checkpoint_name, remove, step_of
from sd3_light.config import DatasetConfig, LoadedConfig, ModelConfig, TrainConfig, resolved_toml
from sd3_light.core.drawing import drawing_facts
from sd3_light.core.registry import family_of
from sd3_light.core.start import WeightsStart
from sd3_light.engines.protocol import to_host
from sd3_light.engines.weight_layouts import whole_tensor
from sd3_light.export.adapter_folder import write_adapter
from sd3_light.export.best import best_name, validation_losses
from sd3_light.export.card_facts import card_facts, newest_samples
from sd3_light.export.diffusers_folder import WeightsOnDemand, host_copy, write_folder
from sd3_light.export.export_spec import AdapterSpec, ExportError, ExportSpec
from sd3_light.export.model_facts import TRAINED_AT, ModelFacts
from sd3_light.flow.timesteps import constant_shift
from sd3_light.model.base_values import kept_scheduler, other_shift, own_last_time
from sd3_light.model.loading import kept_in_float32
from sd3_light.runlog import read_log

RAW = "raw"


# --- export specs ------------------------------------------------------------------------------


def model_spec(model: ModelConfig, transformer_config: Mapping[str, Any], **fields: Any) -> ExportSpec:
    """Return the spec of an export of this [model] table; ``fields`` are other fields of `ExportSpec`."""
    kept = kept_scheduler(model)
    spec = {
        "family": family_of(model),
        "base": model.diffusers_path,
        "transformer_config": dict(transformer_config),
        "save_dtype": getattr(torch, model.dtype),
        "shift": _constant_shift(model, transformer_config),
        "flux_shift": model.flux_shift or kept is not None,
        "scheduler": kept,
        "last_time": model.last_time,
        "text": family_of(model).files.text_facts(model),
    }
    return ExportSpec(**{**spec, **fields})


def export_spec(
    config: TrainConfig,
    transformer_config: Mapping[str, object],
    weights: str,
    progress: Progress,
    run: Path | None = None,
    facts: ModelFacts | None = None,
) -> ExportSpec:
    """Return the spec of a run's export; its card takes losses and scores from the folder ``run``."""
    return model_spec(config.model, transformer_config, **_run_fields(config, weights, progress, run, facts))


def adapter_spec(
    config: TrainConfig,
    start: WeightsStart,
    weights: str,
    progress: Progress,
    run: Path | None = None,
    facts: ModelFacts | None = None,
) -> AdapterSpec:
    """Return the spec of an adapter's export; its card takes losses and scores from the folder ``run``."""
    assert config.adapter is not None
    assert start.source is not None, "an adapter on random weights"
    transformer_config = start.size.transformer_config()
    return AdapterSpec(
        family=family_of(config.model),
        adapter=config.adapter,
        base=start.source,
        transformer_config=transformer_config,
        **_own_shift(config.model, transformer_config),
        last_time=own_last_time(config.model),
        text=family_of(config.model).files.text_facts(config.model),
        encoders=config.model.diffusers_path,
        **_run_fields(config, weights, progress, run, facts),
    )


def _own_shift(model: ModelConfig, transformer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec for the shift of an adapter's images; none if it is that of the base model."""
    is_drawn = family_of(model).files.writes_scheduler or not model.flux_shift
    if other_shift(model) is None or not is_drawn:
        return {}
    return {"shift": _constant_shift(model, transformer_config), "flux_shift": model.flux_shift}


def _run_fields(
    config: TrainConfig, weights: str, progress: Progress, run: Path | None, facts: ModelFacts | None
) -> dict[str, Any]:
    own: dict[str, Any] = {"weights": weights, **progress.as_dict()}
    last_time = None if config.adapter is None else own_last_time(config.model)
    own |= drawing_facts(family_of(config.model).drawing(config), last_time)
    # elsewhere the exported config of the denoiser has the size
    if facts is not None and facts.trained_at is not None and not family_of(config.model).files.writes_scheduler:
        own[TRAINED_AT] = list(facts.trained_at)
    return {
        "save_dtype": getattr(torch, config.save_dtype),
        "facts": own,
        "about": {} if run is None else card_facts(config, run, weights, progress),
        "files": {"config.toml": _config_toml(config)},
        "images": {} if run is None else newest_samples(run, progress.step),
    }


def _constant_shift(model: ModelConfig, transformer_config: Mapping[str, Any]) -> float | None:
    """Return the shift for an image of the default size; None without a constant one."""
    family = family_of(model)
    if family.files.writes_scheduler:
        side: int = transformer_config["sample_size"] // transformer_config["patch_size"]
    else:
        side = family.checks.trained_side(model.diffusers_path) // family.checks.side_step(model)
    return constant_shift(model, side**2)


def _config_toml(config: TrainConfig) -> str:
    """Return the config as TOML, secrets removed, as the run's folder has it."""
    dataset = DatasetConfig(config.dataset, config.cache_dir or config.dataset, ())
    return resolved_toml(LoadedConfig(config.output_dir, config, dataset, {}))


def model_config(transformer: nn.Module, facts: ModelFacts | None = None) -> dict[str, Any]:
    """Return the constructor arguments of this denoiser for an export, without private entries."""
    stored: Any = transformer.config
    config = {key: value for key, value in stored.items() if not key.startswith("_")}
    return config if facts is None else facts.export_config(config)


# --- weights -----------------------------------------------------------------------------------


def whole_state(
    transformer: nn.Module, start: Callable[[str], Tensor], trained: Mapping[str, Tensor], freeze: Sequence[str] = ()
) -> Mapping[str, Tensor]:
    """Return every parameter and buffer of the denoiser; ``trained`` must hold all that ``freeze`` does not name.

    ``start(name)`` returns the value of another one. A missing trained weight is an error; the weight that training
    started from is never used instead.
    """
    parameters = [name for name, _ in transformer.named_parameters()]
    names = [name for name in parameters if not any(fnmatchcase(name, pattern) for pattern in freeze)]
    problems = [f"missing {name}" for name in names if name not in trained]
    problems += [f"unexpected {name}" for name in trained if name not in set(names)]
    if problems:
        raise ExportError(f"not the weights of this config: {'; '.join(problems[:5])} ({len(problems)} in all)")
    readers = {name: partial(start, name) for name in transformer.state_dict()}
    return WeightsOnDemand(readers | {name: partial(trained.__getitem__, name) for name in trained})


def gather_trainable(transformer: nn.Module) -> dict[str, Tensor] | None:
    """Return the parameters that train by name, whole and in host memory; None on ranks other than 0.

    With FSDP2 all ranks call it together, and one weight at a time is gathered.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    weights = {}
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            local = parameter.detach()
            whole = whole_tensor(local) if isinstance(local, DTensor) else local
            if writes:
                weights[name] = whole.cpu()
    return weights if writes else None


# --- saving ------------------------------------------------------------------------------------


@dataclass
class Saver:
    """Writes a run's exports ``<folder>/NAME`` and deletes old ones; only the main process writes.

    An export is a complete diffusers folder; if an adapter on ``start`` trains, it is the adapter's file without the
    model under it. ``live()`` returns the current trained weights, whole, or None on ranks that do not write.
    ``untrained`` are the frozen weights and the buffers of a complete folder; ``keeps_float32(name)`` returns whether a
    weight is always saved in float32.
    """

    config: TrainConfig
    folder: Path
    live: Callable[[], dict[str, Tensor] | None]
    transformer_config: Mapping[str, object]
    untrained: Mapping[str, Tensor]
    start: WeightsStart | None
    keeps_float32: Callable[[str], bool] = lambda name: False
    facts: ModelFacts | None = None

    @staticmethod
    def of(
        config: TrainConfig,
        transformer: nn.Module,
        folder: Path,
        start: WeightsStart | None = None,
        facts: ModelFacts | None = None,
    ) -> "Saver":
        """Return the saver of a run; call it after freezing and adding the adapter, before the engine is made."""
        untrained = {}
        if config.adapter is None:
            trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
            rest = {name: _wide(tensor) for name, tensor in transformer.state_dict().items() if name not in trained}
            # copies: a thread must be able to export without touching a module that is training
            untrained = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rest.items()}
        live = partial(gather_trainable, transformer)
        whole = kept_in_float32(transformer)
        return Saver(config, folder, live, model_config(transformer, facts), untrained, start, whole, facts)

    def to_host(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of a trained weight for an export: a full model's in the dtype in which it is saved."""
        if self.config.adapter is not None or self.keeps_float32(name):
            return to_host(name, tensor)
        return host_copy(tensor, getattr(torch, self.config.save_dtype))

    def save_full_model(
        self,
        name: str,
        trained: dict[str, Tensor] | None = None,
        weights: str = RAW,
        progress: Progress | None = None,
    ) -> Path:
        """Write the verified folder ``name`` with these trained weights; return its path.

        Those of all weights leave ``trained``, so that they are freed before the proof. ``save_full_model(name)`` takes
        the live weights; all ranks call it, the main one writes.
        """
        owned = trained is not None
        trained = self.live() if trained is None else trained
        path = self.folder / name
        return path if trained is None else self._write(path, trained, weights, progress or Progress(), owned)

    def save_model(self, name: str | dict[str, Tensor], weights: str = RAW, progress: Progress | None = None) -> Path:
        """Write an export. ``save_model(name)`` saves what trains as it is now (see `save_full_model`).

        ``save_model(trained, weights, progress)`` writes the export of this step, one of the series, and deletes the
        oldest when there are more than ``keep_last_n_exports``, except the best by [metrics] and by validation loss.
        """
        if isinstance(name, str):
            return self.save_full_model(name, None, weights, progress)
        progress = progress or Progress()
        path = self.save_full_model(checkpoint_name(progress.step), name, weights, progress)
        if self.config.keep_last_n_exports:
            exports = sorted(self.folder.glob("step-*"))
            kept = (path.name, best_name(self.folder), self._lowest(exports, weights))
            for old in exports[: -self.config.keep_last_n_exports]:
                if old.name not in kept:
                    remove(old)
        return path

    def _lowest(self, exports: Sequence[Path], weights: str) -> str | None:
        """Return the name of the export with the lowest validation loss so far, if one was evaluated."""
        log = self.folder.parent / "log.jsonl"
        steps = dict.fromkeys(map(step_of, exports), weights)
        losses = validation_losses(list(read_log(log)), steps) if log.is_file() else {}
        return checkpoint_name(min(losses, key=lambda step: losses[step])) if losses else None

    def _write(self, path: Path, trained: dict[str, Tensor], weights: str, progress: Progress, owned: bool) -> Path:
        run = self.folder.parent
        if self.config.adapter is not None:
            assert self.start is not None, "an adapter without a base"
            spec = adapter_spec(self.config, self.start, weights, progress, run, self.facts)
            return write_adapter(path, trained, spec)
        whole = export_spec(self.config, self.transformer_config, weights, progress, run, self.facts)
        state = {**self.untrained, **trained}
        if owned:
            trained.clear()
        return write_folder(path, state, whole, owned=owned)


def _wide(tensor: Tensor) -> Tensor:
    """Return a weight in float32: it may be stored in bfloat16."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
