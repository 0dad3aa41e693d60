"""Merge adapters into a model, apply them to a pipeline, and extract the difference of two models as a LoRA by SVD."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.core.drawing import stated_drawing, stated_last_time
from sd3_light.core.family import Family
from sd3_light.core.files import AdapterNames
from sd3_light.core.registry import family_of_class, family_of_file, family_of_folder
from sd3_light.core.sampling import UNSTATED, OwnDrawing, PipelineInputs
from sd3_light.core.start import denoiser_folder
from sd3_light.export.chosen import ChosenModel
from sd3_light.export.diffusers_folder import WeightsOnDemand, is_finite, read_facts
from sd3_light.export.lora_file import diffusers_tensors, own_metadata
from sd3_light.export.lora_stack import Lora, add_loras
from sd3_light.export.lycoris_file import is_lycoris, read_any_adapter, read_lycoris
from sd3_light.export.open_pipeline import adapter_shift, read_text_policy
from sd3_light.export.stored_parts import read_denoiser
from sd3_light.flow.scheduler import ending_at
from sd3_light.model.adapter_layers import AdapterModules
from sd3_light.model.lora_layers import LoraModule
from sd3_light.runlog import info
from sd3_light.tensor_file import StoredTensor, open_tensors

StateDict = Mapping[str, Tensor]


def merge_loras(state: StateDict, loras: Sequence[tuple[AdapterModules, float]]) -> dict[str, Tensor]:
    """Return the denoiser's weights with each LoRA added at its strength, in order.

    Changed weights are new float32 tensors, ``W + strength * update``; the others are returned as they are. LoKr and
    LoHa count as LoRAs.
    A LoRA layer that does not exist in the model, or has another shape there, is an error that names it.
    """
    _require_layers({name: tuple(weight.shape) for name, weight in state.items()}, loras)
    return {name: _with_updates(name, weight, loras) for name, weight in state.items()}


def merged_on_demand(folder: Path, loras: Sequence[tuple[AdapterModules, float]]) -> WeightsOnDemand:
    """Return the weights of `merge_loras`, each of which is read and merged when it is asked for."""
    stored = _stored_denoiser(folder)
    _require_layers({name: tensor.shape for name, tensor in stored.items()}, loras)

    def read(name: str) -> Tensor:
        return _with_updates(name, _finite(folder, name, stored[name]), loras)

    return WeightsOnDemand({name: partial(read, name) for name in stored})


def _with_updates(name: str, weight: Tensor, loras: Sequence[tuple[AdapterModules, float]]) -> Tensor:
    layer = name.removesuffix(".weight")
    for lora, strength in loras:
        if layer != name and layer in lora:
            weight = lora[layer].applied(weight, strength)
    return weight


def _require_layers(shapes: Mapping[str, tuple[int, ...]], loras: Sequence[tuple[AdapterModules, float]]) -> None:
    """Raise a UserError that names a layer of a LoRA that does not fit the model."""
    for name, module in (item for lora, _ in loras for item in lora.items()):
        shape = shapes.get(f"{name}.weight")
        if shape is None:
            raise UserError(f"the LoRA has {name}, which the model lacks; was it trained on another model?")
        if module.shape != shape:
            raise UserError(f"the LoRA's {name} has shape {list(module.shape)}, the model's weight {list(shape)}")


def text_folder(chosen: ChosenModel, loras: Sequence[Lora]) -> Path:
    """Return the folder that says how texts are encoded for a model with ``loras``, and an adapter's shift; report it.

    It is that of the first LoRA whose export says so, unless the model is itself an adapter; otherwise the model's.
    """
    folder = chosen.text_facts
    if loras and not chosen.loras:
        folder = next(_text_exports(loras), folder)
        settings = read_text_policy(folder, family_of_folder(chosen.folder)).facts()
        info(f"texts are encoded as for {folder}: {_listed(settings)}")
    if (shift := adapter_shift(folder)) is not None:
        info(f"images have the shift that {folder} was trained with: {shift}")
    return folder


def merged_settings(model: Path, loras: Sequence[Lora]) -> tuple[dict[str, Any], float | str | None]:
    """Return the text settings of a model with ``loras`` merged, and the shift if it is not the model's.

    They are those of `text_folder`. LoRAs whose exports state different ones are a UserError: one model cannot have
    both.
    """
    family = family_of_folder(model)
    exports = {export: _settings(export, family) for export in _text_exports(loras)}
    if other := next((export for export in exports if exports[export] != next(iter(exports.values()))), None):
        first, settings = next(iter(exports.items()))
        raise UserError(
            f"{first} was trained with {_listed(settings)}, {other} with {_listed(exports[other])}; merge only LoRAs "
            "with the same text settings and shift, or draw with `sd3-light sample --lora`"
        )
    folder = text_folder(ChosenModel(model, (), model), loras)
    return read_text_policy(folder, family).facts(), adapter_shift(folder)


def _settings(export: Path, family: Family) -> dict[str, Any]:
    """Return the text settings of an adapter's export, and the shift if it is not its base's."""
    shift = adapter_shift(export)
    return read_text_policy(export, family).facts() | ({} if shift is None else {"shift": shift})


def _text_exports(loras: Sequence[Lora]) -> Iterator[Path]:
    """Yield the exports of LoRAs that say how texts were encoded in training."""
    for export in (lora.file.parent for lora in loras):
        if not (export / "model_index.json").is_file() and "text" in read_facts(export):
            yield export


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items())


def drawing_of_adapters(loras: Sequence[Lora]) -> tuple[OwnDrawing, float | None]:
    """Return steps, guidance and time of the last call of the first adapter file that states any of them."""
    for lora in loras:
        own = own_metadata(open_tensors(lora.file)[1], lora.file)
        facts = own.get("facts", {})
        drawing = stated_drawing(facts, lora.file)
        last_time = stated_last_time(facts, lora.file)
        if drawing != UNSTATED or last_time is not None:
            return drawing, last_time
    return UNSTATED, None


def draw_as_adapters(pipe: Any, policy: PipelineInputs, loras: Sequence[Lora]) -> PipelineInputs:
    """Return the policy of a pipeline that draws as its adapters state; its scheduler gets their last time."""
    drawing, last_time = drawing_of_adapters(loras)
    if last_time is not None:
        pipe.scheduler = ending_at(pipe.scheduler, last_time)
    return policy if drawing == UNSTATED else policy.stating(drawing)


def add_adapters(pipe: Any, loras: Sequence[Lora]) -> None:
    """Apply LoRA, LoKr and LoHa files to a pipeline, each with its strength; a file that does not fit is a UserError.

    LoKr and LoHa are added to the weights, because diffusers does not read them; LoRAs are stacked on these.
    """
    model = pipe if pipe.transformer is None else pipe.transformer
    family = family_of_class(type(model))
    if loras and family is not None and not family.loads_adapters:
        merge = f"merge it into the weights: sd3-light lora merge MODEL OUT {loras[0].file}"
        raise UserError(f"LoRA {loras[0].file}: the stock pipeline of {family.title} loads no adapter; {merge}")
    names = _names_of(model)
    lycoris = [lora for lora in loras if is_lycoris(lora.file)]
    for lora in lycoris if pipe.transformer is not None else ():
        try:
            _merge_into(pipe.transformer, read_lycoris(lora.file, names=names).modules, lora.strength)
        except UserError as error:
            raise UserError(f"LoRA {lora.file} does not fit this model: {error}") from error
    add_loras(pipe, [lora for lora in loras if lora not in lycoris], partial(diffusers_tensors, names=names))


def merge_adapters(transformer: nn.Module, loras: Sequence[Lora]) -> None:
    """Add LoRA, LoKr and LoHa files to the weights of a denoiser, each with its strength."""
    for lora in loras:
        _merge_into(transformer, read_any_adapter(lora.file, names=_names_of(transformer)).modules, lora.strength)


def _names_of(model: Any) -> AdapterNames:
    """Return the names in adapter files of a denoiser or a pipeline."""
    family = family_of_class(type(model))
    assert family is not None, type(model)
    return family.files.adapters


@torch.no_grad()
def _merge_into(transformer: nn.Module, modules: AdapterModules, strength: float) -> None:
    state = transformer.state_dict()
    merged = merge_loras(state, [(modules, strength)])
    for name in modules:
        state[f"{name}.weight"].copy_(merged[f"{name}.weight"])


def denoiser_state(folder: Path) -> dict[str, Tensor]:
    """Load a diffusers folder's denoiser in float32; missing or non-finite tensors are a UserError."""
    return {name: _finite(folder, name, tensor) for name, tensor in _stored_denoiser(folder).items()}


