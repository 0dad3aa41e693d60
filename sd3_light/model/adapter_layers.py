"""Adapters of every kind on a denoiser: what `[adapter]` asks for, put into the model in place.

For LoRA see `model/lora_layers.py`. LoKr (a Kronecker product) and LoHa (a Hadamard product) are peft's too, and are
read and written by their tensors: their names in the model end with peft's name of the adapter, which no file has.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoHaConfig, LoKrConfig, inject_adapter_in_model
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.model.lora_layers import ADAPTER, add_lora, is_lora_name, lora_scale, target_layers
from sd3_light.randomness import stream

LYCORIS = {"lokr": LoKrConfig, "loha": LoHaConfig}
_PARTS = (".lokr_", ".hada_")


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of a model with an adapter belongs to the adapter."""
    return is_lora_name(name) or any(part in name for part in _PARTS)


def add_adapter(transformer: nn.Module, config: AdapterConfig, seed: int) -> tuple[str, ...]:
    """Put the adapter that ``config`` describes on the model; the names of the layers that got one.

    Only its weights, in float32, require gradients afterwards; they are a pure function of the seed, and the model
    computes what it did before. A target that matches nothing is an error that names it.
    """
    if config.type == "lora":
        names = add_lora(
            transformer,
            config.rank,
            config.alpha,
            config.target_modules,
            dropout=config.dropout,
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
            seed=seed,
        )
        if config.dtype == "float32":
            _compute_in_float32(transformer)
        return names
    if next(_adapter_layers(transformer), None) is not None:
        raise UserError("the denoiser has an adapter already; remove it before adding another")
    names = target_layers(transformer, config.target_modules)
    wanted: Any = LYCORIS[config.type](
        r=config.rank, alpha=config.alpha, rank_dropout=config.dropout, target_modules=list(names)
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(wanted, transformer, adapter_name=ADAPTER)
    for name, parameter in transformer.named_parameters():
        if is_adapter_name(name):
            parameter.data = parameter.data.float()
    return names


def cast_frozen(transformer: nn.Module, dtype: torch.dtype) -> None:
    """Keep the parameters that do not train in ``dtype``; those that do, all in few bits, and all buffers, stay."""
    for parameter in transformer.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def cast_frozen_linears(transformer: nn.Module, dtype: torch.dtype) -> None:
    """Keep frozen weights of linear layers in ``dtype``: where autocast would narrow them anyway, nothing changes."""
    for layer in transformer.modules():
        if isinstance(layer, nn.Linear):
            for parameter in layer.parameters(recurse=False):
                if not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)


class _Float32Linear(nn.Linear):
    """A linear layer that autocast does not narrow."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def _compute_in_float32(transformer: nn.Module) -> None:
    for name, module in transformer.named_modules():
        if is_lora_name(f"{name}.") and type(module) is nn.Linear:
            module.__class__ = _Float32Linear


def _adapter_layers(transformer: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    return ((name, module) for name, module in transformer.named_modules() if isinstance(module, BaseTunerLayer))


class AdapterDropout:
    """Dropout inside an adapter, a function of seed, rank, step and micro-batch alone, so that a resumed run drops what
    the unbroken one does. Evaluation and sampling drop nothing.

    ``begin(step)`` once a step; ``forward(device)`` before the forward pass of each micro-batch, or in a pipeline,
    where micro-batches take turns, before each ``layer`` of it.
    """

    def __init__(self, transformer: nn.Module, seed: int, rank: int) -> None:
        self._layers = [layer for _, layer in _adapter_layers(transformer)]
        self._seed, self._rank, self._step = seed, rank, 0
        self._micro: Counter[int | None] = Counter()

    def begin(self, step: int) -> None:
        """The micro-batches from here on are those of ``step``."""
        self._step = step
        self._micro.clear()

    def forward(self, device: torch.device, layer: int | None = None) -> None:
        """Seed this micro-batch's dropout where gradients are wanted, turn it off where they are not.

        It stays on until the next call: activation checkpointing computes the forward pass again, and restores the
        generator for it.
        """
        training = torch.is_grad_enabled()
        for module in self._layers:
            if module.training != training:
                module.train(training)
        if not training:
            return
        purpose = "adapter dropout" if layer is None else f"adapter dropout, layer {layer}"
        number = int(stream(self._seed, purpose, self._step, self._micro[layer], self._rank).integers(1 << 63))
        self._micro[layer] += 1
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            torch.cuda.manual_seed(number)


# --- LoKr and LoHa -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LycorisModule:
    """One layer's LoKr or LoHa: its factors by LyCORIS' names, and what multiplies their product."""

    factors: dict[str, Tensor]
    scale: float = 1.0

    def baked(self) -> "LycorisModule":
        """The same update with scale 1: the scale is multiplied into the first factor, in float32."""
        first = next(name for name in ("lokr_w1", "lokr_w1_a", "hada_w1_a") if name in self.factors)
        return LycorisModule({**self.factors, first: self.factors[first].float() * self.scale})


def lycoris_modules(state: Mapping[str, Tensor], rank: int, alpha: float) -> dict[str, LycorisModule]:
    """Layer -> its update, from weights with the names of a peft model in memory."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        layer, factor, adapter = key.rsplit(".", 2)
        assert adapter == ADAPTER, key
        found.setdefault(layer, {})[factor] = tensor
    return {layer: LycorisModule(factors, lora_scale(rank, alpha)) for layer, factors in found.items()}


@torch.no_grad()
def load_lycoris(transformer: nn.Module, modules: Mapping[str, LycorisModule]) -> None:
    """Give the LoKr or LoHa on the model the weights of another of the same layers and shapes, whatever its scale."""
    own = {name: layer for name, layer in _adapter_layers(transformer) if isinstance(layer, LycorisLayer)}
    live = {name: parameter for name, parameter in transformer.named_parameters() if is_adapter_name(name)}
    given = {
        f"{layer}.{factor}.{ADAPTER}": tensor
        for layer, module in modules.items()
        for factor, tensor in _scaled(module, own.get(layer)).factors.items()
    }
    wrong = sorted(live.keys() ^ given.keys())
    wrong += [name for name in live if not wrong and live[name].shape != given[name].shape]
    if wrong:
        raise UserError(f"the file does not fit the adapter: {wrong[0]} is missing, unexpected or of another shape")
    for name, parameter in live.items():
        parameter.copy_(given[name])


def _scaled(module: LycorisModule, layer: Any) -> LycorisModule:
    """The module's weights for a layer that multiplies by a scale of its own."""
    own = 1.0 if layer is None else float(layer.scaling[ADAPTER])
    return LycorisModule(module.factors, module.scale / own).baked()
