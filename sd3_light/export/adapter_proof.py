"""The proof of an adapter's file: put on its base by a clean process, it computes what the weights in memory do."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.config import AdapterConfig
from sd3_light.export import adapter_proof_process as reload
from sd3_light.export.lora_layouts import baked
from sd3_light.export.proof import ProofError, fixed_inputs
from sd3_light.export.single_file import transformer_from_single_file
from sd3_light.files import file_sha256
from sd3_light.model.adapter_layers import LycorisModule, add_adapter, load_lycoris
from sd3_light.model.lora_layers import LoraModule

_LARGE = 1_000_000_000
"""From so many parameters on the base is held in bf16 on both sides: what the file does is the same."""

TOLERANCE = 1e-4
"""Of the output's largest value: one side adds the update to the weights, the other computes it beside them."""

AdapterModules = Mapping[str, LoraModule] | Mapping[str, LycorisModule]


def prove_adapter(
    file: Path,
    modules: AdapterModules,
    adapter: AdapterConfig,
    base: Path,
    config: Mapping[str, Any],
    save_dtype: torch.dtype,
) -> dict[str, Any]:
    """Reload the file elsewhere and compare the denoiser's output with that of ``modules`` on the same base.

    ``config`` are the denoiser's constructor arguments. Returns the record that goes into the export, with how much the
    adapter changes the output at all.
    """
    began = time.perf_counter()
    inputs, dtype = fixed_inputs(config, real_text=False), "bfloat16" if _is_large(config) else "float32"
    # beside the file: a single file's denoiser is written there as a folder, which any temporary place may not hold
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        folder = str(_as_folder(base, Path(place)))
        wishes = {"base": folder, "base_dtype": dtype, "kind": adapter.type, "threads": torch.get_num_threads()}
        theirs = _elsewhere(file, Path(place), wishes, inputs)
        denoiser = reload.load_base(folder, getattr(torch, dtype))
    _put_on(denoiser, modules, adapter, save_dtype)
    ours = reload.output_of(denoiser, inputs)
    difference = (theirs["output"] - ours).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, ours.abs().max().item()):
        raise ProofError(f"the reloaded adapter's output differs by {difference}")
    return {
        **{name: version(name) for name in ("diffusers", "peft", "torch", "safetensors")},
        "loaded_by": "load_lora_weights of stock diffusers" if adapter.type == "lora" else "LyCORIS' formulas",
        "base": base.name,
        "layers": len(modules),
        "max_difference": difference,
        "change_of_output": (theirs["output"] - theirs["plain"]).abs().max().item(),
        "sha256": file_sha256(file),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _is_large(config: Mapping[str, Any]) -> bool:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return bool(36 * config["num_layers"] * width**2 > _LARGE)  # 24 squares of weights and 12 of modulation a block


def _as_folder(base: Path, place: Path) -> Path:
    """The denoiser's folder; that of a single file is written for the proof."""
    if base.is_dir():
        return base
    config, state = transformer_from_single_file(base)
    with torch.device("meta"):
        denoiser = SD3Transformer2DModel(**config)
    denoiser.load_state_dict(state, strict=True, assign=True)
    denoiser.save_pretrained(place / "base")
    return place / "base"


def _elsewhere(file: Path, place: Path, wishes: Mapping[str, Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    (place / "wishes.json").write_text(json.dumps(wishes), encoding="utf-8")
    save_file(inputs, place / "inputs.safetensors")
    command = [sys.executable, "-P", reload.__file__, str(file), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        raise ProofError(f"{file.name} does not load on {wishes['base']}: {said[-1]}")
    return load_file(place / "outputs.safetensors")


@torch.no_grad()
def _put_on(denoiser: Any, modules: AdapterModules, adapter: AdapterConfig, saved: torch.dtype) -> None:
    """Give the denoiser the update in memory, rounded as the file is, by another way than the file's reader."""
    lycoris = {}
    for name, module in modules.items():
        if isinstance(module, LycorisModule):
            rounded = {factor: tensor.to(saved) for factor, tensor in module.with_unit_scale().factors.items()}
            lycoris[name] = LycorisModule(rounded)
            continue
        weight = denoiser.get_submodule(name).weight
        rounded_lora = LoraModule(
            module.down.cpu().to(saved),
            baked(module).up.cpu().to(saved),
            1.0,
            None if module.magnitude is None else module.magnitude.cpu().to(saved),
        )
        weight.data = rounded_lora.applied(weight)
    if lycoris:
        add_adapter(denoiser, adapter.model_copy(update={"target_modules": tuple(lycoris), "dropout": 0.0}), seed=0)
        load_lycoris(denoiser, lycoris)
        denoiser.eval()
