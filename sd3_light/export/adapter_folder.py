"""Adapter exports: a folder with one adapter file, its card and its proof.

The proof: loaded on its base by a clean process, the file computes what the weights in memory do.
"""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from sd3_light import __version__
from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.core.files import AdapterNames, Padding
from sd3_light.core.registry import single_files
from sd3_light.export import proof_process
from sd3_light.export.card import adapter_card
from sd3_light.export.export_spec import AdapterSpec, ExportError, write_json, write_texts
from sd3_light.export.licence import licence_file
from sd3_light.export.lora_file import LoraLayout, read_lora, write_lora
from sd3_light.export.lycoris_file import read_lycoris, write_lycoris
from sd3_light.export.proof import compare_outputs, require_finite, run_clean_process
from sd3_light.files import file_sha256, new_folder
from sd3_light.model.adapter_layers import AdapterModules, LycorisModule, lycoris_modules
from sd3_light.model.folder import weight_files
from sd3_light.model.loading import stand_in_model
from sd3_light.model.lora_layers import LoraModule, from_peft
from sd3_light.model.part_configs import WEIGHTS_STEM
from sd3_light.tensor_file import DTYPES, open_tensors


def write_adapter(out: Path, state: Mapping[str, Tensor], spec: AdapterSpec) -> Path:
    """Write and verify the folder ``out``, then rename it into place; an existing one is replaced.

    ``out`` appears only after a clean process has loaded the file and the base model computed with it what it computes
    with the weights in memory.
    """
    not_finite = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if not_finite:
        raise ExportError(f"nothing was saved: {not_finite[0]} contains NaN or infinity")
    modules = adapter_modules(state, spec.adapter)
    adapter = {"base": spec.base_name, "adapter": adapter_facts(spec.adapter)}
    facts = {"sd3_light": __version__, "text": dict(spec.text), **spec.facts, **adapter}
    facts |= {} if spec.own_shift is None else {"shift": spec.own_shift}
    try:
        with new_folder(out, replace=True) as temporary:
            file = temporary / spec.file
            written_facts = {**spec.facts, **adapter}
            names = spec.family.files.adapters
            write_adapter_file(file, modules, spec.adapter, spec.save_dtype, written_facts, names, spec.padding)
            write_json(temporary / "proof.json", prove_adapter(file, modules, spec))
            write_texts(
                temporary, spec, facts, licence_file(spec.base_folder) | {"README.md": adapter_card(spec, facts)}
            )
    except UserError as error:  # the file cannot represent these weights
        raise ExportError(str(error)) from error
    return out


def adapter_facts(adapter: AdapterConfig) -> dict[str, Any]:
    """Return the adapter's settings for a file's metadata, as JSON without paths of the training machine."""
    keys = ("type", "rank", "alpha", "use_rslora", "use_dora", "target_modules", "base_bits")
    return {key: adapter.model_dump(mode="json")[key] for key in keys}


def adapter_modules(state: Mapping[str, Tensor], config: AdapterConfig) -> AdapterModules:
    """Return the layer updates of an adapter from its weights, named as in the model."""
    if config.type == "lora":
        return from_peft(state, config.alpha, config.use_rslora)
    return lycoris_modules(state, config.rank, config.alpha)


def write_adapter_file(
    path: Path,
    modules: Any,
    adapter: AdapterConfig,
    save_dtype: torch.dtype,
    facts: Mapping[str, Any],
    names: AdapterNames,
    padding: Padding | None = None,
) -> Path:
    """Write an adapter's modules, by diffusers' layer names, to a new file. ``names`` are those of the model's family.

    A LoRA is for the folder. A LoKr or LoHa, which only readers of single files use, is for the file that is padded
    by ``padding``.
    """
    options: dict[str, Any] = {"save_dtype": save_dtype, "facts": facts, "names": names}
    if adapter.type == "lora":
        layout: LoraLayout = "peft" if adapter.use_dora else "diffusers"
        return write_lora(path, modules, layout=layout, **options)
    return write_lycoris(path, modules, padding=padding, **options)


def read_adapter(path: Path, kind: str, names: AdapterNames | None = None) -> AdapterModules:
    """Read the adapter of this type in a file, or in a folder that contains one."""
    return (read_lora if kind == "lora" else read_lycoris)(path, names=names).modules


TOLERANCE = 1e-4
"""Relative to the largest output: one side adds the update to the weights, the other computes it separately."""


def prove_adapter(file: Path, modules: AdapterModules, spec: AdapterSpec) -> dict[str, Any]:
    """Reload the file in a clean process; compare the denoiser's output with that of ``modules`` on the same base.

    Returns the record that is written to the export, including how much the adapter changes the output.
    """
    start = time.perf_counter()
    kind = spec.adapter.type
    inputs = spec.family.files.denoiser_inputs(spec.transformer_config, spec.encoders or spec.base_folder)
    # next to the file: a single file's denoiser is written there as a folder, which may not fit into /tmp
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        folder = _as_folder(spec, Path(work))
        dtype = _main_dtype(folder)
        classes = {"denoiser": spec.family.denoiser, "pipeline": spec.family.pipeline}
        request: dict[str, Any] = {
            "adapter": kind,
            "base": str(folder),
            "base_dtype": dtype,
            "padding": spec.padding,
            **classes,
        }
        request["stems"] = {spec.family.files.adapters.lycoris_stem(layer): layer for layer in modules}
        _, reloaded = run_clean_process(file, Path(work), request, inputs)
        updates = {name: _rounded(module, spec.save_dtype).applied for name, module in modules.items()}
        # one layer at a time is in memory, whatever the size of the base
        denoiser, read = stand_in_model(getattr(diffusers, spec.family.denoiser), folder, getattr(torch, dtype))
        expected = proof_process.denoise(denoiser, inputs, updates, read)  # without using the file's reader
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
    """Return the dtype of most weights in a folder, in which both sides have them: a mapped file is not copied."""
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
