"""The clean process of a proof: it loads an exported folder or adapter file and reports what it contains and computes.

It runs as a script and imports nothing of this package, so its result holds for any user of diffusers. The parent
process imports its functions to compute the same from the weights in memory. The request contains the names of
diffusers' classes and their arguments. Text encoders, by far the largest part, are not loaded. Weights keep their
stored dtype, mapped from the file where it is that of the file, while the denoiser computes in float32, one layer at a
time: the memory does not grow with the model.
"""

import signal

if __name__ == "__main__":  # before the slow imports: a scheduler signals all processes; the trainer needs the result
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SEED = 0
LARGE_TABLE = 1 << 24
_FEW_PIXELS = 64 * 64
_TENSOR = "tensor:"

Update = Callable[[Tensor], Tensor]
"""Returns a layer's float32 weight with an adapter's update."""
Read = Callable[[str], Tensor | None]
"""Returns the values of a weight that the model only stands in for; None if it has them."""


@contextmanager
def compute_in_float32(
    model: nn.Module, updates: Mapping[str, Update] | None = None, read: Read | None = None
) -> Iterator[None]:
    """Compute in float32 inside the block with weights in any dtype: one layer at a time is read, cast and updated.

    ``updates`` are those of an adapter by layer name. ``read(name)`` returns the weights of a layer while it computes.
    """
    updates = updates or {}
    modules = dict(model.named_modules())
    assert updates.keys() <= modules.keys(), f"no such layers: {sorted(updates.keys() - modules.keys())[:3]}"
    hooks = [
        hook
        for name, module in modules.items()
        for hook in _cast_around(module, updates.get(name), _of_layer(name, read))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _of_layer(layer: str, read: Read | None) -> Read | None:
    """Return ``read`` with the names that weights have in their layer."""
    return None if read is None else lambda name: read(f"{layer}.{name}" if layer else name)


def _cast_around(module: Any, update: Update | None, read: Read | None) -> list[Any]:
    tables = dict(module.named_buffers(recurse=False))
    named = [*module.named_parameters(recurse=False), *tables.items()]
    tensors = [tensor for _, tensor in named]
    stored = [tensor.data for tensor in tensors]
    if update is None and (not tensors or (read is None and all(tensor.dtype == torch.float32 for tensor in tensors))):
        return []

    def widen(_: object, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for name, tensor in named:
            values = None if read is None else read(name)
            tensor.data = tensor.data if values is None else values
            # a large table is cropped before it is added to float32: SD3.5's would take a gigabyte
            if name not in tables or tensor.numel() < LARGE_TABLE:
                tensor.data = tensor.data.float()
        if update is not None:
            module.weight.data = update(module.weight.data)
        # a pipeline may have cast them to the dtype of the weights
        return tuple(map(_widened, args)), {name: _widened(value) for name, value in kwargs.items()}

    def restore(*_: object) -> None:
        for tensor, data in zip(tensors, stored, strict=True):
            tensor.data = data

    before = module.register_forward_pre_hook(widen, with_kwargs=True)
    return [before, module.register_forward_hook(restore, always_call=True)]


def _widened(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value for JSON: its tensors, which are added to ``tensors``, are replaced by their names there."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return f"{_TENSOR}{name}"
    if isinstance(value, Mapping):
        return {key: packed(item, tensors) for key, item in value.items()}
    return [packed(item, tensors) for item in value] if isinstance(value, list | tuple) else value


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `packed`; tuples become lists."""
    if isinstance(value, str) and value.startswith(_TENSOR):
        return tensors[value.removeprefix(_TENSOR)]
    if isinstance(value, dict):
        return {key: unpacked(item, tensors) for key, item in value.items()}
    return [unpacked(item, tensors) for item in value] if isinstance(value, list) else value


def denoise(
    denoiser: nn.Module,
    inputs: Mapping[str, Any],
    updates: Mapping[str, Update] | None = None,
    read: Read | None = None,
) -> Tensor:
    """Return the denoiser's output for the fixed inputs; see `compute_in_float32`."""
    with torch.no_grad(), compute_in_float32(denoiser, updates, read):
        output = denoiser(**inputs, return_dict=False)[0]
    samples: Tensor = output if isinstance(output, Tensor) else torch.stack(list(output))
    return samples.contiguous()


def sample_image(pipe: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Sample an image with values from 0 to 1, or a video, with fixed arguments and a fixed seed."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(SEED)
    arguments = {name: _as_images(value) for name, value in inputs.items()}
    with torch.no_grad(), compute_in_float32(pipe.transformer), _small_references(pipe):
        image: Tensor = pipe(**arguments, generator=generator, output_type="pt", return_dict=False)[0][0]
    return image.contiguous()


def _as_images(value: Any) -> Any:
    """Return an argument with images in place of pixels."""
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        return Image.fromarray(value.numpy())
    return [_as_images(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _small_references(pipe: Any) -> Iterator[None]:
    """Let a pipeline that scales references to a million pixels scale them to few: a large model takes minutes."""
    module = sys.modules[type(pipe).__module__]
    scale = getattr(module, "calculate_dimensions", None)
    if scale is None:
        yield
        return
    module.calculate_dimensions = lambda _, ratio: scale(_FEW_PIXELS, ratio)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.calculate_dimensions = scale  # type: ignore[attr-defined]


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    """Return dtype, shape and byte hash of each tensor by name."""
    return {name: _digest(tensor.detach().cpu().contiguous()) for name, tensor in state.items()}


def _digest(tensor: Tensor) -> str:
    content = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"{tensor.dtype} {list(tensor.shape)} {content.hexdigest()}"


def load_pipeline(folder: Path, dtype: torch.dtype, custom: bool, absent: list[str]) -> Any:
    """Load the folder's pipeline without the ``absent`` parts: the stock class, or the one in the folder's own file."""
    options = {
        **dict.fromkeys(absent),
        "dtype": {"transformer": dtype, "default": torch.float32},
        "local_files_only": True,
        "use_safetensors": True,
    }
    if custom:
        options |= {"custom_pipeline": "pipeline", "trust_remote_code": True}
    return DiffusionPipeline.from_pretrained(folder, **options)


def make_pipeline(name: str, **parts: Any) -> Any:
    """Make a pipeline of a class in diffusers from some of its parts; the others are None."""
    kind = getattr(diffusers, name)
    required = inspect.signature(kind.__init__).parameters.values()
    absent = [item.name for item in required if item.default is item.empty and item.name not in ("self", *parts)]
    return kind(**parts, **dict.fromkeys(absent))


def _check_folder(folder: Path, request: dict[str, Any], inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    pipe = load_pipeline(folder, getattr(torch, request["dtype"]), request["custom"], request["absent"])
    report = {
        "class": type(pipe).__name__,
        "weights": digests(pipe.transformer.state_dict()),
        "config": dict(pipe.transformer.config),
    }
    outputs = {"output": denoise(pipe.transformer, inputs["denoiser"]), "image": sample_image(pipe, inputs["pipeline"])}
    return report, outputs


def load_base(kind: str, base: str, dtype: torch.dtype) -> Any:
    """Load the denoiser of a folder, of a class in diffusers."""
    options = {"dtype": dtype, "local_files_only": True, "use_safetensors": True}
    return getattr(diffusers, kind).from_pretrained(base, **options)


def _check_adapter(file: Path, request: dict[str, Any], inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    denoiser = load_base(request["denoiser"], request["base"], getattr(torch, request["base_dtype"]))
    plain = denoise(denoiser, inputs)
    if request["adapter"] == "lora":
        scheduler = FlowMatchEulerDiscreteScheduler()
        pipe = make_pipeline(request["pipeline"], transformer=denoiser, scheduler=scheduler)
        with _shown_in_float32(denoiser):
            pipe.load_lora_weights(file.parent, weight_name=file.name)
        output = denoise(denoiser, inputs)
    else:  # diffusers does not read LoKr and LoHa
        output = denoise(denoiser, inputs, _lycoris_updates(denoiser, file, request))
    return {}, {"output": output, "plain": plain}


@contextmanager
def _shown_in_float32(model: nn.Module) -> Iterator[None]:
    """Let the weights look like float32 inside the block, without memory: peft casts an adapter to its layer's dtype.

    On a base in half precision that would round the adapter, and the proof is about the values in the file.
    """
    stored = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in stored:
        parameter.data = torch.zeros(()).expand(data.shape)
    try:
        yield
    finally:
        for parameter, data in stored:
            parameter.data = data


def _lycoris_updates(denoiser: nn.Module, file: Path, request: Mapping[str, Any]) -> dict[str, Update]:
    """Return the updates in a LyCORIS file by layer name.

    A layer is named as LyCORIS does, or by one of the ``stems``. With ``padding``, the file numbers the last block as a
    single file does that is padded to that many blocks.
    """
    last, new = (f"transformer_blocks.{blocks - 1}." for blocks in request["padding"] or (1, 1))
    layers = {f"lycoris_{name.replace(last, new).replace('.', '_')}": name for name, _ in denoiser.named_modules()}
    factors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        stem, _, factor = key.rpartition(".")
        layer = layers.get(stem) or request["stems"][stem]
        factors.setdefault(layer, {})[factor] = tensor.float()
    return {layer: partial(_with_lycoris, factors[layer]) for layer in factors}


def _with_lycoris(factors: dict[str, Tensor], weight: Tensor) -> Tensor:
    return weight + _lycoris_update(factors).reshape(weight.shape)


def _lycoris_update(factors: dict[str, Tensor]) -> Tensor:
    """Return the update of LyCORIS factors, times alpha / rank where the file contains an alpha."""
    low = next((factors[name] for name in ("hada_w1_b", "lokr_w1_b", "lokr_w2_b") if name in factors), None)
    scale = float(factors["alpha"]) / low.shape[0] if low is not None and "alpha" in factors else 1.0
    if "hada_w1_a" in factors:
        first, second = (factors[f"hada_w{i}_a"] @ factors[f"hada_w{i}_b"] for i in (1, 2))
        return first * second * scale
    first, second = (
        factors[f"lokr_w{i}"] if f"lokr_w{i}" in factors else factors[f"lokr_w{i}_a"] @ factors[f"lokr_w{i}_b"]
        for i in (1, 2)
    )
    return torch.kron(first, second) * scale


def _main(path: str, folder: str) -> None:
    request = json.loads(Path(folder, "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])  # the order of additions depends on it
    check = _check_adapter if "adapter" in request else _check_folder
    inputs = unpacked(request["inputs"], load_file(Path(folder, "inputs.safetensors")))
    report, outputs = check(Path(path), request, inputs)
    save_file(outputs, Path(folder, "outputs.safetensors"))
    Path(folder, "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
