"""The linear layers that an adapter targets, and the adapter's number of parameters.

Pure arithmetic on a `ModelSize`: no weight is read.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isqrt

from sd3_light.config import AdapterConfig, ModelSize, UserError
from sd3_light.config.sizes import Shape, layer_index


def matches_target(name: str, target: str) -> bool:
    """Return whether a layer's name ends with the target, which may be a shell pattern."""
    return fnmatchcase(f".{name}", f"*.{target}")


def match_targets(names: Iterable[str], targets: Sequence[str]) -> tuple[str, ...]:
    """Return the names that match a target, in order. Raises UserError if a target has no match."""
    names = list(names)
    unmatched = [target for target in targets if not any(matches_target(name, target) for name in names)]
    if unmatched:
        known = {name.split(".", 2)[-1] if name.startswith("transformer_blocks.") else name for name in names}
        near = get_close_matches(unmatched[0], sorted(known), 1, 0.0)
        hint = f" (nearest: {near[0]})" if near else ""
        raise UserError(f"adapter.target_modules: {', '.join(unmatched)}: no linear layer matches{hint}")
    return tuple(name for name in names if any(matches_target(name, target) for target in targets))


def adapter_layer_parameters(size: ModelSize, adapter: AdapterConfig) -> tuple[int, ...]:
    """Return the number of parameters that the adapter adds to each layer: embed, the joint blocks, output."""
    layers = size.linear_layers()
    parameters = [0] * (size.num_layers + 2)
    for name in match_targets(layers, adapter.target_modules):
        parameters[layer_index(name)] += adapter_weights(layers[name], adapter)
    return tuple(parameters)


def adapter_weights(shape: Shape, adapter: AdapterConfig) -> int:
    """Return the number of parameters that the adapter adds to a linear layer."""
    inputs, outputs = shape
    if adapter.type == "lora":
        return adapter.rank * (inputs + outputs) + (outputs if adapter.use_dora else 0)
    if adapter.type == "loha":
        return 2 * adapter.rank * (inputs + outputs)
    a, b = _factors(outputs)
    c, d = _factors(inputs)
    whole = adapter.rank >= max(b, d) / 2  # peft does not factorise the large factor if that would not make it smaller
    return a * c + (b * d if whole else adapter.rank * (b + d))


def _factors(number: int) -> Shape:
    """Return the two factors of a number that are nearest to each other, the smaller one first."""
    small = next(divisor for divisor in range(isqrt(number), 0, -1) if number % divisor == 0)
    return small, number // small