def _stored_denoiser(folder: Path) -> dict[str, StoredTensor]:
    path = denoiser_folder(folder)
    family = family_of_folder(folder)
    family.weights.require(path)
    _, stored = read_denoiser(path, family)
    return stored


def _finite(folder: Path, name: str, stored: StoredTensor) -> Tensor:
    """Return a weight in float32, which must be finite."""
    weight = stored.load().float()
    if not is_finite(weight):
        raise UserError(f"{denoiser_folder(folder)}: {name} contains NaN or infinity; pass another model")
    return weight


@dataclass(frozen=True)
class Extraction:
    """A LoRA that approximates the difference of two models, and what it leaves out.

    Shares are of squared norms. ``kept``: layer -> the share of the layer's difference that the LoRA contains.
    ``left_out``: weight -> the share of the total difference that is lost with it. ``share``: the kept share of the
    total difference.
    """

    modules: dict[str, LoraModule]
    kept: dict[str, float]
    left_out: dict[str, float]
    share: float


@torch.no_grad()
def extract_lora(
    base: StateDict,
    tuned: StateDict,
    rank: int,
    targets: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    names: AdapterNames | None = None,
) -> Extraction:
    """Return the best LoRA of this rank for ``tuned - base``: the truncated SVD of each linear layer's difference.

    ``targets`` are suffixes of layer names; None selects all linear layers. Biases, norms, convolutions and other
    layers are left out, and listed if they changed. The decompositions run on ``device``. ``names`` are those of the
    models' family, SD3's by default.
    """
    if rank < 1:
        raise UserError(f"rank {rank}: a LoRA has at least rank 1")
    _require_same_shapes(base, tuned)
    layers = _target_names(base, targets, names or family_of_file().files.adapters)
    sizes: dict[str, float] = {}
    modules = {}
    kept = {}
    left_out = {}
    for name in base:
        change = (tuned[name].to(device).double() - base[name].to(device).double()).float()
        sizes[name] = float(change.double().square().sum())
        if sizes[name] == 0.0:
            continue
        if name not in layers:
            left_out[name] = sizes[name]
            continue
        layer = name.removesuffix(".weight")
        modules[layer], kept[layer] = truncated(change, rank)
    total = sum(sizes.values())
    if not modules:
        raise UserError("there is nothing to extract: no weight among the targets differs between the two models")
    share = sum(kept[layer] * sizes[f"{layer}.weight"] for layer in kept) / total
    return Extraction(modules, kept, {name: size / total for name, size in left_out.items()}, share)


