"""The proof: stock diffusers, in a clean process, loads the folder and computes what the weights in memory compute."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.encoders.vae import load_vae
from sd3_light.export import proof_process as reload
from sd3_light.export.export_spec import ExportSpec
from sd3_light.model.masked_attention import real_text_mask, use_masked_attention
from sd3_light.model.pipeline_folder import missing_parts
from sd3_light.sampling.scheduler import flow_scheduler

_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
_LIBRARIES = ("diffusers", "transformers", "torch", "safetensors")
_PICTURE_TOLERANCE = 1 / 255
_MOST_SIDE = 16  # latent pixels of the denoiser's input; the picture has half of it


class ProofError(Exception):
    """The written folder is not the model in memory; it was not announced."""


def prove(folder: Path, spec: ExportSpec, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Reload the folder elsewhere; compare its weights bit for bit, the denoiser's output and a sampled picture.

    ``weights`` are those in memory, already cast to the saved type. The text encoders are not loaded: their files are
    the base's own, only looked for. Returns the record that goes into the export.
    """
    began = time.perf_counter()
    missing = missing_parts(folder, transformer=True)
    if missing:
        raise ProofError(f"{folder} lacks {', '.join(missing[:5])}")
    inputs = fixed_inputs(spec.transformer_config, spec.real_text)
    found, theirs = _elsewhere(folder, spec, inputs)
    ours = _in_memory(spec, weights, inputs)
    _compare_config(found["config"], spec.transformer_config)
    digests = reload.digests(dict(weights))
    _compare_weights(found["weights"], digests)
    return {
        **{name: version(name) for name in _LIBRARIES},
        "pipeline": "pipeline.py of this folder" if spec.real_text else "StableDiffusion3Pipeline",
        "tensors": len(weights),
        "max_difference": _difference("the reloaded model's output", theirs["output"], ours["output"], 1e-5),
        "picture_max_difference": _difference(
            "a picture of the reloaded pipeline", theirs["picture"], ours["picture"], _PICTURE_TOLERANCE
        ),
        "weights_sha256": _joined(digests),
        "output_sha256": _sha256(theirs["output"]),
        "picture_sha256": _sha256(theirs["picture"]),
        "seconds": round(time.perf_counter() - began, 2),
    }


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """One hash over names, types, shapes and bytes of all tensors."""
    return _joined(reload.digests(dict(weights)))


def _joined(digests: Mapping[str, str]) -> str:
    lines = sorted(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fixed_inputs(config: Mapping[str, Any], real_text: bool) -> dict[str, Tensor]:
    """What both sides compute with: a latent, texts and their lengths (with real text they differ)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    side = min(config["sample_size"], _MOST_SIDE)
    text, pooled = (1, 8, config["joint_attention_dim"]), (1, config["pooled_projection_dim"])
    return {
        "hidden_states": normal(1, config["in_channels"], side, side),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": normal(*text),
        "pooled_projections": normal(*pooled),
        "negative_hidden_states": normal(*text),
        "negative_projections": normal(*pooled),
        "side": torch.tensor(max(2, side // 2)),
        "text_lengths": torch.tensor([3, 8] if real_text else [8, 8]),
    }


def _elsewhere(
    folder: Path, spec: ExportSpec, inputs: dict[str, Tensor]
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """What a clean process finds in the folder, and what it computes with it."""
    wishes = {
        "dtype": str(spec.save_dtype).removeprefix("torch."),
        "real_text": spec.real_text,
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory() as place:
        Path(place, "wishes.json").write_text(json.dumps(wishes), encoding="utf-8")
        save_file(inputs, Path(place, "inputs.safetensors"))
        command = [sys.executable, "-P", reload.__file__, str(folder), place]
        # diffusers copies a folder's pipeline file to a place for modules before it runs it: not to the user's
        environment = {**os.environ, "HF_MODULES_CACHE": str(Path(place, "modules"))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
            raise ProofError(f"stock diffusers does not load {folder}: {said[-1]}")
        found = json.loads(Path(place, "found.json").read_text(encoding="utf-8"))
        return found, load_file(Path(place, "outputs.safetensors"))


def _in_memory(spec: ExportSpec, weights: Mapping[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the weights in memory, with frozen parts of the base and the scheduler that training asks for."""
    with torch.device("meta"):
        denoiser = SD3Transformer2DModel(**spec.transformer_config)
    denoiser.load_state_dict(dict(weights), strict=True, assign=True)
    denoiser.eval()
    reload.compute_in_float32(denoiser)
    pipe = StableDiffusion3Pipeline(
        transformer=denoiser,
        scheduler=flow_scheduler(spec.shift, spec.flux_shift),
        vae=load_vae(spec.base, torch.device("cpu"), torch.float32),
        **dict.fromkeys((*reload.TEXT_ENCODERS, *_TOKENIZERS)),
    )
    output = reload.denoise(denoiser, inputs)
    if not spec.real_text:
        return {"output": output, "picture": reload.draw(pipe, inputs, None)}
    num_image = (int(inputs["side"]) // spec.transformer_config["patch_size"]) ** 2
    mask = real_text_mask(inputs["text_lengths"], inputs["encoder_hidden_states"].shape[1], num_image)
    with use_masked_attention(denoiser):
        return {"output": output, "picture": reload.draw(pipe, inputs, {"attention_mask": mask})}


def _compare_config(found: Mapping[str, Any], promised: Mapping[str, Any]) -> None:
    for key, value in promised.items():
        if _plain(found.get(key)) != _plain(value):
            raise ProofError(f"transformer/config.json says {key} = {found.get(key)}, not {value}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _compare_weights(found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    if set(found) != set(wanted):
        raise ProofError(f"reloaded weights differ in {sorted(set(found) ^ set(wanted))[:5]}")
    changed = [name for name, digest in wanted.items() if found[name] != digest]
    if changed:
        raise ProofError(f"reloaded weights differ in value: {changed[:5]}")


def _difference(what: str, found: Tensor, wanted: Tensor, tolerance: float) -> float:
    if found.shape != wanted.shape:
        raise ProofError(f"{what} has shape {list(found.shape)}, not {list(wanted.shape)}")
    difference = (found - wanted).abs().max().item()
    if not difference <= tolerance * max(1.0, wanted.abs().max().item()):
        raise ProofError(f"{what} differs by {difference}")
    return difference


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
