"""LoRAs into a full model, and out of one: merging, and extracting the difference of two models by SVD."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.export.diffusers_folder import is_finite
from sd3_light.export.lora_names import find_layers
from sd3_light.export.single_parts import read_place
from sd3_light.model.lora_layers import LoraModule
from sd3_light.model.start import denoiser_folder, folder_size

LoraModules = Mapping[str, LoraModule]
State = Mapping[str, Tensor]


def merge(model: Path | State, loras: Sequence[tuple[LoraModules, float]]) -> dict[str, Tensor]:
    """The denoiser's weights with each LoRA added at its strength, one after the other.

    Changed weights are new float32 tensors, ``W + strength * scale * up @ down``; the others are those given. A LoRA's
    layer that the model has not, or has in another shape, is an error that names it.
    """
    state = dict(denoiser_state(model) if isinstance(model, Path) else model)
    for lora, strength in loras:
        for name, module in lora.items():
            weight = state.get(f"{name}.weight")
            if weight is None:
                raise UserError(f"the LoRA has {name}, the model has not; is it of another model?")
            shape = (module.up.shape[0], *module.down.shape[1:])
            if shape != tuple(weight.shape):
                raise UserError(f"the LoRA's {name} is for {list(shape)}, the model's weight is {list(weight.shape)}")
            state[f"{name}.weight"] = module.applied(weight, strength)
    return state


def denoiser_state(folder: Path) -> dict[str, Tensor]:
    """Weights and buffers, in float32, of the denoiser in a diffusers folder: all that its config promises and finite,
    or a fault that names what is not. (diffusers would fill a gap with random weights.)"""
    place = denoiser_folder(folder)
    folder_size(place)  # a fault of the folder in words
    _, stored = read_place(place, "transformer")
    state = {name: tensor.load().float() for name, tensor in stored.items()}
    wrong = [name for name, tensor in state.items() if not is_finite(tensor)]
    if wrong:
        raise UserError(f"{place}: {wrong[0]} holds NaN or infinity; give another model")
    return state


@dataclass(frozen=True)
class Extraction:
    """A LoRA that stands for the difference of two models, and what it does not say of it.

    Shares are of squared norms. ``kept``: layer -> the share of its own difference that the LoRA holds. ``left_out``:
    weight -> the share of the whole difference that lies in it and is lost. ``share``: of the whole, what is kept.
    """

    modules: dict[str, LoraModule]
    kept: dict[str, float]
    left_out: dict[str, float]
    share: float


@torch.no_grad()
def extract(
    base: State,
    tuned: State,
    rank: int,
    targets: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> Extraction:
    """The best LoRA of this rank for ``tuned - base``: the truncated SVD of each linear layer's difference.

    ``targets`` are ends of layers' names; None takes all. Biases, norms, convolutions and layers outside the targets
    are left out and named where they changed. ``device`` is where the decompositions run.
    """
    if rank < 1:
        raise UserError(f"rank {rank}: a LoRA has at least rank 1")
    _require_alike(base, tuned)
    layers = _target_names(base, targets)
    sizes: dict[str, float] = {}
    modules, kept, lost = {}, {}, {}
    for name in base:
        change = (tuned[name].to(device).double() - base[name].to(device).double()).float()
        sizes[name] = float(change.double().square().sum())
        if sizes[name] == 0.0:
            continue
        if name not in layers:
            lost[name] = sizes[name]
            continue
        layer = name.removesuffix(".weight")
        modules[layer], kept[layer] = truncated(change, rank)
    whole = sum(sizes.values())
    if not modules:
        raise UserError("there is nothing to extract: no weight among the targets differs between the two models")
    held = sum(kept[layer] * sizes[f"{layer}.weight"] for layer in kept)
    return Extraction(modules, kept, {name: size / whole for name, size in lost.items()}, held / whole)


def truncated(matrix: Tensor, rank: int) -> tuple[LoraModule, float]:
    """The nearest matrix of at most this rank (Eckart and Young), as factors of equal norm, and the share it keeps."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = min(rank, len(values))
    energy = values.double().square()
    root = values[:rank].sqrt()
    module = LoraModule((root[:, None] * right[:rank]).cpu(), (left[:, :rank] * root).cpu().contiguous())
    return module, float(energy[:rank].sum() / energy.sum())


def _require_alike(base: State, tuned: State) -> None:
    other = sorted(base.keys() ^ tuned.keys())
    if other:
        where = "base" if other[0] in base else "tuned"
        raise UserError(f"only the {where} model has {other[0]}; extract from two models of one size")
    for name, weight in base.items():
        if weight.shape != tuned[name].shape:
            raise UserError(
                f"{name} is {list(weight.shape)} and {list(tuned[name].shape)}; give two models of one size"
            )


def _target_names(base: State, targets: Sequence[str] | None) -> set[str]:
    """The weights that may become LoRAs: matrices of known layers, with names that end as the targets say."""
    layers = [name.removesuffix(".weight") for name, weight in base.items() if weight.ndim == 2]
    layers = [layer for layer in layers if find_layers(layer) is not None]
    if targets is None:
        return {f"{layer}.weight" for layer in layers}
    for target in targets:
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            raise UserError(f"target {target}: no linear layer's name ends so")
    ends = tuple(f".{target}" for target in targets)
    return {f"{layer}.weight" for layer in layers if f".{layer}".endswith(ends)}
