"""The other side of an adapter's proof: a clean process puts the written file on the model that it was trained on.

It is run as a file, so that nothing of ours is imported. A LoRA is loaded by stock diffusers as its users load it; a
LoKr or LoHa, which diffusers does not read, is added to the weights by LyCORIS' formulas. Weights stay as they are
stored while the model computes in float32.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

INPUTS = ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")
_WITHOUT = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")


def load_base(base: str, dtype: torch.dtype) -> SD3Transformer2DModel:
    """The denoiser of a folder."""
    return SD3Transformer2DModel.from_pretrained(base, dtype=dtype, local_files_only=True)


def output_of(denoiser: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the denoiser computes, in float32, from its stored weights."""
    hooks = [hook for module in denoiser.modules() for hook in _widened(module)]
    with torch.no_grad():
        output: Tensor = denoiser(**{name: inputs[name] for name in INPUTS}, return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    return output.contiguous()


def _widened(module: nn.Module) -> list[Any]:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    stored = [tensor.data for tensor in own]
    if all(tensor.dtype == torch.float32 for tensor in own):
        return []

    def widen(*_: object) -> None:
        for tensor in own:
            tensor.data = tensor.data.float()

    def narrow(*_: object) -> None:
        for tensor, data in zip(own, stored, strict=True):
            tensor.data = data

    return [module.register_forward_pre_hook(widen), module.register_forward_hook(narrow, always_call=True)]


def add_lycoris(denoiser: nn.Module, file: Path) -> None:
    """Add the update of each layer of a LyCORIS file to its weight, in float32."""
    tensors = load_file(file)
    layers = {f"lycoris_{name.replace('.', '_')}": module for name, module in denoiser.named_modules()}
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, _, factor = key.partition(".")
        found.setdefault(layer, {})[factor] = tensor.float()
    for layer, factors in found.items():
        weight: Any = layers[layer].weight
        weight.data = weight.data.float() + update_of(factors).reshape(weight.shape)


def update_of(factors: dict[str, Tensor]) -> Tensor:
    """The update that LyCORIS' factors stand for, times alpha / rank where the file says an alpha."""
    low = next((factors[name] for name in ("hada_w1_b", "lokr_w1_b", "lokr_w2_b") if name in factors), None)
    scale = float(factors["alpha"]) / low.shape[0] if low is not None and "alpha" in factors else 1.0
    if "hada_w1_a" in factors:
        one, other = (factors[f"hada_w{i}_a"] @ factors[f"hada_w{i}_b"] for i in (1, 2))
        return one * other * scale
    one, other = (
        factors[f"lokr_w{i}"] if f"lokr_w{i}" in factors else factors[f"lokr_w{i}_a"] @ factors[f"lokr_w{i}_b"]
        for i in (1, 2)
    )
    return torch.kron(one, other) * scale


def _add(denoiser: SD3Transformer2DModel, file: Path, kind: str) -> None:
    if kind != "lora":
        add_lycoris(denoiser, file)
        return
    pipe = StableDiffusion3Pipeline(
        transformer=denoiser, scheduler=FlowMatchEulerDiscreteScheduler(), **dict.fromkeys(_WITHOUT)
    )
    pipe.load_lora_weights(file.parent, weight_name=file.name)


def _main(file: str, place: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler's, to all: the trainer still wants the answer
        signal.signal(number, signal.SIG_IGN)
    wishes = json.loads(Path(place, "wishes.json").read_text(encoding="utf-8"))
    torch.set_num_threads(wishes["threads"])  # the order of additions depends on it
    inputs = load_file(Path(place, "inputs.safetensors"))
    denoiser = load_base(wishes["base"], getattr(torch, wishes["base_dtype"]))
    plain = output_of(denoiser, inputs)
    _add(denoiser, Path(file), wishes["kind"])
    save_file({"output": output_of(denoiser, inputs), "plain": plain}, Path(place, "outputs.safetensors"))


if __name__ == "__main__":
    _main(*sys.argv[1:])
