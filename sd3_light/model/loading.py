"""Build models from weights without changing anything that other threads see.

While diffusers' `from_pretrained` runs, `Module.register_parameter`, the functions of `torch.nn.init` and the default
dtype are replaced in the whole process: modules that another thread builds meanwhile stay without values. Exports are
written and verified in a thread while training, or a task's own code, builds and loads models in another.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.model.folder import weight_files
from sd3_light.model.part_configs import LOAD_ERRORS, WEIGHTS_STEM, check_files, read_json


def load_diffusers_model(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Load a diffusers model from its own folder, in ``dtype``; missing or wrong weights are a UserError."""
    check_files(folder)
    try:
        files = weight_files(folder, WEIGHTS_STEM)
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
        with torch.device("meta"):  # for this thread only
            model = model_class.from_config(read_json(folder / "config.json"))
        model._fix_state_dict_keys_on_load(state)  # older names of attention layers
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded: {reason:.300}; download or export it again") from error
    if wrong := next(mismatches(model, state), None):
        raise UserError(f"the weights in {folder} do not match its config.json: {wrong}; download or export it again")
    assign_weights(model, {name: tensor.to(dtype) for name, tensor in state.items()})
    return model.eval()


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
            if buffer is not None:
                module._buffers[name] = state[prefix + name]
