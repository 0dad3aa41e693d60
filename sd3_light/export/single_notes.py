"""What programs that read single files make of a model: they take for granted what is true of Stability's own."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sd3_light.config.faults import UserError
from sd3_light.export.single_names import HEAD_WIDTH
from sd3_light.export.single_parts import PROJECTION, Config, Model

_WIDTHS = (("joint_attention_dim", 4096, "text width"), ("pooled_projection_dim", 2048, "pooled text width"))
_FULL_SIZE = {
    "vae": ("block_out_channels", [128, 256, 512, 512]),
    "text_encoder": ("hidden_size", 768),
    "text_encoder_2": ("hidden_size", 1280),
    "text_encoder_3": ("d_model", 4096),
}
_SHIFT = 3.0
_LATENTS = {"scaling_factor": 1.5305, "shift_factor": 0.0609}


def blocks_in_file(config: Config, pad_blocks: bool) -> int:
    """Blocks of the denoiser with identity blocks: as many as heads, where there are fewer and readers can know it."""
    blocks, heads = int(config["num_layers"]), int(config["num_attention_heads"])
    return max(blocks, heads) if pad_blocks and config["attention_head_dim"] == HEAD_WIDTH else blocks


def refuse_wrong_heads(config: Config) -> None:
    """Heads of another width are a fault where readers would compute with wrong ones and not notice."""
    width = config["attention_head_dim"]
    if width != HEAD_WIDTH and config.get("qk_norm") is None:
        raise UserError(
            f"heads of {width} without qk-norm: programs that read single files take heads of {HEAD_WIDTH} and would "
            "silently draw other pictures; use the diffusers folder"
        )


def reader_notes(model: Model, blocks: int, scheduler: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing that readers such as ComfyUI do otherwise than this model wants."""
    return [
        *_block_notes(model.configs["transformer"], blocks),
        *_size_notes(model),
        *_constant_notes(model, scheduler),
        *_text_notes(model, text),
    ]


def _block_notes(config: Config, blocks: int) -> Iterator[str]:
    true, heads, width = config["num_layers"], config["num_attention_heads"], config["attention_head_dim"]
    if width != HEAD_WIDTH:
        yield f"heads of {width}: ComfyUI and other readers know heads of {HEAD_WIDTH} only and do not load the file"
    elif true > heads:
        yield f"{true} blocks and {heads} heads: readers such as ComfyUI want one block a head and do not load it"
    elif blocks > true:
        yield (
            f"{blocks - true} identity blocks stand before the last of {true}: readers expect as many blocks as heads "
            f"({heads}); they change no picture, cost time there, and make the last block number {blocks - 1}"
        )
    elif true < heads:
        yield f"{true} blocks and {heads} heads: readers such as ComfyUI load it only with identity blocks (pad_blocks)"


def _size_notes(model: Model) -> Iterator[str]:
    for key, full, words in _WIDTHS:
        found = model.configs["transformer"][key]
        if found != full:
            yield f"{words} {found}: ComfyUI's SD3 text encoders give {full}, so no workflow of its own can drive it"
    for part, (key, full_size) in _FULL_SIZE.items():
        found = model.configs.get(part, {}).get(key, full_size)
        if found != full_size:
            yield f"{part} has {key} {found}: ComfyUI loads {full_size} only"


def _constant_notes(model: Model, scheduler: Mapping[str, Any]) -> Iterator[str]:
    shift = scheduler.get("shift", _SHIFT)
    if not isinstance(shift, int | float):
        raise UserError(f"the scheduler's shift is {shift!r}, which is no number; fetch or write the folder anew")
    if shift != _SHIFT:
        yield f"sampling shift {shift:g}: ComfyUI takes {_SHIFT:g} unless a ModelSamplingSD3 node says {shift:g}"
    for key, usual in _LATENTS.items():
        found = model.configs.get("vae", {}).get(key, usual)
        if found != usual:
            yield f"the VAE's {key} is {found}: readers compute with {usual}"


def _text_notes(model: Model, text: Mapping[str, Any]) -> Iterator[str]:
    if text.get("text_tokens") == "real":
        yield "trained on real text tokens: readers pad the prompt and let every token see the padding"
    if text.get("uncond_text") == "zero":
        yield "trained with zeros as the unconditional text: ConditioningZeroOut gives them, an empty prompt does not"
    if "text_encoder" in model.tensors:
        projection = model.tensors["text_encoder"][PROJECTION].load().float()
        if not torch.equal(projection, torch.eye(*projection.shape)):
            yield "CLIP-L's text_projection is not the identity: readers use its pooled output unprojected"
