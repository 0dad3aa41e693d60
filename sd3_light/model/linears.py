"""The linear layers of an SD3 denoiser, the ones that an adapter targets, and the adapter's number of parameters.

Pure arithmetic on a `ModelSize`: no weight is read.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isqrt

from sd3_light.config import AdapterConfig, ModelSize
from sd3_light.config.faults import UserError

Shape = tuple[int, int]
"""(inputs, outputs) of a linear layer."""


def linear_layers(size: ModelSize) -> dict[str, Shape]:
    """Return name -> shape of every linear layer."""
    width, embed = size.width, "time_text_embed."
    layers = {
        f"{embed}timestep_embedder.linear_1": (256, width),
        f"{embed}timestep_embedder.linear_2": (width, width),
        f"{embed}text_embedder.linear_1": (size.pooled_width, width),
        f"{embed}text_embedder.linear_2": (width, width),
        "context_embedder": (size.text_width, width),
    }
    for number in range(size.num_layers):
        layers |= {f"transformer_blocks.{number}.{name}": shape for name, shape in _block(size, number).items()}
    patch = size.patch_size**2 * size.latent_channels
    return {**layers, "norm_out.linear": (width, 2 * width), "proj_out": (width, patch)}


def _block(size: ModelSize, number: int) -> dict[str, Shape]:
    width, last, dual = size.width, number == size.num_layers - 1, number in size.dual_attention_layers
    square = (width, width)
    image, text = ("to_q", "to_k", "to_v", "to_out.0"), ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    layers = {
        "norm1.linear": (width, (9 if dual else 6) * width),
        "norm1_context.linear": (width, (2 if last else 6) * width),
        **{f"attn.{name}": square for name in (*image, *text[: 3 if last else 4])},
    }
    if dual:
        layers |= {f"attn2.{name}": square for name in image}
    for stream in ("ff",) if last else ("ff", "ff_context"):
        layers |= {f"{stream}.net.0.proj": (width, 4 * width), f"{stream}.net.2": (4 * width, width)}
    return layers


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
    layers, parameters = linear_layers(size), [0] * (size.num_layers + 2)
    for name in match_targets(layers, adapter.target_modules):
        first, _, rest = name.partition(".")
        block = int(rest.partition(".")[0]) + 1 if first == "transformer_blocks" else 0
        parameters[-1 if first in ("norm_out", "proj_out") else block] += _weights(layers[name], adapter)
    return tuple(parameters)


def _weights(shape: Shape, adapter: AdapterConfig) -> int:
    inputs, outputs = shape
    if adapter.type == "lora":
        return adapter.rank * (inputs + outputs) + (outputs if adapter.use_dora else 0)
    if adapter.type == "loha":
        return 2 * adapter.rank * (inputs + outputs)
    (a, b), (c, d) = _factors(outputs), _factors(inputs)
    whole = adapter.rank >= max(b, d) / 2  # peft does not factorise the large factor if that would not make it smaller
    return a * c + (b * d if whole else adapter.rank * (b + d))


def _factors(number: int) -> Shape:
    """Return the two factors of a number that are nearest to each other, the smaller one first."""
    small = next(divisor for divisor in range(isqrt(number), 0, -1) if number % divisor == 0)
    return small, number // small
