"""Names of a Wan transformer's weights and LoRA layers in ComfyUI and in the original checkpoints."""

import re
from collections.abc import Mapping

from torch import Tensor

from sd3_light.core.files import AdapterNames, Layers

_NAMES = (
    (r"^condition_embedder\.(time|text)_embedder\.linear_1\.", r"\1_embedding.0."),
    (r"^condition_embedder\.(time|text)_embedder\.linear_2\.", r"\1_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out\.", "head.head."),
    (r"^(blocks\.\d+\.)scale_shift_table$", r"\1modulation"),
    (r"^(blocks\.\d+\.)norm2\.", r"\1norm3."),
    (r"^(blocks\.\d+\.ffn\.)net\.0\.proj\.", r"\g<1>0."),
    (r"^(blocks\.\d+\.ffn\.)net\.2\.", r"\g<1>2."),
    (r"^(blocks\.\d+\.)attn1\.", r"\1self_attn."),
    (r"^(blocks\.\d+\.)attn2\.", r"\1cross_attn."),
    (r"(_attn\.)to_([qkv])\.", r"\1\2."),
    (r"(_attn\.)to_out\.0\.", r"\1o."),
    (r"(_attn\.)add_([kv])_proj\.", r"\1\2_img."),
    (r"(_attn\.)norm_added_k\.", r"\1norm_k_img."),
)
_LAYERS = (  # the other way, for layers that have adapters
    (r"^(time|text)_embedding\.0$", r"condition_embedder.\1_embedder.linear_1"),
    (r"^(time|text)_embedding\.2$", r"condition_embedder.\1_embedder.linear_2"),
    (r"^time_projection\.1$", "condition_embedder.time_proj"),
    (r"^head\.head$", "proj_out"),
    (r"^(blocks\.\d+\.ffn\.)0$", r"\1net.0.proj"),
    (r"^(blocks\.\d+\.ffn\.)2$", r"\1net.2"),
    (r"^(blocks\.\d+\.)self_attn\.", r"\1attn1."),
    (r"^(blocks\.\d+\.)cross_attn\.", r"\1attn2."),
    (r"(attn[12]\.)([qkv])$", r"\1to_\2"),
    (r"(attn[12]\.)o$", r"\1to_out.0"),
)


class WanNames(AdapterNames):
    """See `AdapterNames`. A LoRA has ComfyUI's names, which diffusers loads too."""

    def stem(self, layer: str) -> str:
        """See `AdapterNames.stem`."""
        return _comfyui_name(f"transformer.{layer}.").removesuffix(".")

    def lycoris_stem(self, layer: str) -> str:
        """See `AdapterNames.lycoris_stem`."""
        return self.stem(layer)

    def find_layers(self, name: str) -> Layers | None:
        """See `AdapterNames.find_layers`: names of either kind."""
        for pattern, replacement in _LAYERS:
            name = re.sub(pattern, replacement, name)
        return super().find_layers(name)


def wan_to_comfyui(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a Wan LoRA or full weights, by diffusers' names, under the names that ComfyUI reads.

    A ``state_dict_converter`` for `ModelLogger`. diffusers loads the LoRA too.
    """
    return {_comfyui_name(name): tensor for name, tensor in state.items()}


def _comfyui_name(name: str) -> str:
    plain = name.removeprefix("transformer.")
    prefix = "" if plain == name else "diffusion_model."
    for pattern, replacement in _NAMES:
        plain = re.sub(pattern, replacement, plain)
    return prefix + plain
