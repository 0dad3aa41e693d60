"""Build models from weights without changing anything that other threads see.

While diffusers' `from_pretrained` runs, `Module.register_parameter`, the functions of `torch.nn.init` and the default
dtype are replaced in the whole process: modules that another thread builds meanwhile stay without values. Exports are
written and verified in a thread while training, or a task's own code, builds and loads models in another.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sd3_light.config.faults import UserError
from sd3_light.model.folder import weight_files
from sd3_light.model.part_configs import LOAD_ERRORS, WEIGHTS_STEM, check_files, read_json


def load_diffusers_model(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Load a diffusers model from its own folder, in ``dtype``; missing or wrong weights are a UserError.

    Weights that stock diffusers keeps in float32 stay in it.
    """
    check_files(folder)
    try:
        files = weight_files(folder, WEIGHTS_STEM)
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
        model = empty_model(model_class, read_json(folder / "config.json"))
        model._fix_state_dict_keys_on_load(state)  # older names of attention layers
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded: {reason:.300}; download or export it again") from error
    if wrong := next(mismatches(model, state), None):
        raise UserError(f"the weights in {folder} do not match its config.json: {wrong}; download or export it again")
    whole = kept_in_float32(model)
    assign_weights(model, {name: tensor.to(torch.float32 if whole(name) else dtype) for name, tensor in state.items()})
    return model.eval()


def kept_in_float32(model: Any) -> Callable[[str], bool]:
    """Return whether stock diffusers loads a weight of this name in float32, whatever dtype is asked for."""
    modules = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return lambda name: not modules.isdisjoint(name.split("."))


def empty_model(model_class: Any, config: Mapping[str, Any]) -> Any:
    """Return a diffusers model without memory for its weights; tables that it computes itself have their values."""
    with _EmptyWeights():
        return model_class.from_config(dict(config))


class _EmptyWeights(TorchFunctionMode):
    """Puts what weights are made with on the meta device, for this thread only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WEIGHT_FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


_WEIGHT_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)


def mismatches(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the weights of the model that ``state`` lacks or has in another shape."""
    for name, tensor in model.state_dict().items():
        if name not in state:
            yield f"{name} is missing"
        elif state[name].shape != tensor.shape:
            yield f"{name} has shape {list(state[name].shape)}, not {list(tensor.shape)}"


def assign_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Make the tensors of ``state`` the model's own parameters and buffers.

    `load_state_dict(assign=True)` would do the same with `register_parameter`, which another thread may have replaced.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(state[prefix + name], parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = state[prefix + name]
