"""The optimizers behind one interface that every engine uses.

A checkpoint stores whatever `Optimizer.state` lists, by kind and dtype:

    adamw       exp_avg, exp_avg_sq (float32), step (float32 scalar on the weight's device; 0 before the first step)
    muon        momentum_buffer (float32) for matrices of the blocks, adamw's three for the rest; Muon counts no steps
    adafactor   row_var, col_var (float32) for matrices, variance for vectors, step (float32 scalar on the CPU)
    prodigy     exp_avg, exp_avg_sq, s and p0 (float32; the last two flat), step (int64 scalar), and the estimate of all
                weights together: d, d_max, d_numerator, k (float64 scalars on the CPU)
    adamw8bit   exp_avg (int8), exp_avg_sq (uint8), their scales exp_avg_scale, exp_avg_sq_scale (float32, one per block
                of 256 values), step (float32 scalar on the weight's device); adamw's three for weights under 4096
                elements

To add an optimizer, write its record in `config/optimizers.py` and its maker here.
"""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sd3_light.config import OptimizerConfig, UserError
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.optim.adamw_8bit import AdamW8bit, create_8bit_state, has_8bit_moments
from sd3_light.optim.batched_muon import PARTS, BatchedMuon
from sd3_light.optim.chunks import Named, TorchOptimizer, WeightChunk, split_into_chunks, stand_in
from sd3_light.optim.customized import CustomizedOptimizer, create_customized_state, make_customized
from sd3_light.optim.draws import StepDraws
from sd3_light.optim.groups import WeightKinds
from sd3_light.optim.sharded_muon import ShardedMuon
from sd3_light.runlog import info

Hold = Callable[[Sequence[tuple[Tensor, Callable[[Tensor], None]]]], Sequence[Tensor]]
"""Moves tensors to host memory and returns them there; each comes with a function that puts another in its place."""
TorchOptimizers = list[TorchOptimizer]
_PRODIGY_ESTIMATE = ("d", "d_max", "d_numerator", "k")


class Optimizer:
    """The interface that engines use. Under FSDP2 weights and their state are DTensors.

    ``chunks`` are updated one after another: usually there is one of all weights.
    """

    def __init__(self, chunks: Sequence[WeightChunk]) -> None:
        self.chunks = chunks
        self._optimizers = [each for chunk in chunks for each in chunk.optimizers]
        members = {
            id(p): each for each in self._optimizers for group in each.optimizer.param_groups for p in group["params"]
        }
        self._owners = {name: (held, members[id(held)]) for chunk in chunks for name, held in chunk.held.items()}
        self._hosted: dict[str, dict[str, Tensor]] = {}
        self._prepared = False
        self.updates_started = 0
        """Number of updates started, including those of an optimizer that a library drives."""
        self.before_update: Callable[[], None] = lambda: None
        """Called before each update is queued."""
        for each in self._optimizers:
            each.optimizer.register_step_pre_hook(self._count_update)
        self.skips_on_device = all(each.skips_on_device for each in self._optimizers)
        """Whether the host queues an update without waiting for the gradients."""

    def _count_update(self, *_: Any) -> None:
        self.before_update()
        self.updates_started += 1

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps, for all weights."""
        for each in self._optimizers:
            for group in each.optimizer.param_groups:
                group["lr"] = lr

    def step(self, skip: Tensor | None = None, chunk: WeightChunk | None = None) -> None:
        """Take one step, of all chunks or of one; change nothing if ``skip`` (a float32 scalar on the device) is 1.0.

        AdamW and Muon of whole matrices decide this on the device. The others wait for the host to read ``skip``.
        """
        if not self._prepared:
            self.prepare_state()
        if skip is not None and not self.skips_on_device:
            if bool(skip):
                return
            skip = None
        for chosen in self.chunks if chunk is None else (chunk,):
            chosen.step(skip)

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The only torch optimizer, for a library that drives it itself."""
        (each,) = self._optimizers
        return each.optimizer

    def prepare_state(self) -> None:
        """Create missing state as of step 0, so that it can be saved and loaded into; no weight changes."""
        for parameter, each in self._owners.values():
            if not each.optimizer.state.get(parameter):
                each.create_state(each.optimizer, parameter)
        self._prepared = True

    def state(self, name: str) -> dict[str, Tensor]:
        """Return KIND -> live tensor of a weight's state; empty before `prepare_state` or the first step."""
        parameter, each = self._owners[name]
        state = each.optimizer.state.get(parameter, {})
        live = {kind: value for kind, value in state.items() if isinstance(value, Tensor)}
        return live | self._hosted.get(name, {})

    def move_state(self, names: Iterable[str], hold: Hold) -> None:
        """Create the state of weights as of step 0 and move it to host memory, where `state` returns it."""
        places = []
        tensors = []
        for name in names:
            parameter, each = self._owners[name]
            each.create_state(each.optimizer, parameter)
            own = each.optimizer.state[parameter]
            for kind, value in self.state(name).items():
                if value.device == parameter.device:
                    places.append((name, kind))
                    tensors.append((value, partial(own.__setitem__, kind)))
        for (name, kind), hosted in zip(places, hold(tensors), strict=True):
            self._hosted.setdefault(name, {})[kind] = hosted


