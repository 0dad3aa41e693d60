"""Which weights of a denoiser train: all, those that `freeze` leaves, or an adapter on top of them."""

from collections.abc import Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from sd3_light.config import AdapterConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.export.trained_file import read_trained_adapter
from sd3_light.model.adapter_layers import LycorisModule, add_adapter, cast_frozen, load_lycoris
from sd3_light.model.lora_layers import LoraModule, load_lora
from sd3_light.model.quantized import quantize_base


def choose_what_trains(transformer: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Put the config's adapter on the denoiser and freeze the rest; without an adapter freeze what `freeze` names."""
    if config.adapter is None:
        freeze(transformer, config.freeze)
        return
    quantize_base(transformer, config.adapter.base_bits, device)
    put_adapter(transformer, config.adapter, config.seed)
    computes_in_bf16 = device.type == "cuda" and config.model.transformer_dtype == "bfloat16"
    cast_frozen(transformer, torch.bfloat16 if computes_in_bf16 else torch.float32)


def put_adapter(transformer: nn.Module, adapter: AdapterConfig, seed: int) -> tuple[str, ...]:
    """Add the adapter, with the weights of `init_from_existing` if set; return the names of the adapted layers."""
    names = add_adapter(transformer, adapter, seed)
    if adapter.init_from_existing is None:
        return names
    modules: Any = read_trained_adapter(adapter.init_from_existing, transformer, adapter)
    try:
        if all(isinstance(module, LoraModule) for module in modules.values()):
            load_lora(transformer, modules)
        else:
            assert all(isinstance(module, LycorisModule) for module in modules.values())
            load_lycoris(transformer, modules)
    except UserError as error:
        key = f"adapter.init_from_existing = {adapter.init_from_existing}"
        raise UserError(f"{key}: {error}; write the rank and target_modules that it has") from error
    return names


def freeze(transformer: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match a pattern."""
    names = [name for name, _ in transformer.named_parameters()]
    for pattern in patterns:
        if not matching(names, pattern):
            raise UserError(f"freeze: {pattern!r} matches no parameter; names look like {names[len(names) // 2]!r}")
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in patterns))
    if not any(parameter.requires_grad for parameter in transformer.parameters()):
        raise UserError(f"freeze: {list(patterns)} leaves nothing to train; name fewer parameters")
