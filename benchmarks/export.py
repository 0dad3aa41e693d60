"""Time and host memory of saving a full-size model: export, single file and back, LoRA.

    python benchmarks/export.py [--size sd3_light] [--tmp FOLDER] [--out FILE.json]

Writes a run with a checkpoint of random weights and one EMA, and frozen parts with a VAE of SD3's size (the demo's
tokenizers and text encoders replace those of SD3: an export links them and its verification does not load them). Then
runs the commands, each in its own process, and prints the seconds, the bytes written and the peak host memory of the
process and its children, without mapped files.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from command_peaks import run_command
from diffusers import AutoencoderKL

from sd3_light.assets import DEMO
from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.store import commit, reset_folder, temporary_folder, write_part
from sd3_light.config import SIZES, ModelSize
from sd3_light.engines.protocol import TensorPiece
from sd3_light.export.model_facts import ModelFacts
from sd3_light.families.sd3.random_weights import new_transformer

GIB = 1 << 30
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


@dataclass(frozen=True)
class CommandCost:
    """Time, output size and peak memory of one command."""

    command: str
    seconds: float
    gigabytes: float
    peak_gib: float


def prepare_folder(folder: Path, size: ModelSize) -> None:
    """Write the frozen parts of a model and a run with one checkpoint."""
    model, run = folder / "model", folder / "run"
    shutil.copytree(DEMO, model, ignore=shutil.ignore_patterns("transformer", "vae", "README.md"))
    AutoencoderKL(**VAE).to(torch.bfloat16).save_pretrained(model / "vae")
    (folder / "images").mkdir()
    (folder / "data.toml").write_text('resolutions = [256]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    run.mkdir()
    (run / "config.toml").write_text(
        f"""
output_dir = "{run}"
dataset = "{folder / "data.toml"}"
max_steps = 10
save_every_n_steps = 10
[model]
train_type = "sd3_light_pretrain"
diffusers_path = "{model}"
size = "{size.name}"
t5_max_length = 16
uncond_text = "empty"
[ema]
enable = true
""",
        encoding="utf-8",
    )
    weights = {name: p.detach() for name, p in new_transformer(size.transformer_config(), 1).named_parameters()}
    generator = torch.Generator().manual_seed(2)
    for weight in weights.values():  # avoid zeros and equal values
        weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    pieces = [
        TensorPiece(f"{kind}/{name}", weight.detach().reshape(-1), 0, tuple(weight.shape))
        for kind in ("param", "ema")
        for name, weight in weights.items()
    ]
    temporary = temporary_folder(run / "checkpoints", 10)
    reset_folder(temporary)
    write_part(temporary, 0, pieces)
    facts = {"progress": Progress(step=10, samples=640).as_dict(), "model": ModelFacts(trained_at=(256, 256)).as_dict()}
    commit(run / "checkpoints", 10, [0], facts)


def measure(command: Sequence[object], out: Path) -> CommandCost:
    """Run ``sd3-light command`` and return what it cost."""
    words = [str(argument) for argument in command]
    output = out.with_suffix(".txt")
    ran = run_command(words, output, 3600)
    if ran.exit_code:
        raise SystemExit(f"{' '.join(words)} failed: {output.read_text(encoding='utf-8')}")
    sizes = [path.stat() for path in ([out] if out.is_file() else out.rglob("*")) if path.is_file()]
    written = sum(status.st_size for status in sizes if status.st_nlink == 1)  # hard links take no space
    return CommandCost(" ".join(Path(word).name or word for word in words), ran.seconds, written / 1e9, ran.host / GIB)


def commands(folder: Path) -> Iterator[tuple[list[object], Path]]:
    """Yield each command with its output path."""
    run, export, file, back = folder / "run", folder / "export", folder / "m.safetensors", folder / "back"
    raw, lora, merged = folder / "raw", folder / "lora.safetensors", folder / "merged"
    yield ["export", run, export], export
    yield ["convert", export, file], file
    yield ["convert", file, back, "--base", folder / "model"], back
    if torch.cuda.is_available():  # decomposing wide matrices takes minutes on a CPU
        write_changed_copy(export, raw)
        yield ["lora", "extract", export, raw, lora, "--rank", "32"], lora
        yield ["lora", "merge", export, merged, lora], merged


def write_changed_copy(export: Path, other: Path) -> None:
    """Copy a model and add low-rank updates to some layers, as fine-tuning would."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(export, other, copy_function=os.link)
    path = other / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    for name in (name for name in tensors if name.endswith("attn.to_q.weight")):
        rows, columns = tensors[name].shape
        update = torch.randn(rows, 8) @ torch.randn(8, columns)
        tensors[name] = (tensors[name].float() + 0.01 * update).to(tensors[name].dtype)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="sd3_light")
    parser.add_argument("--tmp", type=Path, help="working folder; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=args.tmp) as name:
        folder = Path(name)
        prepare_folder(folder, SIZES[args.size])
        for command, out in commands(folder):
            results.append(measure(command, out))
            cost = results[-1]
            print(
                f"{cost.seconds:7.1f} s  {cost.gigabytes:6.2f} GB  {cost.peak_gib:6.2f} GiB  {cost.command}", flush=True
            )
        proof = json.loads((folder / "export" / "proof.json").read_text(encoding="utf-8"))
        print({key: value for key, value in proof.items() if not isinstance(value, dict | list)})
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(cost) for cost in results], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
