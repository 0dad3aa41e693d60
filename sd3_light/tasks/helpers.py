"""Helpers of custom ``forward`` methods: DiffSynth's methods for them, and their random numbers."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn


class ModuleHelpers(nn.Module):
    """What requires gradients, by name, its export, and the data on the device."""

    def trainable_modules(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that train, for an optimizer."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def trainable_param_names(self) -> set[str]:
        """Return the names of the parameters that train."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def export_trainable_state_dict(
        self, state_dict: Mapping[str, Tensor], remove_prefix: str | None = None
    ) -> dict[str, Tensor]:
        """Return what trains of a state dict; ``remove_prefix`` is removed from the names that have it."""
        names = self.trainable_param_names()
        return {name.removeprefix(remove_prefix or ""): state_dict[name] for name in state_dict if name in names}

    def transfer_data_to_device(self, data: Any, device: Any, torch_float_dtype: torch.dtype | None = None) -> Any:
        """Return nested data with its tensors on ``device``, floating-point ones in ``torch_float_dtype``."""
        target = (device, torch_float_dtype)
        if isinstance(data, Mapping):
            return {name: self.transfer_data_to_device(value, *target) for name, value in data.items()}
        if isinstance(data, list | tuple):
            return type(data)(self.transfer_data_to_device(value, *target) for value in data)
        moved = send_to_device(data, device)
        is_float = isinstance(moved, Tensor) and moved.is_floating_point()
        return moved.to(torch_float_dtype) if is_float and torch_float_dtype is not None else moved

    def add_lora_to_model(
        self,
        model: nn.Module,
        target_modules: str | list[str],
        lora_rank: int,
        lora_alpha: float | None = None,
        upcast_dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Put a LoRA into a part of the module and freeze the rest of the part; return the part."""
        targets = target_modules.split(",") if isinstance(target_modules, str) else target_modules
        config = LoraConfig(r=lora_rank, lora_alpha=lora_alpha or lora_rank, target_modules=targets)
        adapted: nn.Module = inject_adapter_in_model(config, model)
        for parameter in adapted.parameters():
            if parameter.requires_grad and upcast_dtype is not None:
                parameter.data = parameter.data.to(upcast_dtype)
        return adapted


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python inside the block, and restore them after it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
