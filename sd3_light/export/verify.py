"""The proof: stock diffusers, in a clean process, loads the folder and computes what the weights in memory compute."""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

# Runs with nothing of ours imported, so that what it shows is true for any diffusers user.
_RELOAD = """
import signal
for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler's, to all processes: the trainer still wants the answer
    signal.signal(number, signal.SIG_IGN)
import sys, torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
folder, inputs, outputs = sys.argv[1:]
torch.set_num_threads(1)
pipe = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
with torch.no_grad():
    result = pipe.transformer(**load_file(inputs), return_dict=False)[0]
weights = {"w/" + name: tensor.contiguous() for name, tensor in pipe.transformer.state_dict().items()}
save_file({"output": result.contiguous(), **weights}, outputs)
"""


class ProofError(Exception):
    """The written folder is not the model in memory; it was not announced."""


def prove(folder: Path, transformer_config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Reload the folder elsewhere and compare names, weights and the output on fixed inputs, bit for bit.

    ``weights`` are those in memory, already cast to the saved type. Returns the record that goes into the export.
    """
    inputs = _fixed_inputs(transformer_config)
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, "inputs.safetensors"), Path(place, "outputs.safetensors")]
        save_file(inputs, files[0])
        command = [sys.executable, "-c", _RELOAD, str(folder), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
            raise ProofError(f"stock diffusers does not load {folder}: {said[-1]}")
        reloaded = load_file(files[1])
    output = reloaded.pop("output")
    difference = _compare(reloaded, weights, output, _run_in_memory(transformer_config, weights, inputs))
    return {
        "loaded_by": f"diffusers {version('diffusers')}, transformers {version('transformers')}",
        "torch": torch.__version__,
        "tensors": len(reloaded),
        "max_difference": difference,
        "output_sha256": hashlib.sha256(output.numpy().tobytes()).hexdigest(),
        "weights_sha256": weights_digest(weights),
    }


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """One hash over names, types and bytes of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _fixed_inputs(config: Mapping[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    side = min(config["sample_size"], 16)
    return {
        "hidden_states": torch.randn(1, config["in_channels"], side, side, generator=generator),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(1, config["pooled_projection_dim"], generator=generator),
    }


@torch.no_grad()
def _run_in_memory(config: Mapping[str, Any], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.device("meta"):
        denoiser = SD3Transformer2DModel(**config)
    denoiser.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True, assign=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other process: the order of additions depends on it
    try:
        output: Tensor = denoiser(**inputs, return_dict=False)[0]
    finally:
        torch.set_num_threads(threads)
    return output


def _compare(reloaded: Mapping[str, Tensor], weights: Mapping[str, Tensor], output: Tensor, expected: Tensor) -> float:
    names = {name.removeprefix("w/") for name in reloaded}
    if names != set(weights):
        raise ProofError(f"reloaded weights differ in {sorted(names ^ set(weights))[:5]}")
    changed = [name for name, tensor in weights.items() if not torch.equal(tensor.float(), reloaded[f"w/{name}"])]
    if changed:
        raise ProofError(f"reloaded weights differ in value: {changed[:5]}")
    difference = (output - expected).abs().max().item()
    if not difference <= 1e-5 * max(1.0, expected.abs().max().item()):
        raise ProofError(f"the reloaded model's output differs by {difference}")
    return difference
