"""Build models from weights without changing anything that other threads see.

While diffusers' `from_pretrained` runs, `Module.register_parameter`, the functions of `torch.nn.init` and the default
dtype are replaced in the whole process: modules that another thread builds meanwhile stay without values. Exports are
written and verified in a thread while training, or a task's own code, builds and loads models in another.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sd3_light.config.faults import UserError
from sd3_light.model.folder import weight_files
from sd3_light.model.part_configs import LOAD_ERRORS, WEIGHTS_STEM, check_files, read_json
from sd3_light.tensor_file import StoredTensor, open_tensors

StoredWeights = Mapping[str, StoredTensor]
"""Weights in files, unread, by the names of the model."""
CPU = torch.device("cpu")


def load_diffusers_model(model_class: Any, folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> Any:
    """Load a diffusers model from its own folder, in ``dtype``, tensor by tensor; see `open_diffusers_model`.

    Weights that stock diffusers keeps in float32 stay in it.
    """
    model, stored = open_diffusers_model(model_class, folder)
    whole = kept_in_float32(model)
    assign_weights(model, lambda name, _: stored[name].load().to(torch.float32 if whole(name) else dtype).to(device))
    return model.to(device)


def stand_in_model(model_class: Any, folder: Path, dtype: torch.dtype) -> tuple[Any, Callable[[str], Tensor | None]]:
    """Return a diffusers model whose weights take no memory, and a function that reads one of them.

    Dtypes are those of `load_diffusers_model`. The function returns None for a table that the model computes itself.
    """
    model, stored = open_diffusers_model(model_class, folder)
    whole = kept_in_float32(model)

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if whole(name) else dtype

    assign_weights(model, lambda name, weight: torch.zeros((), dtype=dtype_of(name)).expand(weight.shape))
    saved = set(model.state_dict())
    return model, lambda name: stored[name].load().to(dtype_of(name)) if name in saved else None


def open_diffusers_model(model_class: Any, folder: Path) -> tuple[Any, StoredWeights]:
    """Return a diffusers model without memory for its weights, and the weights in its own folder.

    Missing or wrong weights are a UserError.
    """
    check_files(folder)
    try:
        files = weight_files(folder, WEIGHTS_STEM)
        if missing := next((file for file in files if not file.is_file()), None):
            raise FileNotFoundError(f"{missing.name} is missing")
        stored = {name: tensor for file in files for name, tensor in open_tensors(file)[0].items()}
        model = empty_model(model_class, read_json(folder / "config.json"))
        model._fix_state_dict_keys_on_load(stored)  # older names of attention layers
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded: {reason:.300}; download or export it again") from error
    if wrong := next(mismatches(model, stored), None):
        raise UserError(f"the weights in {folder} do not match its config.json: {wrong}; download or export it again")
    return model.eval(), stored


def read_weights(
    model: nn.Module,
    stored: StoredWeights,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    whole_vectors: bool = False,
) -> nn.Module:
    """Read a model's weights, tensor by tensor, to the device: parameters in ``dtype``, tables as the model has them.

    Weights that stock diffusers keeps in float32 are read in it, and with ``whole_vectors`` norms and biases too.
    Weights below an adapter have the names of a model without one. What an adapter added and what is quantized stays.
    """
    whole = kept_in_float32(model)

    def read(name: str, tensor: Tensor) -> Tensor:
        weight = stored.get(name.replace(".base_layer.", "."))
        is_parameter = isinstance(tensor, nn.Parameter)
        if weight is None or (is_parameter and not tensor.is_floating_point()):
            return tensor
        wanted = torch.float32 if whole(name) or (whole_vectors and tensor.dim() < 2) else dtype
        # cast there: a GPU is faster, and the bytes of the file are fewer
        return weight.load().to(device).to(wanted if is_parameter else tensor.dtype)

    assign_weights(model, read)
    return model


def kept_in_float32(model: Any) -> Callable[[str], bool]:
    """Return whether stock diffusers loads a weight of this name in float32, whatever dtype is asked for.

    ``model`` may be its class.
    """
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


def mismatches(model: nn.Module, state: Mapping[str, Tensor] | StoredWeights) -> Iterator[str]:
    """Yield the weights of the model that ``state`` lacks or has in another shape."""
    for name, tensor in model.state_dict().items():
        if name not in state:
            yield f"{name} is missing"
        elif tuple(state[name].shape) != tensor.shape:
            yield f"{name} has shape {list(state[name].shape)}, not {list(tensor.shape)}"


def assign_weights(model: nn.Module, read: Callable[[str, Tensor], Tensor]) -> None:
    """Make the tensors that ``read(name, tensor)`` returns the model's own, in place of its parameters and buffers.

    `load_state_dict(assign=True)` would do the same with `register_parameter`, which another thread may have replaced.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and (value := read(prefix + name, parameter)) is not parameter:
                module._parameters[name] = nn.Parameter(value, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = read(prefix + name, buffer)
