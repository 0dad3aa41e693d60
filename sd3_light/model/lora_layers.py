"""The LoRA layers of a denoiser: find their targets, read and load their weights.

peft injects the adapters into the stock model, so that its own forward and the list of layers run them. An adapter's
weights are named ``<module>.lora_A.default.weight``, the weights below it ``<module>.base_layer.weight``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.model.linears import match_targets, matches_target

ADAPTER = "default"
"""The adapter's name in peft; it is never written to a file."""


@dataclass(frozen=True)
class LoraModule:
    """One low-rank update: the weight becomes ``W + scale * up @ down``.

    ``down`` is [rank, in] and ``up`` [out, rank]; for a convolution [rank, in, k, k] and [out, rank, 1, 1]. With
    a ``magnitude`` [out] (DoRA) each row of the sum is then scaled to this length.
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """The number of rows of ``down``."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the updated weight."""
        return (self.up.shape[0], *self.down.shape[1:])

    def with_unit_scale(self) -> "LoraModule":
        """Return the same update with scale 1: the scale is multiplied into ``up``, in float32."""
        return replace(self, up=self.up.float() * self.scale, scale=1.0)

    def delta(self) -> Tensor:
        """Return ``scale * up @ down`` in float32, in the shape of the weight."""
        product = self.up.float().flatten(1) @ self.down.float().flatten(1)
        return (self.scale * product).reshape(self.shape)

    def applied(self, weight: Tensor, strength: float = 1.0) -> Tensor:
        """Return ``weight`` with the update in float32; ``strength`` multiplies the update's scale."""
        merged = weight.float() + strength * self.delta()
        if self.magnitude is None:
            return merged
        factor: Tensor = self.magnitude.float() / torch.linalg.norm(merged, dim=1)
        return merged * factor[:, None]


def lora_scale(rank: int, alpha: float, use_rslora: bool = False) -> float:
    """Return the scale of the update: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


def target_layers(transformer: nn.Module, target_modules: Sequence[str]) -> tuple[str, ...]:
    """Return the linear layers whose names end with a target (or shell pattern), in the model's order."""
    modules = dict(transformer.named_modules())
    for target in target_modules:
        hits = [name for name in modules if matches_target(name, target)]
        if hits and not any(isinstance(modules[name], nn.Linear) for name in hits):
            kind = type(modules[hits[0]]).__name__
            raise UserError(f"adapter.target_modules: {target}: {hits[0]} is not a linear layer ({kind})")
    return match_targets((name for name, module in modules.items() if isinstance(module, nn.Linear)), target_modules)


def is_lora_name(name: str) -> bool:
    """Return whether a parameter belongs to a LoRA, by its name."""
    return ".lora_" in name


def lora_modules(transformer: nn.Module) -> dict[str, LoraModule]:
    """Return layer name -> LoRA update; the tensors are the live ones."""
    modules = {}
    for name, layer in transformer.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight.detach() if layer.use_dora.get(ADAPTER) else None
        modules[name] = LoraModule(
            layer.lora_A[ADAPTER].weight.detach(),
            layer.lora_B[ADAPTER].weight.detach(),
            float(layer.scaling[ADAPTER]),
            magnitude,
        )
    return modules


def from_peft(state: Mapping[str, Tensor], alpha: float, use_rslora: bool = False) -> dict[str, LoraModule]:
    """Return layer name -> LoRA update, from weights with the names of a peft model in memory."""
    modules = {}
    for name, down in state.items():
        layer, mark, _ = name.partition(f".lora_A.{ADAPTER}.")
        if mark:
            up = state[f"{layer}.lora_B.{ADAPTER}.weight"]
            magnitude = state.get(f"{layer}.lora_magnitude_vector.{ADAPTER}.weight")
            modules[layer] = LoraModule(down, up, lora_scale(len(down), alpha, use_rslora), magnitude)
    return modules


@torch.no_grad()
def load_lora(transformer: nn.Module, modules: Mapping[str, LoraModule]) -> None:
    """Copy ``modules`` into the model's LoRA, which keeps its scale; a mismatch is a UserError, without changes."""
    own = lora_modules(transformer)
    problems = [f"{name} is not in the file" for name in own if name not in modules]
    problems += [f"{name} has no adapter in the model" for name in modules if name not in own]
    for name in own.keys() & modules.keys():
        target = own[name]
        source = modules[name]
        if (target.down.shape, target.up.shape) != (source.down.shape, source.up.shape):
            actual, expected = (f"{m.rank} and {m.down.shape[1]} -> {m.up.shape[0]}" for m in (source, target))
            problems.append(f"{name} has rank {actual}, not {expected}")
        elif (target.magnitude is None) != (source.magnitude is None):
            dora = ("", "not ") if target.magnitude is None else ("not ", "")
            problems.append(f"{name} is {dora[0]}DoRA, the adapter is {dora[1]}DoRA")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"the LoRA does not match the adapter: {'; '.join(sorted(problems)[:3])}{more}")
    for name, target in own.items():
        target.down.copy_(modules[name].down)
        target.up.copy_(modules[name].up.float() * (modules[name].scale / target.scale))
        magnitude = modules[name].magnitude
        if target.magnitude is not None and magnitude is not None:
            target.magnitude.copy_(magnitude)
