"""Notes on how programs that read single files treat a model: they assume properties of Stability's models."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sd3_light.config.faults import UserError
from sd3_light.encoding.vae import SD3_LATENTS
from sd3_light.export.stored_parts import PartConfig
from sd3_light.families.sd3.lora_names import reader_padding
from sd3_light.families.sd3.single_parts import PROJECTION, Model
from sd3_light.families.sd3.start import HEAD_WIDTH

_WIDTHS = (("joint_attention_dim", 4096, "text width"), ("pooled_projection_dim", 2048, "pooled text width"))
_FULL_SIZE = {
    "vae": ("block_out_channels", [128, 256, 512, 512]),
    "text_encoder": ("hidden_size", 768),
    "text_encoder_2": ("hidden_size", 1280),
    "text_encoder_3": ("d_model", 4096),
}
_SHIFT = 3.0
# of diffusers by default; at least that many in ComfyUI
_T5_LENGTH = 256
_COMFY_T5_LENGTH = 77
_LATENTS = {"scaling_factor": SD3_LATENTS.scale, "shift_factor": SD3_LATENTS.shift}


def blocks_in_file(config: PartConfig, pad_blocks: bool) -> int:
    """Return the number of blocks in the file: padded to the number of heads if readers support the head width."""
    padding = reader_padding(config) if pad_blocks else None
    return padding.num_blocks if padding else int(config["num_layers"])


def refuse_wrong_heads(config: PartConfig) -> None:
    """Raise a UserError for a head width with which readers would silently compute wrong results."""
    width = config["attention_head_dim"]
    if width != HEAD_WIDTH and config.get("qk_norm") is None:
        raise UserError(
            f"heads of {width} without qk-norm: programs that read single files assume heads of {HEAD_WIDTH} and would "
            "silently generate wrong images; use the diffusers folder"
        )


def reader_notes(model: Model, blocks: int, scheduler: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """Return one sentence per point where readers such as ComfyUI differ from what this model needs."""
    return [
        *_block_notes(model.configs["transformer"], blocks),
        *_size_notes(model),
        *_constant_notes(model, scheduler),
        *_text_notes(model, text),
        "in ComfyUI choose the sampler `euler` and the scheduler `normal`: no other scheduler has diffusers' timesteps",
    ]


def _block_notes(config: PartConfig, blocks: int) -> Iterator[str]:
    true = config["num_layers"]
    heads = config["num_attention_heads"]
    width = config["attention_head_dim"]
    if width != HEAD_WIDTH:
        yield f"heads of {width}: ComfyUI and other readers support heads of {HEAD_WIDTH} only and do not load the file"
    elif true > heads:
        yield f"{true} blocks and {heads} heads: readers such as ComfyUI expect one block per head and do not load it"
    elif blocks > true:
        yield (
            f"{blocks - true} identity blocks before the last of {true}: readers expect as many blocks as heads "
            f"({heads}). They do not change images, but cost time there, and the last block becomes number {blocks - 1}"
        )
    elif true < heads:
        yield f"{true} blocks and {heads} heads: readers such as ComfyUI load it only with identity blocks (pad_blocks)"


def _size_notes(model: Model) -> Iterator[str]:
    for key, full, name in _WIDTHS:
        width = model.configs["transformer"][key]
        if width != full:
            yield f"{name} {width}: ComfyUI's SD3 text encoders output {full}, so its workflows cannot use the model"
    for part, (key, full_size) in _FULL_SIZE.items():
        size = model.configs.get(part, {}).get(key, full_size)
        if size != full_size:
            yield f"{part} has {key} {size}: ComfyUI loads {full_size} only"


def _constant_notes(model: Model, scheduler: Mapping[str, Any]) -> Iterator[str]:
    shift = scheduler.get("shift", _SHIFT)
    if shift != _SHIFT:
        yield f"sampling shift {shift:g}: ComfyUI uses {_SHIFT:g} unless a ModelSamplingSD3 node sets {shift:g}"
    for key, usual in _LATENTS.items():
        value = model.configs.get("vae", {}).get(key, usual)
        if value != usual:
            yield f"the VAE's {key} is {value}: readers use {usual}"


def _text_notes(model: Model, text: Mapping[str, Any]) -> Iterator[str]:
    if text.get("text_tokens") == "real":
        yield "trained on real text tokens: readers pad the prompt and let every token attend to the padding"
    elif (length := text.get("t5_max_length", _T5_LENGTH)) != _COMFY_T5_LENGTH:
        yield (
            f"T5 tokens: ComfyUI pads a prompt to {_COMFY_T5_LENGTH}, training and diffusers to {length}, so images of "
            "the same seed differ"
        )
    if text.get("uncond_text") == "zero":
        yield "trained with zeros as the unconditional text: use a ConditioningZeroOut node, not an empty prompt"
    if "text_encoder" in model.tensors:
        projection = model.tensors["text_encoder"][PROJECTION].load().float()
        if not torch.equal(projection, torch.eye(*projection.shape)):
            yield "CLIP-L's text_projection is not the identity: readers use its pooled output unprojected"