def make_optimizer(
    model: nn.Module,
    named: Named,
    config: OptimizerConfig,
    device: torch.device,
    draws: StepDraws | None = None,
    groups: Sequence[Named] | None = None,
) -> Optimizer:
    """Return the optimizer of ``[optimizer]`` for trainable weights of ``model``, by name, all on ``device``.

    With ``groups`` of them it updates a bounded number at a time, of one group, as weights in bfloat16 need.
    """
    assert named, "nothing to train"
    assert all(parameter.device.type == device.type for parameter in named.values()), f"weights must be on {device}"
    draws = draws or StepDraws()
    kinds = WeightKinds(model)
    if isinstance(config, CustomizedOptimizer):
        customized = make_customized(kinds.groups(named, config.weight_decay), config)
        optimizers = [TorchOptimizer(customized, create_customized_state, skips_on_device=False)]
        return Optimizer([WeightChunk(named, named, optimizers, draws)])
    record = OPTIMIZERS[config.type]
    if record.package is not None and importlib.util.find_spec(record.package) is None:
        raise UserError(f'optimizer.type = "{config.type}" needs {record.package}; run `{record.install}`')
    chunks = []
    for weights in [named] if groups is None else [chunk for group in groups for chunk in split_into_chunks(group)]:
        held = {name: _held(weight, config) for name, weight in weights.items()}
        for name, weight in weights.items():
            kinds.add_alias(held[name], weight)
        chunks.append(WeightChunk(weights, held, MAKERS[config.type](held, kinds, config, draws), draws))
    return Optimizer(chunks)


def _held(weight: nn.Parameter, config: OptimizerConfig) -> nn.Parameter:
    """Return the weight itself, or its stand-in if the optimizer needs one."""
    return weight if config.type == "adamw8bit" and has_8bit_moments(weight) else stand_in(weight)


def _make_adamw(named: Named, kinds: WeightKinds, config: OptimizerConfig, draws: StepDraws) -> TorchOptimizers:
    """Use the fused kernel on every device: it skips steps without the host and accepts DTensors."""
    groups = kinds.groups(named, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return [TorchOptimizer(optimizer, create_adamw_state, skips_on_device=True)]


@torch.no_grad()
def create_adamw_state(optimizer: Any, parameter: nn.Parameter) -> None:
    """Create AdamW's state of step 0 for a weight; for engines that hold the torch optimizer themselves."""
    optimizer.state[parameter] = {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _make_muon(named: Named, kinds: WeightKinds, config: OptimizerConfig, draws: StepDraws) -> TorchOptimizers:
    """Use Muon for the matrices of the blocks, its updates scaled to AdamW's size so that both share one `lr`."""
    matrices = {name: parameter for name, parameter in named.items() if kinds.is_block_matrix(parameter)}
    rest = {name: parameter for name, parameter in named.items() if name not in matrices}
    optimizers = _make_adamw(rest, kinds, config, draws) if rest else []
    if matrices:
        sharded = any(isinstance(matrix, DTensor) for matrix in matrices.values())
        optimizer = (ShardedMuon if sharded else BatchedMuon)(
            _muon_groups(matrices, kinds, config.split_modulation),
            lr=config.lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(TorchOptimizer(optimizer, _create_muon_state, skips_on_device=not sharded))
    else:
        info('optimizer "muon": no matrix of a block trains, so AdamW updates all weights')
    return optimizers


def _muon_groups(matrices: Named, kinds: WeightKinds, split: bool) -> list[dict[str, Any]]:
    """Return the groups of matrices by the number of their parts, which is 1 without ``split``."""
    groups: dict[int, list[nn.Parameter]] = {}
    for matrix in matrices.values():
        groups.setdefault(kinds.modulation_parts(matrix) if split else 1, []).append(matrix)
    return [{"params": members, PARTS: parts} for parts, members in groups.items()]


@torch.no_grad()
def _create_muon_state(optimizer: Any, parameter: nn.Parameter) -> None:
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def _make_adamw8bit(named: Named, kinds: WeightKinds, config: OptimizerConfig, draws: StepDraws) -> TorchOptimizers:
    """Use 8 bits for the moments of large weights, float32 for the rest, which are few."""
    large = {name: weight for name, weight in named.items() if has_8bit_moments(weight)}
    rest = {name: weight for name, weight in named.items() if name not in large}
    optimizers = _make_adamw(rest, kinds, config, draws) if rest else []
    if large:
        names = {id(weight): name for name, weight in large.items()}

        def generator_of(purpose: str, weight: nn.Parameter) -> torch.Generator:
            return draws.generator(purpose, names[id(weight)], weight.device)

        groups = kinds.groups(large, config.weight_decay)
        optimizer = AdamW8bit(groups, generator_of, config.lr, config.betas, config.eps)
        optimizers.append(TorchOptimizer(optimizer, create_8bit_state, skips_on_device=True))
    return optimizers


def _make_adafactor(named: Named, kinds: WeightKinds, config: OptimizerConfig, draws: StepDraws) -> TorchOptimizers:
    optimizer = torch.optim.Adafactor(kinds.groups(named, config.weight_decay), lr=config.lr)
    return [TorchOptimizer(optimizer, _create_adafactor_state, skips_on_device=False)]


@torch.no_grad()
def _create_adafactor_state(optimizer: Any, parameter: nn.Parameter) -> None:
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.dim() > 1:
        *outer, rows, columns = parameter.shape
        state |= {"row_var": parameter.new_zeros(*outer, rows, 1), "col_var": parameter.new_zeros(*outer, 1, columns)}
    else:
        state["variance"] = torch.zeros_like(parameter)
    optimizer.state[parameter] = state


def _make_prodigy(named: Named, kinds: WeightKinds, config: OptimizerConfig, draws: StepDraws) -> TorchOptimizers:
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
    return [TorchOptimizer(optimizer, create_state, skips_on_device=False)]


MAKERS: dict[str, Callable[[Named, WeightKinds, OptimizerConfig, StepDraws], TorchOptimizers]] = {
    "adamw": _make_adamw,
    "adamw8bit": _make_adamw8bit,
    "muon": _make_muon,
    "adafactor": _make_adafactor,
    "prodigy": _make_prodigy,
}
