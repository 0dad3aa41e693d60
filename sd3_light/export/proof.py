"""The proof of an export: stock diffusers in a clean process computes what the weights in memory compute."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.encoding.vae import load_vae
from sd3_light.export import proof_process
from sd3_light.export.export_spec import ExportSpec
from sd3_light.model.folder import components, is_encoder, pipeline_settings

_LIBRARIES = ("diffusers", "transformers", "torch", "safetensors")
_IMAGE_TOLERANCE = 1 / 255
PIPELINE_FILE = "pipeline.py"
"""The custom pipeline in a folder, where diffusers looks for it (``custom_pipeline="pipeline"``)."""


class ProofError(Exception):
    """The written export differs from the model in memory; it is not published."""


@dataclass(frozen=True)
class Expected:
    """What a clean process must find: computed from the weights in memory, which are not needed any more."""

    inputs: dict[str, Any]
    outputs: dict[str, Tensor]
    digests: dict[str, str]
    started: float


def expectation(folder: Path, spec: ExportSpec, weights: Mapping[str, Tensor]) -> Expected:
    """Return the hashes of weights in memory, already cast to the saved dtype, the denoiser's output and an image."""
    started = time.perf_counter()
    files = spec.family.files
    config = spec.transformer_config
    missing = files.missing(folder, denoiser=True)
    if missing:
        raise ProofError(f"{folder} lacks {', '.join(missing[:5])}")
    inputs = {
        "denoiser": files.denoiser_inputs(config, folder),
        "pipeline": files.pipeline_inputs(folder, config, spec.text),
    }
    outputs = _in_memory(spec, weights, inputs)
    require_finite("the exported denoiser", outputs["output"])
    require_finite(f"the VAE of {spec.base}", outputs["image"])
    return Expected(inputs, outputs, proof_process.digests(dict(weights)), started)


def prove(folder: Path, spec: ExportSpec, expected: Expected) -> dict[str, Any]:
    """Reload a folder in a clean process; compare its weights bit for bit, the denoiser's output and a sampled image.

    The text encoders are not loaded: their files are those of the base and only have to exist. Returns the record that
    is written to the export.
    """
    custom = (folder / PIPELINE_FILE).is_file()
    absent = [name for name, kind in components(folder).items() if is_encoder(*kind)]
    request = {"dtype": str(spec.save_dtype).removeprefix("torch."), "custom": custom, "absent": absent}
    with tempfile.TemporaryDirectory() as work:
        report, reloaded = run_clean_process(folder, Path(work), request, expected.inputs)
    _compare_config(report["config"], spec.transformer_config)
    _compare_weights(report["weights"], expected.digests)
    output = expected.outputs["output"]
    image = expected.outputs["image"]
    return {
        **{name: version(name) for name in _LIBRARIES},
        "pipeline": f"{PIPELINE_FILE} of this folder" if custom else report["class"],
        "tensors": len(expected.digests),
        "max_difference": compare_outputs("the reloaded model's output", reloaded["output"], output, 1e-5),
        "picture_max_difference": compare_outputs(
            "an image of the reloaded pipeline", reloaded["image"], image, _IMAGE_TOLERANCE
        ),
        "weights_sha256": combined_digest(expected.digests),
        "output_sha256": _sha256(reloaded["output"]),
        "picture_sha256": _sha256(reloaded["image"]),
        "seconds": round(time.perf_counter() - expected.started, 2),
    }


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return one hash over names, dtypes, shapes and bytes of all tensors; see `proof_process.digests`."""
    lines = sorted(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def run_clean_process(
    path: Path, work: Path, request: Mapping[str, Any], inputs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run `proof_process` on a folder or adapter file; return its report and its outputs. ``work`` holds the files."""
    tensors: dict[str, Tensor] = {}
    more = {"threads": torch.get_num_threads(), "inputs": proof_process.packed(inputs, tensors)}
    (work / "request.json").write_text(json.dumps({**request, **more}), encoding="utf-8")
    save_file(tensors, work / "inputs.safetensors")
    command = [sys.executable, "-P", proof_process.__file__, str(path), str(work)]
    # diffusers copies a folder's pipeline file to a module cache before running it: use another than the user's
    environment = {**os.environ, "HF_MODULES_CACHE": str(work / "modules")}
    # in its own process group, which Ctrl-C in a terminal does not reach
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, process_group=0)
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
        raise ProofError(f"the clean process that loads {path} was ended by {name}{hint}")
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"the process exited with code {result.returncode}"]
        raise ProofError(f"a clean process cannot load {path}: {lines[-1]}")
    report = json.loads((work / "report.json").read_text(encoding="utf-8"))
    return report, load_file(work / "outputs.safetensors")


def _in_memory(spec: ExportSpec, weights: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the same outputs from the weights in memory, the base's frozen parts and training's scheduler."""
    denoiser = spec.family.weights.from_state(spec.transformer_config, weights)
    output = proof_process.denoise(denoiser, inputs["denoiser"])
    vae = load_vae(spec.base, torch.device("cpu"), torch.float32)
    parts = {"transformer": denoiser, "scheduler": spec.make_scheduler(), "vae": vae}
    pipe = proof_process.make_pipeline(spec.family.pipeline, **parts, **_settings(spec))
    return {"output": output, "image": spec.family.files.reference_image(pipe, inputs["pipeline"])}


def _settings(spec: ExportSpec) -> dict[str, Any]:
    """Return the arguments of the stock pipeline besides its parts, without those of a custom one."""
    settings = pipeline_settings(spec.base)
    return {name: value for name, value in settings.items() if name not in spec.family.files.pipeline_settings}


def _compare_config(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in json.loads(json.dumps(dict(expected))).items():  # tuples become lists
        if actual.get(key) != value:
            raise ProofError(f"transformer/config.json says {key} = {actual.get(key)}, not {value}")


def _compare_weights(actual: Mapping[str, str], expected: Mapping[str, str]) -> None:
    if set(actual) != set(expected):
        raise ProofError(f"reloaded weights differ in {sorted(set(actual) ^ set(expected))[:5]}")
    changed = [name for name, digest in expected.items() if actual[name] != digest]
    if changed:
        raise ProofError(f"reloaded weights differ in value: {changed[:5]}")


def require_finite(part: str, output: Tensor) -> None:
    """Raise a ProofError if a part of the model computes NaN or infinity."""
    if not output.isfinite().all():
        raise ProofError(f"{part} returns NaN or infinity; check its weights")


def compare_outputs(subject: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """Return the largest difference; more than ``tolerance`` of the largest value is a ProofError."""
    if actual.shape != expected.shape:
        raise ProofError(f"{subject} has shape {list(actual.shape)}, not {list(expected.shape)}")
    difference = (actual - expected).abs().max().item()
    if not difference <= tolerance * max(1.0, expected.abs().max().item()):
        raise ProofError(f"{subject} differs by {difference}")
    return difference


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