def truncated(matrix: Tensor, rank: int) -> tuple[LoraModule, float]:
    """Return the nearest matrix of this rank or less (Eckart-Young) as factors of equal norm and the kept share."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = min(rank, len(values))
    energy = values.double().square()
    root = values[:rank].sqrt()
    module = LoraModule((root[:, None] * right[:rank]).cpu(), (left[:, :rank] * root).cpu().contiguous())
    return module, float(energy[:rank].sum() / energy.sum())


def _require_same_shapes(base: StateDict, tuned: StateDict) -> None:
    unmatched = sorted(base.keys() ^ tuned.keys())
    if unmatched:
        owner = "base" if unmatched[0] in base else "tuned"
        raise UserError(f"only the {owner} model has {unmatched[0]}; pass two models of the same size")
    for name, weight in base.items():
        if weight.shape != tuned[name].shape:
            raise UserError(
                f"{name} has shapes {list(weight.shape)} and {list(tuned[name].shape)}; pass models of the same size"
            )


def _target_names(base: StateDict, targets: Sequence[str] | None, names: AdapterNames) -> set[str]:
    """Return the weights to extract: matrices of known layers whose names end in one of the targets."""
    layers = [name.removesuffix(".weight") for name, weight in base.items() if weight.ndim == 2]
    layers = [layer for layer in layers if names.find_layers(layer) is not None]
    if targets is None:
        return {f"{layer}.weight" for layer in layers}
    for target in targets:
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            raise UserError(f"target {target}: no linear layer's name ends in it")
    ends = tuple(f".{target}" for target in targets)
    return {f"{layer}.weight" for layer in layers if f".{layer}".endswith(ends)}
