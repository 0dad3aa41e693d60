"""Optimizers behind one small surface: AdamW, Muon with AdamW, and AdamW with 8-bit moments.

Every engine drives the same few calls, and a checkpoint takes whatever `state` lists, by kind and dtype:

    adamw       exp_avg, exp_avg_sq (float32), step (float32 scalar on the weight's device; 0 before the first step)
    muon        momentum_buffer (float32) for matrices of the blocks, adamw's three for the rest; Muon counts no steps
    adamw8bit   state1, state2 (uint8; float32 for weights under 4096 elements), absmax1, absmax2 (float32, one a block
                of 256, where state1 is uint8), step (int64 scalar on the CPU)
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.config import OptimizerConfig
from sd3_light.config.faults import UserError
from sd3_light.optim.groups import is_block_matrix, parameter_groups

# the code books of 8-bit numbers: constants of the library, the same for every weight and run
_CONSTANTS = ("qmap1", "qmap2")


@dataclass(frozen=True)
class OptimizerPart:
    """A torch optimizer over some of the weights, and how to give one of its weights the state of step 0."""

    optimizer: torch.optim.Optimizer
    create: Callable[[Any, nn.Parameter], None]
    obeys_found_inf: bool


class Optimizer:
    """What engines ask of an optimizer. Weights are float32; under FSDP2 they and their state are DTensors."""

    def __init__(self, named: Mapping[str, nn.Parameter], parts: Sequence[OptimizerPart]) -> None:
        self._parts = parts
        members = {id(p): part for part in parts for group in part.optimizer.param_groups for p in group["params"]}
        self._owners = {name: (parameter, members[id(parameter)]) for name, parameter in named.items()}
        self._prepared = False
        self._asks_host = not all(part.obeys_found_inf for part in parts)

    def set_rate(self, lr: float) -> None:
        """The learning rate of the next steps, for all weights."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr

    def step(self, skip: Tensor | None = None) -> None:
        """One step; where ``skip`` (a float32 scalar on the weights' device) is 1.0, nothing changes, bit for bit.

        AdamW leaves that decision to the device. The others wait for the host to read it.
        """
        if not self._prepared:
            self.prepare_state()
        if self._asks_host and skip is not None:
            if bool(skip):
                return
            skip = None
        for part in self._parts:
            if part.obeys_found_inf:
                # the two names by which torch's GradScaler speaks to fused kernels; steps are counted back as well
                part.optimizer.grad_scale, part.optimizer.found_inf = None, skip  # type: ignore[attr-defined]
            part.optimizer.step()

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The one torch optimizer behind this, for a library that drives it itself."""
        (part,) = self._parts
        return part.optimizer

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.optimizer.zero_grad(set_to_none=True)

    def prepare_state(self) -> None:
        """Create the state of step 0 where there is none, so that it can be saved and loaded into; no weight moves."""
        for parameter, part in self._owners.values():
            if not part.optimizer.state.get(parameter):
                part.create(part.optimizer, parameter)
        self._prepared = True

    def state(self, name: str) -> dict[str, Tensor]:
        """KIND -> live tensor of all that is remembered of a weight; nothing before `prepare_state` or a step."""
        parameter, part = self._owners[name]
        return {
            kind: value
            for kind, value in part.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and kind not in _CONSTANTS
        }


def make_optimizer(named: Mapping[str, nn.Parameter], config: OptimizerConfig, device: torch.device) -> Optimizer:
    """The optimizer that ``[optimizer]`` asks for, over trainable weights by canonical name, all on ``device``."""
    assert named, "nothing to train"
    assert all(parameter.device.type == device.type for parameter in named.values()), f"weights must be on {device}"
    makers = {"adamw": _adamw, "muon": _muon_and_adamw, "adamw8bit": _adamw_8bit}
    return Optimizer(named, makers[config.type](named, config))


def _adamw(named: Mapping[str, nn.Parameter], config: OptimizerConfig) -> list[OptimizerPart]:
    """Fused on every device: one path, on which a skipped step needs no host, and which takes DTensors."""
    groups = parameter_groups(named.items(), config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return [OptimizerPart(optimizer, create_adamw_state, obeys_found_inf=True)]


@torch.no_grad()
def create_adamw_state(optimizer: Any, parameter: nn.Parameter) -> None:
    """What AdamW remembers of a weight before its first step; for engines that hold the torch optimizer themselves."""
    optimizer.state[parameter] = {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _muon_and_adamw(named: Mapping[str, nn.Parameter], config: OptimizerConfig) -> list[OptimizerPart]:
    """Muon for the matrices of the blocks, its updates scaled to AdamW's size so that one learning rate serves both."""
    matrices = {name: parameter for name, parameter in named.items() if is_block_matrix(name, parameter)}
    rest = {name: parameter for name, parameter in named.items() if name not in matrices}
    parts = _adamw(rest, config) if rest else []
    if matrices:
        optimizer = torch.optim.Muon(
            list(matrices.values()), lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        parts.append(OptimizerPart(optimizer, _create_muon, obeys_found_inf=False))
    return parts


@torch.no_grad()
def _create_muon(optimizer: Any, parameter: nn.Parameter) -> None:
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}


def _adamw_8bit(named: Mapping[str, nn.Parameter], config: OptimizerConfig) -> list[OptimizerPart]:
    """bitsandbytes' kernels, on GPUs and CPUs. `check` has told the user to install it where it is missing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("optimizer.type = \"adamw8bit\" needs bitsandbytes; run `pip install 'sd3-light[bnb]'`")
    library: Any = importlib.import_module("bitsandbytes.optim")
    groups = parameter_groups(named.items(), config.weight_decay)
    optimizer = library.AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return [OptimizerPart(optimizer, _create_8bit, obeys_found_inf=False)]


@torch.no_grad()
def _create_8bit(optimizer: Any, parameter: nn.Parameter) -> None:
    for g, group in enumerate(optimizer.param_groups):
        for p, member in enumerate(group["params"]):
            if member is parameter:
                optimizer.init_state(group, parameter, g, p)
    # a tensor in place of the library's int, so that a checkpoint can hold it and write into it
    optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.int64)
