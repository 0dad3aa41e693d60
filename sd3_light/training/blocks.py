"""Which blocks a run uses: the fast ones, or the stock ones, compiled or not. All processes decide alike."""

from typing import Literal, NamedTuple

import torch
from diffusers import SD3Transformer2DModel

from sd3_light.config import ModelSize, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.engines.processes import ProcessGroups
from sd3_light.model.fast.choice import why_no_fp8, why_stock_by_config, why_stock_on_device
from sd3_light.model.fast.forward import why_stock
from sd3_light.model.fast.self_check import KernelShape, kernel_problem, why_not_compiled
from sd3_light.runlog import info


class Blocks(NamedTuple):
    """The blocks of a run, and why they are not the fast ones."""

    kind: Literal["fast", "compiled", "stock"]
    why_stock: str | None = None


def require_blocks(
    config: TrainConfig, size: ModelSize, launch: Launch, device: torch.device, by_deepspeed: bool
) -> None:
    """Raise a UserError if the config requires blocks that cannot run, as far as this is known without the model."""
    reason = _why_stock(config, size, None, launch, device, by_deepspeed)
    _require(config, reason, reason or why_no_fp8(size, _capability(device)))


def choose_blocks(
    config: TrainConfig,
    size: ModelSize,
    transformer: SD3Transformer2DModel,
    launch: Launch,
    device: torch.device,
    groups: ProcessGroups,
    by_deepspeed: bool = False,
) -> Blocks:
    """Decide which blocks run, and print it on a GPU; raise a UserError if the config requires unavailable ones."""
    blocks = decide_blocks(config, size, transformer, launch, device, groups, by_deepspeed)
    why_plain = blocks.why_stock
    if config.fp8:
        reason = why_no_fp8(size, _capability(device))
        why_plain = why_plain or groups.first_problem(reason or _kernel_problem(config, transformer, device, fp8=True))
    _require(config, blocks.why_stock, why_plain)
    if device.type == "cuda":
        kinds = {"fast": "fast kernels", "compiled": "stock, compiled", "stock": "stock"}
        fp8 = ", products in fp8" if config.fp8 else ""
        reason = "" if blocks.why_stock is None else f" ({blocks.why_stock})"
        info(f"blocks: {kinds[blocks.kind]}{fp8}{reason}")
    return blocks


def decide_blocks(
    config: TrainConfig,
    size: ModelSize,
    transformer: SD3Transformer2DModel,
    launch: Launch,
    device: torch.device,
    groups: ProcessGroups,
    by_deepspeed: bool = False,
) -> Blocks:
    """Return the blocks that run; a problem of any process counts for all of them.

    A GPU whose kernels fail their self-check runs the stock blocks compiled, if they can be.
    """
    reason = groups.first_problem(_why_stock(config, size, transformer, launch, device, by_deepspeed))
    if reason is not None:
        return Blocks("compiled" if config.compile else "stock", reason)
    broken = groups.first_problem(_kernel_problem(config, transformer, device))
    if broken is None:
        return Blocks("fast")
    why_not = "activation_checkpointing = 'selective'" if config.activation_checkpointing == "selective" else None
    return Blocks("stock" if groups.first_problem(why_not or why_not_compiled(device)) else "compiled", broken)


def _why_stock(
    config: TrainConfig,
    size: ModelSize,
    transformer: SD3Transformer2DModel | None,
    launch: Launch,
    device: torch.device,
    by_deepspeed: bool,
) -> str | None:
    reason = why_stock_by_config(config, size, launch.world, by_deepspeed) or why_stock_on_device(config, device.type)
    return reason or (why_stock(transformer) if transformer is not None else None)


def _kernel_problem(
    config: TrainConfig, transformer: SD3Transformer2DModel, device: torch.device, fp8: bool = False
) -> str | None:
    """Return what is wrong with the kernels on this process's GPU; a CPU runs their reference."""
    if device.type != "cuda":
        return None
    model = transformer.config
    shape = KernelShape(model.num_attention_heads, model.attention_head_dim, config.model.transformer_dtype, fp8)
    return kernel_problem(shape, device)


def _require(config: TrainConfig, why_stock: str | None, why_no_fp8: str | None) -> None:
    if why_stock is not None and config.fast is True:
        raise UserError(f'fast = true is not available: {why_stock}; write fast = "auto"')
    if why_no_fp8 is not None and config.fp8:
        raise UserError(f"fp8 = true is not available: {why_no_fp8}; write fp8 = false")


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
