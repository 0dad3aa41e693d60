"""The mapping between diffusers' tensors and those of the community's SD3 single file, in both directions.

A tensor of the single file contains the rows of one or more diffusers tensors (q, k and v are one matrix there). The
last AdaLN layers output [scale, shift] in diffusers and [shift, scale] in the single file: their halves are swapped.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.tensor_file import StoredTensor, joined, same, zeros

Tensors = Mapping[str, StoredTensor]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """A tensor of the single file and the diffusers tensors whose rows it contains; ``swap``: with swapped halves."""

    single: str
    stock: tuple[str, ...]
    swap: bool = False


_OUTER_LAYERS = (
    ("x_embedder.proj", "pos_embed.proj"),
    ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
    ("context_embedder", "context_embedder"),
    ("final_layer.linear", "proj_out"),
)


def denoiser_rules(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield one rule per tensor of a denoiser with this config."""
    last = config["num_layers"] - 1
    dual = set(config.get("dual_attention_layers") or ())
    norm = config.get("qk_norm") is not None
    yield Rule("pos_embed", ("pos_embed.pos_embed",))
    for single, stock in _OUTER_LAYERS:
        yield from _linear(single, stock)
    yield from _linear("final_layer.adaLN_modulation.1", "norm_out.linear", swap=True)
    for block in range(last + 1):
        single = f"joint_blocks.{block}"
        stock = f"transformer_blocks.{block}"
        yield from _image_side(f"{single}.x_block", stock, norm, block in dual)
        yield from _text_side(f"{single}.context_block", stock, norm, block == last)


def _image_side(single: str, stock: str, norm: bool, dual: bool) -> Iterator[Rule]:
    yield from _linear(f"{single}.adaLN_modulation.1", f"{stock}.norm1.linear")
    for attention in ("attn", "attn2") if dual else ("attn",):
        yield from _linear(f"{single}.{attention}.qkv", *(f"{stock}.{attention}.to_{part}" for part in "qkv"))
        yield from _linear(f"{single}.{attention}.proj", f"{stock}.{attention}.to_out.0")
        for part in "qk" if norm else "":
            yield Rule(f"{single}.{attention}.ln_{part}.weight", (f"{stock}.{attention}.norm_{part}.weight",))
    yield from _linear(f"{single}.mlp.fc1", f"{stock}.ff.net.0.proj")
    yield from _linear(f"{single}.mlp.fc2", f"{stock}.ff.net.2")


def _text_side(single: str, stock: str, norm: bool, last: bool) -> Iterator[Rule]:
    """Yield the rules of the text stream. The last block has no text output, and its AdaLN is the continuous one."""
    yield from _linear(f"{single}.adaLN_modulation.1", f"{stock}.norm1_context.linear", swap=last)
    yield from _linear(f"{single}.attn.qkv", *(f"{stock}.attn.add_{part}_proj" for part in "qkv"))
    for part in "qk" if norm else "":
        yield Rule(f"{single}.attn.ln_{part}.weight", (f"{stock}.attn.norm_added_{part}.weight",))
    if not last:
        yield from _linear(f"{single}.attn.proj", f"{stock}.attn.to_add_out")
        yield from _linear(f"{single}.mlp.fc1", f"{stock}.ff_context.net.0.proj")
        yield from _linear(f"{single}.mlp.fc2", f"{stock}.ff_context.net.2")


def _linear(single: str, *stock: str, swap: bool = False) -> Iterator[Rule]:
    for kind in ("weight", "bias"):
        yield Rule(f"{single}.{kind}", tuple(f"{name}.{kind}" for name in stock), swap)


