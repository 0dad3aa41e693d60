"""Add adapters of every type to a denoiser in place, as `[adapter]` describes them.

For LoRA see `model/lora_layers.py`. LoKr (a Kronecker product) and LoHa (a Hadamard product) also come from peft. Their
tensors are read and written directly: names in the model end with peft's adapter name, names in files do not.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd3_light.config import AdapterConfig, UserError
from sd3_light.model.lora_layers import ADAPTER, LoraModule, is_lora_name, lora_scale, target_layers
from sd3_light.randomness import stream

_PEFT_CONFIGS = {"lora": LoraConfig, "lokr": LoKrConfig, "loha": LoHaConfig}
_LYCORIS_NAMES = (".lokr_", ".hada_")

ReadWeight = Callable[[str], Tensor]
"""Name of a weight -> its stored values in float32."""


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name."""
    return is_lora_name(name) or is_lycoris_name(name)


def is_lycoris_name(name: str) -> bool:
    """Return whether a tensor belongs to a LoKr or LoHa, by its name."""
    return any(infix in name for infix in _LYCORIS_NAMES)


def add_adapter(
    transformer: nn.Module, config: AdapterConfig, seed: int, read: ReadWeight | None = None
) -> tuple[str, ...]:
    """Add the adapter that ``config`` describes, and return the names of its layers.

    Afterwards only its weights (float32) require gradients. They are a pure function of the seed, and the model's
    outputs do not change. Raises UserError for a target that matches nothing. ``read`` returns the weights of a model
    that does not have its values yet.
    """
    if next(_adapter_layers(transformer), None) is not None:
        raise UserError("the denoiser already has an adapter; load it without one")
    names = target_layers(transformer, config.target_modules)
    keys: dict[str, Any] = {"r": config.rank, "target_modules": list(names)}
    if config.type == "lora":
        keys |= {"lora_alpha": config.alpha, "lora_dropout": config.dropout}
        keys |= {"use_rslora": config.use_rslora, "use_dora": config.use_dora}
    else:
        keys |= {"alpha": config.alpha, "rank_dropout": config.dropout}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(_PEFT_CONFIGS[config.type](**keys), transformer, adapter_name=ADAPTER)
    for name, parameter in transformer.named_parameters():
        if is_adapter_name(name):  # peft uses the model's dtype; master weights are float32
            parameter.data = parameter.data.float()
    if config.use_dora and read is not None:
        for name, layer in _adapter_layers(transformer):
            dora: Any = layer
            if dora.get_base_layer().weight.is_floating_point():  # quantized ones have their values
                dora.lora_magnitude_vector[ADAPTER].weight.data = torch.linalg.norm(read(f"{name}.weight"), dim=1)
    if config.type == "lora" and config.dtype == "float32":
        for name, module in transformer.named_modules():
            if is_lora_name(f"{name}.") and type(module) is nn.Linear:
                module.__class__ = _Float32Linear
    return names


def cast_frozen_linears(transformer: nn.Module, dtype: torch.dtype) -> None:
    """Cast frozen parameters of linear layers to ``dtype``; under autocast to ``dtype`` results do not change."""
    for layer in transformer.modules():
        if not isinstance(layer, nn.Linear):
            continue
        for parameter in layer.parameters(recurse=False):
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


class _Float32Linear(nn.Linear):
    """A linear layer that autocast leaves in float32."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def _adapter_layers(transformer: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    return ((name, module) for name, module in transformer.named_modules() if isinstance(module, BaseTunerLayer))


@contextmanager
def without_adapter(transformer: nn.Module) -> Iterator[None]:
    """Disable the adapter inside the block."""
    layers = [layer for _, layer in _adapter_layers(transformer)]
    assert layers, "no adapter"
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would change what requires gradients
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class AdapterDropout:
    """Dropout inside an adapter: a function of seed, rank, step and micro-batch, so that a resumed run repeats it.

    Evaluation and sampling have no dropout. Call ``begin(step)`` once per step, and ``forward(device)`` before the
    forward pass of each micro-batch, or in a pipeline, which interleaves micro-batches, before each ``layer``.
    """

    def __init__(self, transformer: nn.Module, seed: int, rank: int) -> None:
        self._layers = [layer for _, layer in _adapter_layers(transformer)]
        self._seed = seed
        self._rank = rank
        self._step = 0
        self._micro: Counter[int | None] = Counter()

    def begin(self, step: int) -> None:
        """Start the micro-batches of ``step``."""
        self._step = step
        self._micro.clear()

    def forward(self, device: torch.device, layer: int | None = None) -> None:
        """Seed this micro-batch's dropout if gradients are enabled, otherwise turn dropout off.

        It stays on until the next call: activation checkpointing recomputes the forward pass and restores the
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


