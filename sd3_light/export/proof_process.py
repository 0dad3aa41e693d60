"""The clean process of a proof: it loads an exported folder or adapter file and reports what it contains and computes.

It runs as a script and imports nothing of this package, so its result holds for any user of diffusers. The parent
process imports its functions to compute the same from the weights in memory. Text encoders, by far the largest part,
are not loaded. Weights keep their stored dtype, mapped from the file where it is that of the file, while the denoiser
computes in float32, one layer at a time: the memory does not grow with the model.
"""

import signal

if __name__ == "__main__":  # before the slow imports: a scheduler signals all processes; the trainer needs the result
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STEPS, GUIDANCE, SEED = 2, 3.0, 0
INPUTS = ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")
_TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_OTHER_PARTS = ("vae", *_TEXT_ENCODERS, "tokenizer", "tokenizer_2", "tokenizer_3")


Update = Callable[[Tensor], Tensor]
"""Returns a layer's float32 weight with an adapter's update."""


@contextmanager
def compute_in_float32(model: nn.Module, updates: Mapping[str, Update] | None = None) -> Iterator[None]:
    """Compute in float32 inside the block with weights in any dtype: one layer at a time is cast, and updated.

    ``updates`` are those of an adapter by layer name.
    """
    updates, modules = updates or {}, dict(model.named_modules())
    assert updates.keys() <= modules.keys(), f"no such layers: {sorted(updates.keys() - modules.keys())[:3]}"
    hooks = [hook for name, module in modules.items() for hook in _cast_around(module, updates.get(name))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cast_around(module: Any, update: Update | None) -> list[Any]:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    stored = [tensor.data for tensor in tensors]
    if update is None and all(tensor.dtype == torch.float32 for tensor in tensors):
        return []

    def widen(*_: object) -> None:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        if update is not None:
            module.weight.data = update(module.weight.data)

    def restore(*_: object) -> None:
        for tensor, data in zip(tensors, stored, strict=True):
            tensor.data = data

    return [module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)]


def denoise(denoiser: nn.Module, inputs: dict[str, Tensor], updates: Mapping[str, Update] | None = None) -> Tensor:
    """Return the denoiser's output for the fixed inputs, with the updates of an adapter."""
    with torch.no_grad(), compute_in_float32(denoiser, updates):
        output: Tensor = denoiser(**{name: inputs[name] for name in INPUTS}, return_dict=False)[0]
    return output.contiguous()


def sample_image(pipe: Any, inputs: dict[str, Tensor], attention: dict[str, Tensor] | None) -> Tensor:
    """Sample a small image [C, H, W] with values from 0 to 1: fixed embeddings and seed, few steps, with guidance."""
    pipe.set_progress_bar_config(disable=True)
    side = int(inputs["side"]) * pipe.vae_scale_factor
    with torch.no_grad(), compute_in_float32(pipe.transformer):
        image: Tensor = pipe(
            prompt_embeds=inputs["encoder_hidden_states"],
            pooled_prompt_embeds=inputs["pooled_projections"],
            negative_prompt_embeds=inputs["negative_hidden_states"],
            negative_pooled_prompt_embeds=inputs["negative_projections"],
            generator=torch.Generator("cpu").manual_seed(SEED),
            width=side,
            height=side,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            joint_attention_kwargs=attention,
            output_type="pt",
        ).images[0]
    return image.contiguous()


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    """Return dtype, shape and byte hash of each tensor by name."""
    return {name: _digest(tensor.detach().cpu().contiguous()) for name, tensor in state.items()}


def _digest(tensor: Tensor) -> str:
    content = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"{tensor.dtype} {list(tensor.shape)} {content.hexdigest()}"


def load_pipeline(folder: Path, dtype: torch.dtype, real_text: bool) -> Any:
    """Load the folder's pipeline without text encoders: the stock class, or the one in the folder's own file."""
    options = {
        **dict.fromkeys(_TEXT_ENCODERS),
        "dtype": {"transformer": dtype, "default": torch.float32},
        "local_files_only": True,
        "use_safetensors": True,
    }
    if real_text:
        return DiffusionPipeline.from_pretrained(folder, custom_pipeline="pipeline", trust_remote_code=True, **options)
    return StableDiffusion3Pipeline.from_pretrained(folder, **options)


def _check_folder(folder: Path, request: dict[str, Any], inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    pipe = load_pipeline(folder, getattr(torch, request["dtype"]), request["real_text"])
    report = {"weights": digests(pipe.transformer.state_dict()), "config": dict(pipe.transformer.config)}
    attention = {"text_lengths": inputs["text_lengths"]} if request["real_text"] else None
    return report, {"output": denoise(pipe.transformer, inputs), "image": sample_image(pipe, inputs, attention)}


def load_base(base: str, dtype: torch.dtype) -> SD3Transformer2DModel:
    """Load the denoiser of a folder."""
    return SD3Transformer2DModel.from_pretrained(base, dtype=dtype, local_files_only=True, use_safetensors=True)


def _check_adapter(file: Path, request: dict[str, Any], inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    denoiser = load_base(request["base"], getattr(torch, request["base_dtype"]))
    plain = denoise(denoiser, inputs)
    if request["adapter"] == "lora":
        scheduler = FlowMatchEulerDiscreteScheduler()
        pipe = StableDiffusion3Pipeline(transformer=denoiser, scheduler=scheduler, **dict.fromkeys(_OTHER_PARTS))
        with _shown_in_float32(denoiser):
            pipe.load_lora_weights(file.parent, weight_name=file.name)
        output = denoise(denoiser, inputs)
    else:  # diffusers does not read LoKr and LoHa
        output = denoise(denoiser, inputs, _lycoris_updates(denoiser, file, request["padding"]))
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


def _lycoris_updates(denoiser: nn.Module, file: Path, padding: list[int] | None) -> dict[str, Update]:
    """Return the updates in a LyCORIS file by layer name.

    With ``padding``, the file numbers the last block as a single file does that is padded to that many blocks.
    """
    last, new = (f"transformer_blocks.{blocks - 1}." for blocks in padding or (1, 1))
    layers = {f"lycoris_{name.replace(last, new).replace('.', '_')}": name for name, _ in denoiser.named_modules()}
    factors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        layer, _, factor = key.partition(".")
        factors.setdefault(layers[layer], {})[factor] = tensor.float()
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
    report, outputs = check(Path(path), request, load_file(Path(folder, "inputs.safetensors")))
    save_file(outputs, Path(folder, "outputs.safetensors"))
    Path(folder, "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