def fuse(stock: Tensors, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Convert a denoiser from diffusers' tensors to the single file's."""
    return {rule.single: _fuse(rule, [stock[name] for name in rule.stock]) for rule in denoiser_rules(config)}


def _fuse(rule: Rule, parts: list[StoredTensor]) -> StoredTensor:
    dtypes = sorted({part.dtype for part in parts})
    if len(dtypes) > 1:
        raise UserError(
            f"{', '.join(rule.stock)} have types {' and '.join(dtypes)}; a single file needs one type for them"
        )
    return _swapped(joined(parts), rule.swap)


def unfuse(single: Tensors, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Undo `fuse`."""
    stock: dict[str, StoredTensor] = {}
    for rule in denoiser_rules(config):
        parts = _swapped(single[rule.single], rule.swap).split(len(rule.stock))
        stock.update(zip(rule.stock, parts, strict=True))
    return stock


def _swapped(tensor: StoredTensor, swap: bool) -> StoredTensor:
    return joined(tensor.split(2)[::-1]) if swap else tensor


def fused_shapes(stock: Shapes, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the single file's denoiser from those of diffusers."""
    tensors = {name: zeros("F32", shape) for name, shape in stock.items()}
    return {name: tensor.shape for name, tensor in fuse(tensors, config).items()}


_STOCK_BLOCK = re.compile(r"transformer_blocks\.(\d+)\.")


def padded_config(config: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """Return the config with identity blocks before the last block, ``blocks`` in total."""
    last = config["num_layers"] - 1
    dual = [blocks - 1 if layer == last else layer for layer in config.get("dual_attention_layers") or ()]
    return {**config, "num_layers": blocks, "dual_attention_layers": dual}


def pad(stock: Tensors, shapes: Shapes, true_blocks: int, blocks: int) -> dict[str, StoredTensor]:
    """Add zero blocks before the last one: zero gates make them the identity. ``shapes`` are the padded ones."""
    renumbered = {_renumbered(name, true_blocks - 1, blocks - 1): tensor for name, tensor in stock.items()}
    dtype = stock["proj_out.weight"].dtype
    return {name: renumbered[name] if name in renumbered else zeros(dtype, shape) for name, shape in shapes.items()}


def unpad(stock: Tensors, true_blocks: int, blocks: int, where: str) -> dict[str, StoredTensor]:
    """Undo `pad`. An identity block that is not zero is an error: it was trained."""
    unpadded = {}
    for name, tensor in stock.items():
        block = _STOCK_BLOCK.match(name)
        if block and true_blocks - 1 <= int(block[1]) < blocks - 1:
            if not same(tensor, zeros(tensor.dtype, tensor.shape)):
                raise UserError(
                    f"{where}: its metadata calls block {block[1]} padding, but its weights are not zero. "
                    "Another program changed it: read the file with its padding kept"
                )
        else:
            unpadded[_renumbered(name, blocks - 1, true_blocks - 1)] = tensor
    return unpadded


def _renumbered(name: str, old: int, new: int) -> str:
    prefix = f"transformer_blocks.{old}."
    return f"transformer_blocks.{new}." + name.removeprefix(prefix) if name.startswith(prefix) else name


_VAE = (  # applied in this order
    (r"\.conv_norm_out\.", r".norm_out."),
    (r"\.conv_shortcut\.", r".nin_shortcut."),
    (r"\.down_blocks\.(\d+)\.resnets\.", r".down.\1.block."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.up_blocks\.(\d+)\.resnets\.", r".up.\1.block."),
    (r"\.up_blocks\.(\d+)\.upsamplers\.0\.", r".up.\1.upsample."),
    (r"\.mid_block\.resnets\.0\.", r".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", r".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", r".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", r".mid.attn_1.proj_out."),
)


def vae_name(stock: str, levels: int) -> str:
    """Return a VAE tensor's name in the single file, whose decoder numbers the ``levels`` in reverse."""
    name = stock
    for pattern, replacement in _VAE:
        name = re.sub(pattern, replacement, name)
    return re.sub(r"(?<=\.up\.)\d+", lambda match: str(levels - 1 - int(match[0])), name)


def vae_tensor(name: str, tensor: StoredTensor) -> StoredTensor:
    """Convert a VAE tensor to the single file's shape: attention matrices are 1x1 convolutions there."""
    matrix = ".mid.attn_1." in name and len(tensor.shape) == 2
    return tensor.reshaped((*tensor.shape, 1, 1)) if matrix else tensor