@dataclass(frozen=True)
class LycorisModule:
    """One layer's LoKr or LoHa: its factors by LyCORIS' names, and the scale of their product."""

    factors: dict[str, Tensor]
    scale: float = 1.0

    @property
    def rank(self) -> int | None:
        """The rank of the low-rank factors; None if all factors are full matrices."""
        low = next((tensor for name, tensor in self.factors.items() if name.endswith("_b")), None)
        return None if low is None else low.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the updated weight; a RuntimeError if those of the factors do not fit together."""
        factors = {name: tensor.to("meta") for name, tensor in self.factors.items()}
        return tuple(LycorisModule(factors).delta().shape)

    def delta(self) -> Tensor:
        """Return the update in float32, in the shape of the weight."""
        if "hada_w1_a" in self.factors:
            return self.scale * self._product("hada_w1") * self._product("hada_w2")
        return self.scale * torch.kron(self._product("lokr_w1"), self._product("lokr_w2"))

    def applied(self, weight: Tensor, strength: float = 1.0) -> Tensor:
        """Return ``weight`` with the update in float32; ``strength`` multiplies the update's scale."""
        return weight.float() + strength * self.delta()

    def _product(self, name: str) -> Tensor:
        """Return a matrix that is stored in full or as two low-rank factors."""
        if name in self.factors:
            return self.factors[name].float()
        return self.factors[f"{name}_a"].float() @ self.factors[f"{name}_b"].float()

    def with_unit_scale(self) -> "LycorisModule":
        """Return the same update with scale 1: the scale is multiplied into the first factor, in float32."""
        first = next(name for name in ("lokr_w1", "lokr_w1_a", "hada_w1_a") if name in self.factors)
        return LycorisModule({**self.factors, first: self.factors[first].float() * self.scale})


AdapterModules = Mapping[str, LoraModule] | Mapping[str, LycorisModule]


def lycoris_modules(state: Mapping[str, Tensor], rank: int, alpha: float) -> dict[str, LycorisModule]:
    """Return layer -> update, from weights with the names of a peft model in memory."""
    by_layer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        layer, factor, adapter = key.rsplit(".", 2)
        assert adapter == ADAPTER, key
        by_layer.setdefault(layer, {})[factor] = tensor
    return {layer: LycorisModule(factors, lora_scale(rank, alpha)) for layer, factors in by_layer.items()}


@torch.no_grad()
def load_lycoris(transformer: nn.Module, modules: Mapping[str, LycorisModule]) -> None:
    """Copy the weights of ``modules`` into the model's LoKr or LoHa, which has the same layers and shapes."""
    layers = {name: layer for name, layer in _adapter_layers(transformer) if isinstance(layer, LycorisLayer)}
    live = {name: parameter for name, parameter in transformer.named_parameters() if is_adapter_name(name)}
    loaded = {
        f"{layer}.{factor}.{ADAPTER}": tensor
        for layer, module in modules.items()
        for factor, tensor in _scaled(module, layers.get(layer)).factors.items()
    }
    mismatches = sorted(live.keys() ^ loaded.keys())
    mismatches += [name for name in live if not mismatches and live[name].shape != loaded[name].shape]
    if mismatches:
        raise UserError(
            f"the file does not match the adapter: {mismatches[0]} is missing, unexpected or of another shape"
        )
    for name, parameter in live.items():
        parameter.copy_(loaded[name])


def _scaled(module: LycorisModule, layer: Any) -> LycorisModule:
    """Return the module's weights for a layer that applies its own scale."""
    layer_scale = 1.0 if layer is None else float(layer.scaling[ADAPTER])
    return LycorisModule(module.factors, module.scale / layer_scale).with_unit_scale()
