"""Metadata that other programs show: Stability's ModelSpec for all files, and kohya's ``ss_`` keys for adapters.

Nothing depends on the file's name or the time, so that equal models give equal bytes; ``modelspec.date`` is left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sd3_light.families.sd3.start import HEAD_WIDTH

_LARGE_HEADS = 38
_KINDS = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa"}
_PROGRESS = {"weights": "weights", "step": "optimizer steps", "samples": "samples seen"}


def model_metadata(config: Mapping[str, Any], pixels: int, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a single file: a denoiser config, the image side in pixels, and the export's facts."""
    architecture = _architecture(config["num_attention_heads"], bool(config.get("dual_attention_layers")))
    title = f"SD3 model of {config['num_layers']} blocks and {config['num_attention_heads']} heads"
    return _model_spec(architecture, "sgm", title, facts) | {"modelspec.resolution": f"{pixels}x{pixels}"}


def adapter_metadata(modules: Mapping[str, Any], layout: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a LoRA, LoKr or LoHa file from its updates by diffusers' layer names.

    The scale is multiplied into the weights, so the alpha that readers divide by the rank is the rank.
    """
    widths = [module.shape[0] for name, module in modules.items() if name.endswith((".attn.to_q", ".attn.to_out.0"))]
    heads = max(widths, default=0) // HEAD_WIDTH
    architecture = f"{_architecture(heads, any('.attn2.' in name for name in modules))}/lora"
    adapter = facts.get("adapter")
    kind = _KINDS.get(str(adapter.get("type")), "LoRA") if isinstance(adapter, dict) else "LoRA"
    title = f"{kind} for {facts.get('base', 'SD3')}"
    rank = _rank(module.rank for module in modules.values())
    kohya = {
        "ss_network_dim": rank,
        "ss_network_alpha": rank,
        "ss_base_model_version": "sd3",
        "ss_output_name": title,
    }
    optional = {"ss_steps": facts.get("step"), "ss_sd_model_name": facts.get("base")}
    kohya |= {key: str(value) for key, value in optional.items() if value is not None}
    return _model_spec(architecture, "sgm" if layout == "kohya" else "diffusers", title, facts) | kohya


def _architecture(heads: int, dual: bool) -> str:
    """Return the name of the released model with the same kind of layers, by which programs choose their code."""
    if dual:
        return "stable-diffusion-v3.5-medium"
    return "stable-diffusion-v3.5-large" if heads == _LARGE_HEADS else "stable-diffusion-v3-medium"


def _rank(ranks: Iterable[int | None]) -> str:
    different = {rank for rank in ranks if rank is not None}
    return str(different.pop()) if len(different) == 1 else "Dynamic"  # kohya's word


def _model_spec(architecture: str, implementation: str, title: str, facts: Mapping[str, Any]) -> dict[str, str]:
    progress = [f"{name} {facts[key]}" for key, name in _PROGRESS.items() if key in facts]
    description = ", ".join(["Trained with SD3-Light", *progress]) if progress else "Written by SD3-Light"
    spec = {
        "sai_model_spec": "1.0.0",
        "architecture": architecture,
        "implementation": implementation,
        "title": title,
        "description": description,
    }
    return {f"modelspec.{key}": value for key, value in spec.items()}
