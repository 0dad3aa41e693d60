"""The other side of the proof: a clean process loads an exported folder and says what it holds and computes.

It is run as a file, so that nothing of ours is imported: what it shows is true for any user of diffusers. `verify`
imports the functions to compute the same from the weights in memory. The text encoders, by far the largest part, are
not loaded, and the denoiser's weights stay as they are stored while it computes in float32.
"""

import hashlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STEPS, GUIDANCE, SEED = 2, 3.0, 0
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def compute_in_float32(model: nn.Module) -> None:
    """Let a model compute in float32 with weights stored in half precision; one layer at a time is widened."""
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.dtype != torch.float32 for tensor in own):
            _Widened(own).attach(module)


class _Widened:
    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.stored = tensors, [tensor.data for tensor in tensors]

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.widen)
        module.register_forward_hook(self.narrow, always_call=True)

    def widen(self, *_: object) -> None:
        for tensor in self.tensors:
            tensor.data = tensor.data.float()

    def narrow(self, *_: object) -> None:
        for tensor, stored in zip(self.tensors, self.stored, strict=True):
            tensor.data = stored


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    """Type, shape and hash of the bytes of each tensor, by its name."""
    return {name: _digest(tensor.detach().cpu().contiguous()) for name, tensor in state.items()}


def _digest(tensor: Tensor) -> str:
    content = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"{tensor.dtype} {list(tensor.shape)} {content.hexdigest()}"


def denoise(denoiser: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The denoiser's output on the fixed inputs."""
    names = ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")
    with torch.no_grad():
        output: Tensor = denoiser(**{name: inputs[name] for name in names}, return_dict=False)[0]
    return output.contiguous()


def draw(pipe: Any, inputs: dict[str, Tensor], attention: dict[str, Tensor] | None) -> Tensor:
    """A small picture [C, H, W] of the fixed embeddings: few steps, guidance, one seed. Values from 0 to 1."""
    pipe.set_progress_bar_config(disable=True)
    side = int(inputs["side"]) * pipe.vae_scale_factor
    with torch.no_grad():
        picture: Tensor = pipe(
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
    return picture.contiguous()


def load(folder: Path, dtype: torch.dtype, real_text: bool) -> Any:
    """The folder's pipeline without its text encoders: stock, or the one of the folder's own file."""
    given = {
        **dict.fromkeys(TEXT_ENCODERS),
        "dtype": {"transformer": dtype, "default": torch.float32},
        "local_files_only": True,
    }
    if real_text:
        return DiffusionPipeline.from_pretrained(folder, custom_pipeline="pipeline", trust_remote_code=True, **given)
    return StableDiffusion3Pipeline.from_pretrained(folder, **given)


def _main(folder: str, place: str) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a scheduler's, to all processes: the trainer still wants the answer
        signal.signal(number, signal.SIG_IGN)
    wishes = json.loads(Path(place, "wishes.json").read_text(encoding="utf-8"))
    torch.set_num_threads(wishes["threads"])  # the order of additions depends on it
    inputs = load_file(Path(place, "inputs.safetensors"))
    pipe = load(Path(folder), getattr(torch, wishes["dtype"]), wishes["real_text"])
    found = {"weights": digests(pipe.transformer.state_dict()), "config": dict(pipe.transformer.config)}
    compute_in_float32(pipe.transformer)
    output = denoise(pipe.transformer, inputs)
    picture = draw(pipe, inputs, {"text_lengths": inputs["text_lengths"]} if wishes["real_text"] else None)
    save_file({"output": output, "picture": picture}, Path(place, "outputs.safetensors"))
    Path(place, "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
