"""What trains of a denoiser: all its weights, those that `freeze` leaves, or an adapter on top of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.checkpoint.progress import Progress
from sd3_light.config import AdapterConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.export.adapter_folder import AdapterSpec, write_adapter
from sd3_light.export.trained_file import read_trained_adapter
from sd3_light.model.adapter_layers import LycorisModule, add_adapter, cast_frozen, load_lycoris
from sd3_light.model.lora_layers import LoraModule, load_lora
from sd3_light.model.quantized import quantize_base
from sd3_light.model.start import where_weights_start
from sd3_light.training.card_facts import card_facts
from sd3_light.training.saver import RAW, ExportSeries, Saver, config_toml, live_weights, text_policy


def frozen_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The type of weights that do not train under an adapter: bf16 on GPUs that compute in it, else float32."""
    bf16 = device.type == "cuda" and config.model.transformer_dtype == "bfloat16"
    return torch.bfloat16 if config.adapter is not None and bf16 else torch.float32


def choose_what_trains(transformer: SD3Transformer2DModel, config: TrainConfig, device: torch.device) -> None:
    """Put the config's adapter on the denoiser and freeze the rest; without one freeze what `freeze` names."""
    if config.adapter is None:
        freeze(transformer, config.freeze)
        return
    quantize_base(transformer, config.adapter.base_bits, device)
    put_adapter(transformer, config.adapter, config.seed)
    cast_frozen(transformer, frozen_dtype(config, device))


def put_adapter(transformer: nn.Module, adapter: AdapterConfig, seed: int) -> tuple[str, ...]:
    """The adapter, as it is where training starts; the names of the layers that got one."""
    names = add_adapter(transformer, adapter, seed)
    if adapter.init_from_existing is None:
        return names
    found: Any = read_trained_adapter(adapter.init_from_existing, transformer, adapter)
    try:
        if all(isinstance(module, LoraModule) for module in found.values()):
            load_lora(transformer, found)
        else:
            assert all(isinstance(module, LycorisModule) for module in found.values())
            load_lycoris(transformer, found)
    except UserError as fault:
        place = f"adapter.init_from_existing = {adapter.init_from_existing}"
        raise UserError(f"{place}: {fault}; write the rank and target_modules that it has") from fault
    return names


def freeze(transformer: SD3Transformer2DModel, patterns: Sequence[str]) -> None:
    """Take the parameters that match a pattern out of training."""
    names = [name for name, _ in transformer.named_parameters()]
    for pattern in patterns:
        if not matching(names, pattern):
            raise UserError(f"freeze: {pattern!r} matches no parameter; names look like {names[len(names) // 2]!r}")
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in patterns))
    if not any(parameter.requires_grad for parameter in transformer.parameters()):
        raise UserError(f"freeze: {list(patterns)} leaves nothing to train; name fewer parameters")


# --- saving ------------------------------------------------------------------------------------


def saver_of(config: TrainConfig, transformer: SD3Transformer2DModel, folder: Path) -> "Saver | AdapterSaver":
    """The saver of a run, made before its engine; what trains is chosen already."""
    if config.adapter is None:
        return Saver.of(config, transformer, folder)
    return AdapterSaver(config, folder, lambda: live_weights(transformer))


@dataclass
class AdapterSaver(ExportSeries):
    """Writes ``<run>/exports/NAME`` of a run that trains an adapter: its file alone, never the model under it."""

    config: TrainConfig
    folder: Path
    live: Callable[[], Mapping[str, Tensor] | None]

    def save_named(
        self, name: str, trained: Mapping[str, Tensor] | None, weights: str = RAW, progress: Progress | None = None
    ) -> Path:
        """The proven folder ``name`` with the adapter's file; of the weights of the moment where none are given."""
        trained = self.live() if trained is None else trained
        if trained is None:
            return self.folder / name
        run, progress = self.folder.parent, progress or Progress()
        return write_adapter(self.folder / name, trained, adapter_spec(self.config, weights, progress, run))


def adapter_spec(config: TrainConfig, weights: str, progress: Progress, run: Path | None = None) -> AdapterSpec:
    """What an adapter's export of a run must be; its card tells what the folder ``run`` knows."""
    assert config.adapter is not None
    start = where_weights_start(config.model)
    assert start.source is not None, "an adapter on random weights"
    return AdapterSpec(
        adapter=config.adapter,
        base=start.source,
        transformer_config=start.size.transformer_config(),
        save_dtype=getattr(torch, config.save_dtype),
        text=text_policy(config.model),
        facts={"weights": weights, **progress.as_dict()},
        about={} if run is None else card_facts(config, run, weights, progress),
        files={"config.toml": config_toml(config)},
    )
