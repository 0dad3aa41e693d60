"""SD3 denoisers in which every weight matters, with adapters, and their output for fixed inputs."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import AdapterConfig
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.model.adapter_layers import add_adapter, is_adapter_name


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def having(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {**state, name: tensor}


def live_denoiser(config: dict[str, Any], seed: int = 0) -> SD3Transformer2DModel:
    """Return a denoiser whose gates and output, zero before training, have values."""
    transformer = new_transformer(config, seed)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return transformer.eval()


def add_trained_adapter(transformer: Any, config: AdapterConfig, size: float = 0.05) -> SD3Transformer2DModel:
    add_adapter(transformer, config, 0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in adapter_state(transformer).values():
            weight += size * torch.randn(weight.shape, generator=generator)
    return transformer.eval()


def adapter_state(transformer: SD3Transformer2DModel) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in transformer.named_parameters() if is_adapter_name(name)}


@torch.no_grad()
def output(transformer: SD3Transformer2DModel) -> Tensor:
    config, generator = transformer.config, torch.Generator().manual_seed(3)
    result: Tensor = transformer(
        hidden_states=torch.randn(2, 16, 8, 8, generator=generator),
        timestep=torch.tensor([10.0, 800.0]),
        encoder_hidden_states=torch.randn(2, 5, config.joint_attention_dim, generator=generator),
        pooled_projections=torch.randn(2, config.pooled_projection_dim, generator=generator),
        return_dict=False,
    )[0]
    return result
