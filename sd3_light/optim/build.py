"""The optimizers behind one interface that every engine uses.

A checkpoint stores whatever `Optimizer.state` lists, by kind and dtype:

    adamw       exp_avg, exp_avg_sq (float32), step (float32 scalar on the weight's device; 0 before the first step)
    muon        momentum_buffer (float32) for matrices of the blocks, adamw's three for the rest; Muon counts no steps
    adafactor   row_var, col_var (float32) for matrices, variance for vectors, step (float32 scalar on the CPU)
    prodigy     exp_avg, exp_avg_sq, s and p0 (float32; the last two flat), step (int64 scalar), and the estimate of all
                weights together: d, d_max, d_numerator, k (float64 scalars on the CPU)
    adamw8bit   state1, state2 (uint8; float32 for weights under 4096 elements), absmax1, absmax2 (float32, one per
                block of 256 values, if state1 is uint8), step (int64 scalar on the CPU)

To add an optimizer, write its record in `config/optimizers.py` and its maker here.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sd3_light.config import OptimizerConfig
from sd3_light.config.faults import UserError
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.optim.batched_muon import BatchedMuon
from sd3_light.optim.customized import CustomizedOptimizer, create_customized_state, make_customized
from sd3_light.optim.groups import WeightKinds
from sd3_light.optim.sharded_muon import ShardedMuon
from sd3_light.runlog import info

# code books of the 8-bit numbers: constants of the library, equal for every weight and run
_CONSTANTS = ("qmap1", "qmap2")
_PRODIGY_ESTIMATE = ("d", "d_max", "d_numerator", "k")
Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class OptimizerPart:
    """A torch optimizer for some of the weights, and a function that creates a weight's state of step 0.

    ``skips_on_device``: it reads `found_inf`, so a step is skipped without synchronizing with the host.
    """

    optimizer: torch.optim.Optimizer
    create_state: Callable[[Any, nn.Parameter], None]
    skips_on_device: bool


class Optimizer:
    """The interface that engines use. Weights are float32; under FSDP2 they and their state are DTensors."""

    def __init__(self, named: Mapping[str, nn.Parameter], parts: Sequence[OptimizerPart]) -> None:
        self._parts = parts
        members = {id(p): part for part in parts for group in part.optimizer.param_groups for p in group["params"]}
        self._owners = {name: (parameter, members[id(parameter)]) for name, parameter in named.items()}
        self._prepared = False
        self.updates_started = 0
        """Number of updates started, including those of an optimizer that a library drives."""
        self.before_update: Callable[[], None] = lambda: None
        """Called before each update is queued."""
        for part in parts:
            part.optimizer.register_step_pre_hook(self._count_update)
        self.skips_on_device = all(part.skips_on_device for part in parts)
        """Whether the host queues an update without waiting for the gradients."""

    def _count_update(self, *_: Any) -> None:
        self.before_update()
        self.updates_started += 1

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps, for all weights."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr

    def step(self, skip: Tensor | None = None) -> None:
        """Take one step, or change nothing if ``skip`` (a float32 scalar on the weights' device) is 1.0.

        AdamW and Muon of whole matrices decide this on the device. The others wait for the host to read ``skip``.
        """
        if not self._prepared:
            self.prepare_state()
        if skip is not None and not self.skips_on_device:
            if bool(skip):
                return
            skip = None
        for part in self._parts:
            if part.skips_on_device:
                # attributes that torch's GradScaler sets, too; a skipped step is not counted
                part.optimizer.grad_scale, part.optimizer.found_inf = None, skip  # type: ignore[attr-defined]
            part.optimizer.step()

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The only torch optimizer, for a library that drives it itself."""
        (part,) = self._parts
        return part.optimizer

    def prepare_state(self) -> None:
        """Create missing state as of step 0, so that it can be saved and loaded into; no weight changes."""
        for parameter, part in self._owners.values():
            if not part.optimizer.state.get(parameter):
                part.create_state(part.optimizer, parameter)
        self._prepared = True

    def state(self, name: str) -> dict[str, Tensor]:
        """Return KIND -> live tensor of a weight's state; empty before `prepare_state` or the first step."""
        parameter, part = self._owners[name]
        return {
            kind: value
            for kind, value in part.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and kind not in _CONSTANTS
        }


def make_optimizer(model: nn.Module, named: Named, config: OptimizerConfig, device: torch.device) -> Optimizer:
    """Return the optimizer of ``[optimizer]`` for trainable weights of ``model``, by name, all on ``device``."""
    assert named, "nothing to train"
    assert all(parameter.device.type == device.type for parameter in named.values()), f"weights must be on {device}"
    if isinstance(config, CustomizedOptimizer):
        customized = make_customized(WeightKinds(model).groups(named, config.weight_decay), config)
        return Optimizer(named, [OptimizerPart(customized, create_customized_state, skips_on_device=False)])
    record = OPTIMIZERS[config.type]
    if record.package is not None and importlib.util.find_spec(record.package) is None:
        raise UserError(f'optimizer.type = "{config.type}" needs {record.package}; run `{record.install}`')
    return Optimizer(named, MAKERS[config.type](named, WeightKinds(model), config))


def _make_adamw(named: Named, kinds: WeightKinds, config: OptimizerConfig) -> list[OptimizerPart]:
    """Use the fused kernel on every device: it skips steps without the host and accepts DTensors."""
    groups = kinds.groups(named, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return [OptimizerPart(optimizer, create_adamw_state, skips_on_device=True)]


@torch.no_grad()
def create_adamw_state(optimizer: Any, parameter: nn.Parameter) -> None:
    """Create AdamW's state of step 0 for a weight; for engines that hold the torch optimizer themselves."""
    optimizer.state[parameter] = {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _make_muon(named: Named, kinds: WeightKinds, config: OptimizerConfig) -> list[OptimizerPart]:
    """Use Muon for the matrices of the blocks, its updates scaled to AdamW's size so that both share one `lr`."""
    matrices = {name: parameter for name, parameter in named.items() if kinds.is_block_matrix(parameter)}
    rest = {name: parameter for name, parameter in named.items() if name not in matrices}
    parts = _make_adamw(rest, kinds, config) if rest else []
    if matrices:
        sharded = any(isinstance(matrix, DTensor) for matrix in matrices.values())
        optimizer = (ShardedMuon if sharded else BatchedMuon)(
            list(matrices.values()), lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        parts.append(OptimizerPart(optimizer, _create_muon_state, skips_on_device=not sharded))
    else:
        info('optimizer "muon": no matrix of a block trains, so AdamW updates all weights')
    return parts


@torch.no_grad()
def _create_muon_state(optimizer: Any, parameter: nn.Parameter) -> None:
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}


def _make_adamw8bit(named: Named, kinds: WeightKinds, config: OptimizerConfig) -> list[OptimizerPart]:
    """Use bitsandbytes' kernels, on GPUs and CPUs."""
    library: Any = importlib.import_module("bitsandbytes.optim")
    groups = kinds.groups(named, config.weight_decay)
    optimizer = library.AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return [OptimizerPart(optimizer, _create_8bit_state, skips_on_device=False)]


@torch.no_grad()
def _create_8bit_state(optimizer: Any, parameter: nn.Parameter) -> None:
    for g, group in enumerate(optimizer.param_groups):
        for p, member in enumerate(group["params"]):
            if member is parameter:
                optimizer.init_state(group, parameter, g, p)
    # a tensor instead of the library's int, so that a checkpoint can store it and load into it
    optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.int64)


def _make_adafactor(named: Named, kinds: WeightKinds, config: OptimizerConfig) -> list[OptimizerPart]:
    optimizer = torch.optim.Adafactor(kinds.groups(named, config.weight_decay), lr=config.lr)
    return [OptimizerPart(optimizer, _create_adafactor_state, skips_on_device=False)]


@torch.no_grad()
def _create_adafactor_state(optimizer: Any, parameter: nn.Parameter) -> None:
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.dim() > 1:
        *outer, rows, columns = parameter.shape
        state |= {"row_var": parameter.new_zeros(*outer, rows, 1), "col_var": parameter.new_zeros(*outer, 1, columns)}
    else:
        state["variance"] = torch.zeros_like(parameter)
    optimizer.state[parameter] = state


def _make_prodigy(named: Named, kinds: WeightKinds, config: OptimizerConfig) -> list[OptimizerPart]:
    """Use the authors' library, with the settings that they recommend for diffusion."""
    library: Any = importlib.import_module("prodigyopt")
    optimizer = library.Prodigy(
        kinds.groups(named, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        use_bias_correction=True,
        safeguard_warmup=True,
    )
    first = optimizer.param_groups[0]
    # the library keeps these numbers in its groups, where no checkpoint finds them
    shared = {name: torch.tensor(float(first[name]), dtype=torch.float64) for name in _PRODIGY_ESTIMATE}

    def before(*_: Any) -> None:
        for group in optimizer.param_groups:
            group.update({name: value.item() for name, value in shared.items()}, k=int(shared["k"]))

    def after(*_: Any) -> None:
        for name, value in shared.items():
            value.fill_(float(first[name]))

    def create_state(optimizer: Any, parameter: nn.Parameter) -> None:
        flat = parameter.detach().flatten()
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.int64),
            "s": torch.zeros_like(flat),
            "p0": flat.clone(),
            **({"exp_avg": torch.zeros_like(parameter)} if config.betas[0] else {}),
            "exp_avg_sq": torch.zeros_like(parameter),
            **shared,
        }

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return [OptimizerPart(optimizer, create_state, skips_on_device=False)]


MAKERS: dict[str, Callable[[Named, WeightKinds, OptimizerConfig], list[OptimizerPart]]] = {
    "adamw": _make_adamw,
    "adamw8bit": _make_adamw8bit,
    "muon": _make_muon,
    "adafactor": _make_adafactor,
    "prodigy": _make_prodigy,
}
