"""Maps the keys of LoRA files with ComfyUI's own code; runs in another process, with a checkout on the path.

Arguments: pairs of a family and a file. Prints JSON: family -> the keys that ComfyUI does not map.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

_UNUSED = ("torchvision", "torchaudio", "kornia", "spandrel")
_SD3_TEXT = {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}}
_FLUX = {"patch_size": 2, "hidden_size": 64, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "context_in_dim": 64}
_Z_IMAGE = {"axes_dims": [8, 12, 12], "axes_lens": [32, 32, 32], "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd3": (
        "SD3",
        {"in_channels": 16, "patch_size": 2, "depth": 2, "num_blocks": 2, "adm_in_channels": 32, "qkv_bias": True}
        | {"pos_embed_scaling_factor": None, "input_size": None, "pos_embed_max_size": 32, "qk_norm": "rms"}
        | {"context_embedder_config": _SD3_TEXT},
    ),
    "flux": (
        "Flux",
        {"image_model": "flux", "guidance_embed": True, "in_channels": 16, "out_channels": 16, "vec_in_dim": 32}
        | {"mlp_ratio": 4.0, "axes_dim": [4, 14, 14], "theta": 10000, "qkv_bias": True, "txt_ids_dims": []}
        | _FLUX,
    ),
    "flux2": (
        "Flux2",
        {"image_model": "flux2", "guidance_embed": False, "in_channels": 128, "out_channels": 128, "vec_in_dim": None}
        | {"mlp_ratio": 3.0, "axes_dim": [8, 8, 8, 8], "theta": 2000, "qkv_bias": False, "txt_ids_dims": [3]}
        | {**_FLUX, "patch_size": 1, "global_modulation": True, "mlp_silu_act": True, "ops_bias": False},
    ),
    "qwen_image": (
        "QwenImage",
        {"image_model": "qwen_image", "in_channels": 16, "out_channels": 16, "patch_size": 2, "num_layers": 2}
        | {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 64}
        | {"axes_dims_rope": (8, 12, 12)},
    ),
    "z_image": (
        "ZImage",
        {"image_model": "lumina2", "in_channels": 16, "patch_size": 2, "dim": 64, "n_layers": 2, "n_refiner_layers": 2}
        | {"n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64, "z_image_modulation": True, "qk_norm": True}
        | {**_Z_IMAGE, "pad_tokens_multiple": 32, "time_scale": 1000.0},
    ),
    "wan": (
        "WAN21_T2V",
        {"image_model": "wan2.1", "model_type": "t2v", "dim": 64, "ffn_dim": 128, "num_heads": 2, "num_layers": 2}
        | {"patch_size": (1, 2, 2), "in_dim": 16, "out_dim": 16, "text_len": 512, "freq_dim": 256, "eps": 1e-6}
        | {"window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True},
    ),
}
for _plain, _edits in {"flux": ("flux_kontext",), "qwen_image": ("qwen_image_edit", "qwen_image_edit_plus")}.items():
    MODELS |= dict.fromkeys(_edits, MODELS[_plain])
"""Family -> ComfyUI's class and the config that it finds in a checkpoint, with as many blocks as `tests.families`."""


class _Unused(types.ModuleType):
    """Takes the place of a library that ComfyUI imports and does not need here."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


class _Finder:
    def find_spec(self, name: str, *_: Any) -> Any:
        is_unused = name.split(".")[0] in _UNUSED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_unused else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        return _Unused(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def unmatched(family: str, file: Path) -> list[str]:
    """Return the keys of a LoRA file that no layer of ComfyUI's model takes."""
    import comfy.lora
    import comfy.supported_models
    import torch
    from safetensors.torch import load_file

    kind, unet = MODELS[family]
    config = getattr(comfy.supported_models, kind)(dict(unet))
    config.unet_config = dict(unet)
    with torch.device("meta"):
        model = config.get_model({}, device=torch.device("meta"))
    tensors = load_file(file)
    layers = comfy.lora.model_lora_keys_unet(model, {})
    patches = comfy.lora.load_lora(tensors, layers, log_missing=False)
    weights = model.state_dict()
    taken = {key for target, patch in patches.items() if _weight(target) in weights for key in patch.loaded_keys}
    return sorted(tensors.keys() - taken)


def _weight(target: Any) -> str:
    """Return the weight that a patch changes, all of it or some rows."""
    return target if isinstance(target, str) else target[0]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.argv = [sys.argv[0], "--cpu"]
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    import comfy.options

    comfy.options.enable_args_parsing()
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    print(json.dumps({family: unmatched(family, Path(file)) for family, file in pairs}))
