"""LoRA adapters on a denoiser: adding, reading, loading, merging and removing them.

The adapters are peft's, put into the stock model in place, so that its own forward and the list of layers run them.
An adapter's weights are named ``<module>.lora_A.default.weight``, the weights under it ``<module>.base_layer.weight``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.model.linears import match_targets, matches_target

ADAPTER = "default"
"""The name that our adapter has in peft; it never gets into a file."""


@dataclass(frozen=True)
class LoraModule:
    """One low-rank update: the weight becomes ``W + scale * up @ down``.

    ``down`` is [rank, in] and ``up`` [out, rank]; of a convolution [rank, in, k, k] and [out, rank, 1, 1]. With a
    ``magnitude`` [out] (DoRA) each row of that sum is then scaled to this length.
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """The number of rows of ``down``."""
        return self.down.shape[0]

    def delta(self) -> Tensor:
        """``scale * up @ down`` in float32, in the shape of the weight."""
        product = self.up.float().flatten(1) @ self.down.float().flatten(1)
        return (self.scale * product).reshape(self.up.shape[0], *self.down.shape[1:])

    def applied(self, weight: Tensor, strength: float = 1.0) -> Tensor:
        """``weight`` with the update, in float32; ``strength`` multiplies the update's scale."""
        merged = weight.float() + strength * self.delta()
        if self.magnitude is None:
            return merged
        factor: Tensor = self.magnitude.float() / torch.linalg.norm(merged, dim=1)
        return merged * factor[:, None]


def lora_scale(rank: int, alpha: float, use_rslora: bool = False) -> float:
    """What multiplies the update: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


def add_lora(
    transformer: nn.Module,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    *,
    dropout: float = 0.0,
    use_rslora: bool = False,
    use_dora: bool = False,
    seed: int = 0,
) -> tuple[str, ...]:
    """Put a LoRA on the linear layers that ``target_modules`` name; the names of those layers.

    Only the adapter's weights, in float32, require gradients afterwards. They are a pure function of the seed, and the
    model computes what it did before. A target that matches no linear layer is an error that names it.
    """
    if next(_lora_layers(transformer), None) is not None:
        raise UserError("the denoiser has a LoRA already; merge or remove it before adding another")
    names = target_layers(transformer, target_modules)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(names),
        use_rslora=use_rslora,
        use_dora=use_dora,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, transformer, adapter_name=ADAPTER)
    for name, parameter in transformer.named_parameters():
        if is_lora_name(name):  # peft takes the model's type; master weights are float32
            parameter.data = parameter.data.float()
    return names


def target_layers(transformer: nn.Module, target_modules: Sequence[str]) -> tuple[str, ...]:
    """The names of the linear layers that end as one of ``target_modules``, in the model's order.

    A target may be a pattern of shell style: ``transformer_blocks.[0-7].attn.to_*``.
    """
    modules = dict(transformer.named_modules())
    for target in target_modules:
        hit = [name for name in modules if matches_target(name, target)]
        if hit and not any(isinstance(modules[name], nn.Linear) for name in hit):
            kind = type(modules[hit[0]]).__name__
            raise UserError(f"adapter.target_modules: {target}: {hit[0]} is no linear layer but {kind}")
    return match_targets((name for name, module in modules.items() if isinstance(module, nn.Linear)), target_modules)


def is_lora_name(name: str) -> bool:
    """Whether a parameter of a model with a LoRA belongs to the LoRA."""
    return ".lora_" in name


def lora_modules(transformer: nn.Module) -> dict[str, LoraModule]:
    """The LoRA as updates by the names of the layers; the tensors are the live ones."""
    found = {}
    for name, layer in _lora_layers(transformer):
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight.detach() if layer.use_dora.get(ADAPTER) else None
        found[name] = LoraModule(
            layer.lora_A[ADAPTER].weight.detach(),
            layer.lora_B[ADAPTER].weight.detach(),
            float(layer.scaling[ADAPTER]),
            magnitude,
        )
    return found


@torch.no_grad()
def load_lora(transformer: nn.Module, modules: Mapping[str, LoraModule]) -> None:
    """Give the LoRA on the model the weights of another of the same layers, shapes and kind.

    The model's own scale stays, so ``up`` is divided by it. Whatever does not fit is an error that names the layer, and
    then nothing has changed.
    """
    own = lora_modules(transformer)
    problems = [f"{name} is not in the file" for name in own if name not in modules]
    problems += [f"{name} has no adapter in the model" for name in modules if name not in own]
    for name in own.keys() & modules.keys():
        mine, given = own[name], modules[name]
        if (mine.down.shape, mine.up.shape) != (given.down.shape, given.up.shape):
            problems.append(f"{name} has rank {given.rank} and {_ends_of(given)}, not {mine.rank} and {_ends_of(mine)}")
        elif (mine.magnitude is None) != (given.magnitude is None):
            problems.append(f"{name} is {'not ' if given.magnitude is None else ''}DoRA, the adapter otherwise")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"the LoRA does not fit the adapter: {'; '.join(sorted(problems)[:3])}{more}")
    for name, mine in own.items():
        mine.down.copy_(modules[name].down)
        mine.up.copy_(modules[name].up.float() * (modules[name].scale / mine.scale))
        magnitude = modules[name].magnitude
        if mine.magnitude is not None and magnitude is not None:
            mine.magnitude.copy_(magnitude)


def _lora_layers(transformer: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    return ((name, module) for name, module in transformer.named_modules() if isinstance(module, LoraLayer))


def _ends_of(module: LoraModule) -> str:
    return f"{module.down.shape[1]} -> {module.up.shape[0]}"
