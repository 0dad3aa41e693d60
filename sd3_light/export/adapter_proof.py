"""The proof of an adapter file: loaded on its base by a clean process, it computes what the weights in memory do."""

import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from sd3_light.export import proof_process
from sd3_light.export.export_spec import AdapterSpec
from sd3_light.export.lora_fusing import baked
from sd3_light.export.proof import compare_outputs, fixed_inputs, require_finite, run_clean_process
from sd3_light.export.single_file import transformer_from_single_file
from sd3_light.files import file_sha256
from sd3_light.model.adapter_layers import AdapterModules, LycorisModule
from sd3_light.model.loading import load_diffusers_model
from sd3_light.model.lora_layers import LoraModule
from sd3_light.model.random_weights import transformer_from_state

_LARGE = 1_000_000_000
"""From this many parameters on, both sides hold the base in bf16; the effect of the file is the same."""

TOLERANCE = 1e-4
"""Relative to the largest output: one side adds the update to the weights, the other computes it separately."""


def prove_adapter(file: Path, modules: AdapterModules, spec: AdapterSpec) -> dict[str, Any]:
    """Reload the file in a clean process; compare the denoiser's output with that of ``modules`` on the same base.

    Returns the record that is written to the export, including how much the adapter changes the output.
    """
    start, config, kind = time.perf_counter(), spec.transformer_config, spec.adapter.type
    inputs, width = fixed_inputs(config, real_text=False), config["num_attention_heads"] * config["attention_head_dim"]
    # parameters per block: 24 width**2 of weights, 12 of modulation
    dtype = "bfloat16" if 36 * config["num_layers"] * width**2 > _LARGE else "float32"
    # next to the file: a single file's denoiser is written there as a folder, which may not fit into /tmp
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        folder = str(_as_folder(spec.base, Path(work)))
        request = {"adapter": kind, "base": folder, "base_dtype": dtype, "padding": spec.padding}
        _, reloaded = run_clean_process(file, Path(work), request, inputs)
        denoiser = load_diffusers_model(SD3Transformer2DModel, Path(folder), getattr(torch, dtype))
    _apply(denoiser, modules, spec.save_dtype)
    expected = proof_process.denoise(denoiser, inputs)
    require_finite("the denoiser with the adapter", expected)
    difference = compare_outputs("the reloaded adapter's output", reloaded["output"], expected, TOLERANCE)
    return {
        **{name: version(name) for name in ("diffusers", "peft", "torch", "safetensors")},
        "loaded_by": "load_lora_weights of stock diffusers" if kind == "lora" else "LyCORIS' formulas",
        "base": spec.base.name,
        "layers": len(modules),
        "max_difference": difference,
        "change_of_output": (reloaded["output"] - reloaded["plain"]).abs().max().item(),
        "sha256": file_sha256(file),
        "seconds": round(time.perf_counter() - start, 2),
    }


def _as_folder(base: Path, work: Path) -> Path:
    """Return the denoiser's folder; that of a single file is written for the proof."""
    if base.is_dir():
        return base
    transformer_from_state(*transformer_from_single_file(base)).save_pretrained(work / "base")
    return work / "base"


@torch.no_grad()
def _apply(denoiser: nn.Module, modules: AdapterModules, dtype: torch.dtype) -> None:
    """Apply the update in memory, rounded as in the file, without using the file's reader."""
    for name, module in modules.items():
        weight: Any = denoiser.get_submodule(name).weight
        weight.data = _rounded(module, dtype).applied(weight)


def _rounded(module: LoraModule | LycorisModule, dtype: torch.dtype) -> LoraModule | LycorisModule:
    """Return a layer's update with the weights that the file contains."""
    if isinstance(module, LycorisModule):
        factors = module.with_unit_scale().factors
        return LycorisModule({name: factor.cpu().to(dtype) for name, factor in factors.items()})
    magnitude = None if module.magnitude is None else module.magnitude.cpu().to(dtype)
    return LoraModule(module.down.cpu().to(dtype), baked(module).up.cpu().to(dtype), 1.0, magnitude)
