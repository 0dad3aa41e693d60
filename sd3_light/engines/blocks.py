"""Which blocks a run uses: the family's fast ones, or the stock ones, compiled or not. All processes decide alike."""

from typing import NamedTuple

import torch
from torch import nn

from sd3_light.config import TrainConfig, UserError
from sd3_light.core.compiling import why_not_compiled
from sd3_light.core.cost import BlockKind, Cost, Layout
from sd3_light.core.registry import family_of
from sd3_light.cost.compile_choice import why_uncompiled
from sd3_light.engines import Launch
from sd3_light.engines.processes import ProcessGroups
from sd3_light.runlog import info


class Blocks(NamedTuple):
    """The blocks of a run, and why they are not the fast ones, and not compiled."""

    kind: BlockKind
    why_stock: str | None = None
    why_uncompiled: str | None = None

    def sentence(self, fp8: bool = False) -> str:
        """What runs, why not something faster, and what compiling costs."""
        kinds = {"fast": "fast kernels", "compiled": "stock, compiled", "stock": "stock"}
        text = f"{kinds[self.kind]}{', products in fp8' if fp8 else ''}"
        reasons = dict.fromkeys(reason for reason in (self.why_stock, self.why_uncompiled) if reason is not None)
        if reasons:
            text = f"{text} ({'; '.join(reasons)})"
        return f"{text}; the first steps take longer, while they compile" if self.kind == "compiled" else text


def require_blocks(config: TrainConfig, cost: Cost, launch: Launch, device: torch.device, by_deepspeed: bool) -> None:
    """Raise a UserError if the config requires blocks that cannot run, as far as this is known without the model."""
    reason = _why_stock(config, cost, None, Layout(launch.world_size, by_deepspeed), device)
    _require(config, reason, reason or cost.why_no_fp8(_capability(device)))


def choose_blocks(
    config: TrainConfig,
    cost: Cost,
    denoiser: nn.Module,
    layout: Layout,
    device: torch.device,
    groups: ProcessGroups,
    steps: int | None = None,
) -> Blocks:
    """Decide which blocks run, and print it; raise a UserError if the config requires unavailable ones.

    ``steps`` are those of the whole run, if they are known.
    """
    blocks = decide_blocks(config, cost, denoiser, layout, device, groups, steps)
    why_plain = blocks.why_stock
    if config.fp8:
        reason = cost.why_no_fp8(_capability(device))
        why_plain = why_plain or groups.first_problem(reason or _kernel_problem(config, denoiser, device, fp8=True))
    _require(config, blocks.why_stock, why_plain)
    info(f"blocks: {blocks.sentence(config.fp8)}")
    return blocks


def decide_blocks(
    config: TrainConfig,
    cost: Cost,
    denoiser: nn.Module,
    layout: Layout,
    device: torch.device,
    groups: ProcessGroups,
    steps: int | None = None,
) -> Blocks:
    """Return the blocks that run; a problem of any process counts for all of them."""
    why_stock = groups.first_problem(_why_stock(config, cost, denoiser, layout, device))
    why_stock = why_stock or groups.first_problem(_kernel_problem(config, denoiser, device))
    if why_stock is None:
        return Blocks("fast")
    why_not = why_uncompiled(config, layout, steps)
    if config.compile == "auto" and device.type != "cuda":
        why_not = "there is no GPU"
    elif config.compile == "auto" and why_not is None:
        why_not = why_not_compiled(device)
    why_not = groups.first_problem(why_not)
    return Blocks("compiled" if why_not is None else "stock", why_stock, why_not)


def _why_stock(
    config: TrainConfig, cost: Cost, denoiser: nn.Module | None, layout: Layout, device: torch.device
) -> str | None:
    family = family_of(config.model)
    if family.fast_blocks is None:
        return f"{family.title} has no fast blocks"
    return cost.why_stock(config, layout) or family.fast_blocks.why_not(config, device, denoiser)


def _kernel_problem(config: TrainConfig, denoiser: nn.Module, device: torch.device, fp8: bool = False) -> str | None:
    """Return what is wrong with the kernels on this process's device."""
    fast = family_of(config.model).fast_blocks
    assert fast is not None, "a family without fast blocks runs the stock ones"
    return fast.kernel_problem(config, device, denoiser, fp8)


def _require(config: TrainConfig, why_stock: str | None, why_no_fp8: str | None) -> None:
    if why_stock is not None and config.fast is True:
        raise UserError(f'fast = true is not available: {why_stock}; write fast = "auto"')
    if why_no_fp8 is not None and config.fp8:
        raise UserError(f"fp8 = true is not available: {why_no_fp8}; write fp8 = false")


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
