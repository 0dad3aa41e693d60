"""Which weights of a denoiser train: all, those that `freeze` leaves, or an adapter on top of them."""

from collections.abc import Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sd3_light.config import AdapterConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.model import denoiser_blocks
from sd3_light.core.registry import family_of
from sd3_light.core.start import WeightsStart
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.training_setup import swapped_blocks
from sd3_light.export.lycoris_file import read_any_adapter
from sd3_light.export.trained_file import read_trained_adapter
from sd3_light.model.adapter_layers import ReadWeight, add_adapter, load_lycoris
from sd3_light.model.block_swap import BlockSwap
from sd3_light.model.loading import CPU, StoredWeights, assign_weights, read_weights
from sd3_light.model.lora_layers import load_lora
from sd3_light.model.quantized import quantize_base
from sd3_light.model.training_adapter import TrainingAdapter
from sd3_light.model.wide_products import compute_in_float32
from sd3_light.runlog import info


def load_what_trains(config: TrainConfig, start: WeightsStart, device: torch.device) -> nn.Module:
    """Return the denoiser of a run: in `weight_dtype`, less what `freeze` names, or frozen with the config's adapter.

    Frozen weights are read one by one to the device, in the dtype in which they compute; those of swapped blocks to
    host memory.
    """
    weights = family_of(config.model).weights
    if config.adapter is None:
        return _load_all(config, start, device)
    denoiser, stored = weights.unread(start)

    def read(name: str) -> Tensor:
        return stored[name].load()

    swapped = _swapped_blocks(denoiser, config.swap_blocks)
    quantize_base(denoiser, config.adapter.base_bits, device, read, tuple(swapped))
    stand_in = torch.zeros(())  # the adapter takes dtype and device of the weights below it
    assign_weights(denoiser, lambda _, weight: stand_in.expand(weight.shape) if weight.is_meta else weight)
    put_adapter(denoiser, config.adapter, config.seed, lambda name: read(name).float())
    # the processes of a pipeline hold only some of the layers on their devices
    resident = device if config.pipeline_stages == 1 else CPU
    _read_stored(denoiser, stored, frozen_dtype(config, device), resident, swapped, BlockSwap(device))
    return denoiser


def _load_all(config: TrainConfig, start: WeightsStart, device: torch.device) -> nn.Module:
    """Return the denoiser in float32, or with its matrices in bfloat16; less what `freeze` names, all of it trains.

    Stored weights are read one by one to where they stay; those that several GPUs share, to the host first.
    """
    weights = family_of(config.model).weights
    dtype = getattr(torch, config.optimizer.weight_dtype)
    stored: StoredWeights = {}
    if start.source is None:
        denoiser = weights.load(start, config.seed)
        for parameter in denoiser.parameters():
            parameter.data = parameter.data.to(dtype) if parameter.dim() > 1 else parameter.data
    else:
        denoiser, stored = weights.unread(start)
    freeze(denoiser, config.freeze)
    swapped = _swapped_blocks(denoiser, config.swap_blocks)
    resident = device if config.pipeline_stages == 1 and config.zero_stage < 3 else CPU
    _read_stored(denoiser, stored, dtype, resident, swapped, BlockSwap(device, trained=True))
    if device.type == "cpu" and dtype == torch.bfloat16:
        compute_in_float32(denoiser)
    return denoiser


def _swapped_blocks(denoiser: nn.Module, setting: int | Literal["all"]) -> dict[str, nn.Module]:
    """Return the blocks whose weights are in host memory, by the beginning of the names of their weights."""
    blocks = denoiser_blocks(denoiser)
    names = {module: f"{name}." for name, module in denoiser.named_modules()}
    return {names[blocks[number]]: blocks[number] for number in swapped_blocks(setting, len(blocks))}


def _read_stored(
    denoiser: nn.Module,
    stored: StoredWeights,
    dtype: torch.dtype,
    resident: torch.device,
    swapped: dict[str, nn.Module],
    swap: BlockSwap,
) -> None:
    """Read the weights of swapped blocks, block by block, to host memory, and all others to ``resident``."""
    others = {name: weight for name, weight in stored.items() if not name.startswith(tuple(swapped))}
    read_weights(denoiser, others, dtype, resident, whole_vectors=swap.trained)
    for prefix, block in swapped.items():
        own = {name: weight for name, weight in stored.items() if name.startswith(prefix)}
        read_weights(denoiser, own, dtype, whole_vectors=swap.trained)
        swap.add(block)
    _start(swap, len(swapped))


def swap_loaded(denoiser: nn.Module, setting: int | Literal["all"], device: torch.device) -> None:
    """Move the frozen weights of a loaded denoiser's blocks to host memory, as `swap_blocks` says."""
    swap = BlockSwap(device)
    blocks = _swapped_blocks(denoiser, setting)
    for block in blocks.values():
        swap.add(block)
    _start(swap, len(blocks))


def _start(swap: BlockSwap, count: int) -> None:
    if count:
        swap.start()
        host = format_bytes(swap.host_bytes)
        buffers = format_bytes(swap.device_bytes)
        info(f"blocks in host memory: {count} ({host}), with {buffers} of buffers on {swap.device}")


def frozen_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of weights that do not train: on a GPU that in which the denoiser computes."""
    computes_in_bf16 = device.type == "cuda" and config.model.transformer_dtype == "bfloat16"
    return torch.bfloat16 if computes_in_bf16 else torch.float32


def put_adapter(
    transformer: nn.Module, adapter: AdapterConfig, seed: int, read: ReadWeight | None = None
) -> tuple[str, ...]:
    """Add the adapter, with the weights of `init_from_existing` if set; return the names of the adapted layers.

    See `add_adapter`.
    """
    names = add_adapter(transformer, adapter, seed, read)
    if adapter.init_from_existing is None:
        return names
    modules: Any = read_trained_adapter(adapter.init_from_existing, transformer, adapter)
    try:
        (load_lora if adapter.type == "lora" else load_lycoris)(transformer, modules)
    except UserError as error:
        key = f"adapter.init_from_existing = {adapter.init_from_existing}"
        raise UserError(f"{key}: {error}; write the rank and target_modules that it has") from error
    return names


def put_training_adapter(denoiser: nn.Module, config: TrainConfig, device: torch.device) -> TrainingAdapter | None:
    """Add `model.training_adapter` to a denoiser that has its adapter already; None without one."""
    file = config.model.training_adapter
    if file is None:
        return None
    try:
        modules = read_any_adapter(file, names=family_of(config.model).files.adapters).modules
        adapter = TrainingAdapter(denoiser, modules, frozen_dtype(config, device), device)
    except UserError as error:
        raise UserError(f"model.training_adapter = {file}: {error}") from error
    info(f"training adapter: {file} is added to {len(modules)} layers in training, and not in samples or exports")
    return adapter


def freeze(transformer: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match a pattern."""
    names = [name for name, _ in transformer.named_parameters()]
    for pattern in patterns:
        if not matching(names, pattern):
            raise UserError(f"freeze: {pattern!r} matches no parameter; names look like {names[len(names) // 2]!r}")
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in patterns))
    if not any(parameter.requires_grad for parameter in transformer.parameters()):
        raise UserError(f"freeze: {list(patterns)} leaves nothing to train; name fewer parameters")
