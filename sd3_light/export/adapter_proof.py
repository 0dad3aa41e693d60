"""The proof of an adapter file: loaded on its base by a clean process, it computes what the weights in memory do."""

import math
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import torch

from sd3_light.core.registry import single_files
from sd3_light.export import proof_process
from sd3_light.export.export_spec import AdapterSpec
from sd3_light.export.proof import compare_outputs, require_finite, run_clean_process
from sd3_light.files import file_sha256
from sd3_light.model.adapter_layers import AdapterModules, LycorisModule
from sd3_light.model.folder import weight_files
from sd3_light.model.loading import load_diffusers_model
from sd3_light.model.lora_layers import LoraModule
from sd3_light.model.part_configs import WEIGHTS_STEM
from sd3_light.tensor_file import DTYPES, open_tensors

TOLERANCE = 1e-4
"""Relative to the largest output: one side adds the update to the weights, the other computes it separately."""


def prove_adapter(file: Path, modules: AdapterModules, spec: AdapterSpec) -> dict[str, Any]:
    """Reload the file in a clean process; compare the denoiser's output with that of ``modules`` on the same base.

    Returns the record that is written to the export, including how much the adapter changes the output.
    """
    start, kind = time.perf_counter(), spec.adapter.type
    inputs = spec.family.files.denoiser_inputs(spec.transformer_config, spec.encoders or spec.base_folder)
    # next to the file: a single file's denoiser is written there as a folder, which may not fit into /tmp
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        folder = _as_folder(spec, Path(work))
        dtype = _main_dtype(folder)
        classes = {"denoiser": spec.family.denoiser, "pipeline": spec.family.pipeline}
        request = {"adapter": kind, "base": str(folder), "base_dtype": dtype, "padding": spec.padding, **classes}
        _, reloaded = run_clean_process(file, Path(work), request, inputs)
        updates = {name: _rounded(module, spec.save_dtype).applied for name, module in modules.items()}
        denoiser = load_diffusers_model(getattr(diffusers, spec.family.denoiser), folder, getattr(torch, dtype))
        expected = proof_process.denoise(denoiser, inputs, updates)  # without using the file's reader
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


def _as_folder(spec: AdapterSpec, work: Path) -> Path:
    """Return the denoiser's folder; that of a single file is written for the proof."""
    if spec.base.is_dir():
        return spec.base
    return single_files(spec.family, spec.base).write_denoiser(spec.base, work / "base")


def _main_dtype(folder: Path) -> str:
    """Return the dtype of most weights in a folder, in which both sides hold them: they are mapped, not copied."""
    values: Counter[str] = Counter()
    for file in weight_files(folder, WEIGHTS_STEM):
        for tensor in open_tensors(file)[0].values():
            values[tensor.dtype] += math.prod(tensor.shape)
    main = max(values, key=lambda name: values[name], default="F32")
    return DTYPES[main].torch_name if main in ("BF16", "F16") else "float32"


def _rounded(module: LoraModule | LycorisModule, dtype: torch.dtype) -> LoraModule | LycorisModule:
    """Return a layer's update with the weights that the file contains."""
    if isinstance(module, LycorisModule):
        factors = module.with_unit_scale().factors
        return LycorisModule({name: factor.cpu().to(dtype) for name, factor in factors.items()})
    magnitude = None if module.magnitude is None else module.magnitude.cpu().to(dtype)
    return LoraModule(module.down.cpu().to(dtype), module.with_unit_scale().up.cpu().to(dtype), 1.0, magnitude)
