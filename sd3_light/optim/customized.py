"""Any torch optimizer by the path of its class, such as `bitsandbytes.optim.Adam8bit`, for tasks."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.config import OptimizerConfig, UserError


class CustomizedOptimizer(OptimizerConfig):
    """An optimizer that is created with ``lr`` and ``weight_decay`` from the class at ``path``."""

    path: str


def make_customized(groups: list[dict[str, Any]], config: CustomizedOptimizer) -> torch.optim.Optimizer:
    """Return the optimizer of the groups of weights."""
    try:
        optimizer = _class_at(config.path)(groups, lr=config.lr, weight_decay=config.weight_decay)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"customized_optimizer = {config.path!r} does not take lr and weight_decay ({error}); choose another"
        ) from error
    _let_it_start(optimizer)
    return optimizer  # type: ignore[no-any-return]


def _let_it_start(optimizer: Any) -> None:
    """Make the optimizer create its own state at the first step of a new run, and keep counters as tensors after it."""

    has_started = False

    def before(*_: Any) -> None:
        for parameter, state in [] if has_started else list(optimizer.state.items()):
            if isinstance(step := state.get("step"), Tensor) and not step:  # a loaded state has taken steps
                del optimizer.state[parameter]

    def after(*_: Any) -> None:
        nonlocal has_started
        for state in () if has_started else optimizer.state.values():
            state.update(_with_tensors(state))
        has_started = True

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with tensors for numbers, which a checkpoint can store and load into."""
    numbers = {kind: torch.tensor(value) for kind, value in state.items() if isinstance(value, int | float)}
    return {**state, **numbers}


def _class_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"customized_optimizer = {path!r} cannot be imported ({error})"
        raise UserError(f"{problem}; give 'package.Class'") from error
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UserError(f"customized_optimizer = {path!r} is not a torch optimizer; give the path of its class")
    return optimizer_class


@torch.no_grad()
def create_customized_state(optimizer: Any, parameter: nn.Parameter) -> None:
    """Create a state with the shapes of the weight's, to load a checkpoint into: that of a trial step with zeros."""
    group = next(group for group in optimizer.param_groups if any(member is parameter for member in group["params"]))
    weight = nn.Parameter(torch.zeros_like(parameter))
    weight.grad = torch.zeros_like(weight)
    trial = type(optimizer)([weight], lr=group["lr"], weight_decay=group["weight_decay"])
    trial.step()
    state = _with_tensors(trial.state[weight])
    for kind, value in state.items():
        if not isinstance(value, Tensor | None):
            raise UserError(
                f"customized_optimizer {type(optimizer).__name__} keeps a {type(value).__name__} per weight ({kind}), "
                "which a checkpoint cannot store; choose another"
            )
    if isinstance(step := state.get("step"), Tensor):
        step.zero_()
    optimizer.state[parameter] = state
