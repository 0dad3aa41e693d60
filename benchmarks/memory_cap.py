"""Steps of a LoRA on a Flux.1 denoiser with random weights, on a GPU that may use only some of its memory.

    python benchmarks/memory_cap.py [--gib 24 ...] [--swap 0 19 38 all] [--bits 16 8] [--checkpointing true]
        [--compile] [--side 1024] [--batch 1] [--steps 8] [--toy]

Runs every combination of `--gib`, `--swap` and `--bits` in its own process, and prints a table: seconds per step
(the median, without the first two), the peak of allocated and of reserved GPU memory, the bytes of blocks in host
memory (pinned), the peak of the process's resident memory, and the last loss. Runs with equal bits have equal losses,
however many blocks are swapped. `--gib` is enforced by `torch.cuda.set_per_process_memory_fraction`; the CUDA context
is not part of it. `--toy` takes a tiny denoiser, on a CPU too. `PYTHONPATH` must name the root of the repository.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.compiling import compile_blocks
from sd3_light.core.registry import family_named
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.trainable import load_what_trains
from sd3_light.families.stock.weights import StockWeights
from sd3_light.model.block_swap import BlockSwap

GIB = 1 << 30
TEXT_TOKENS = 512
TOY = {"num_layers": 3, "num_single_layers": 4, "attention_head_dim": 16, "num_attention_heads": 2}
TOY |= {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}
FLUX = {"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24}
FLUX |= {"joint_attention_dim": 4096, "pooled_projection_dim": 768, "axes_dims_rope": [16, 56, 56]}
COLUMNS = ("gib", "bits", "swap", "seconds", "allocated_gib", "reserved_gib", "pinned_gib", "rss_gib", "loss", "failed")


@dataclass(frozen=True)
class RandomWeight:
    """A weight that is drawn when it is read, from its name."""

    name: str
    shape: tuple[int, ...]
    device: torch.device

    def load(self) -> Tensor:
        """Draw it."""
        if len(self.shape) == 1:
            return torch.full(self.shape, float(self.name.endswith("weight")), dtype=torch.bfloat16)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(self.name.encode()))
        drawn = torch.randn(self.shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        return (drawn / self.shape[1] ** 0.5).cpu()


def make_config(folder: Path, options: argparse.Namespace) -> TrainConfig:
    """Write the config of the denoiser, and return that of a run."""
    (folder / "transformer").mkdir()
    shape = TOY if options.toy else FLUX
    config = {"_class_name": "FluxTransformer2DModel", "in_channels": 64, "guidance_embeds": True, **shape}
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    adapter = {"rank": 16, "target_modules": list(family_named("flux").adapter_targets), "base_bits": options.bits[0]}
    swap = options.swap[0]
    keys = {
        "output_dir": "out",
        "dataset": "data.toml",
        "max_steps": options.steps,
        "activation_checkpointing": options.checkpointing == "true",
        "swap_blocks": swap if swap == "all" else int(swap),
        "compile": options.compile,
        "model": {"type": "flux", "diffusers_path": str(folder), "dtype": "bfloat16"},
        "adapter": adapter,
    }
    return TrainConfig.model_validate(keys, context={"base": folder})


def make_engine(config: TrainConfig, device: torch.device) -> TorchEngine:
    """Return the engine of a run with random weights."""
    family = family_named("flux")
    stock_unread = StockWeights.unread

    def unread(weights: StockWeights, start: Any) -> Any:
        denoiser = weights.empty(start.size.transformer_config())
        state = denoiser.state_dict()
        return denoiser, {name: RandomWeight(name, tuple(value.shape), device) for name, value in state.items()}

    StockWeights.unread = unread  # type: ignore[assignment, method-assign]
    denoiser = load_what_trains(config, family.weights.start(config.model), device)
    StockWeights.unread = stock_unread  # type: ignore[method-assign]
    module = family.training.model(denoiser, config, fast=False)
    if config.compile:
        compile_blocks(denoiser)
    return TorchEngine(module, config, Launch(), device)


def make_batch(options: argparse.Namespace) -> Batch:
    """Return a micro-batch of random values."""
    generator = torch.Generator().manual_seed(0)
    side = 8 if options.toy else options.side // 8
    shape = TOY if options.toy else FLUX

    def draw(*sizes: int) -> Tensor:
        return torch.randn(options.batch, *sizes, generator=generator)

    values = {"noisy": draw(16, side, side), "target": draw(16, side, side)}
    values["t"] = torch.rand(options.batch, generator=generator)
    values["text"] = draw(8 if options.toy else TEXT_TOKENS, shape["joint_attention_dim"]).bfloat16()
    values["pooled"] = draw(shape["pooled_projection_dim"]).bfloat16()
    return Batch(options.batch, values)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps in this process."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gib[0] * GIB / total), device)
    swaps: list[BlockSwap] = []
    start = BlockSwap.start
    BlockSwap.start = lambda swap: (start(swap), swaps.append(swap))  # type: ignore[assignment, method-assign]
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(make_config(Path(folder), options), device)
    batch = make_batch(options)
    seconds = []
    loss = 0.0
    for _ in range(options.steps):
        begin = time.perf_counter()
        loss = engine.train_step([batch], 1e-4).read().losses["loss"]  # waits for the device
        seconds.append(time.perf_counter() - begin)
    facts = {"seconds": round(statistics.median(seconds[2:]), 4), "loss": loss}
    if device.type == "cuda":
        facts["allocated_gib"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)
        facts["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / GIB, 2)
    facts["pinned_gib"] = round(sum(swap.host_bytes for swap in swaps) / GIB, 2)
    facts["rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2)
    return facts


def main() -> None:
    """Measure each case in its own process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[24.0])
    parser.add_argument("--swap", nargs="+", default=["0", "19", "38", "all"])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--checkpointing", choices=["true", "false"], default="true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    print(" | ".join(COLUMNS), flush=True)
    for gib, bits, swap in itertools.product(options.gib, options.bits, options.swap):
        case = ["--gib", str(gib), "--bits", str(bits), "--swap", swap, "--one"]
        run = subprocess.run([sys.executable, "-P", __file__, *sys.argv[1:], *case], capture_output=True, text=True)
        lines = run.stdout.splitlines() if run.returncode == 0 else []
        facts = {"gib": gib, "bits": bits, "swap": swap}
        facts |= json.loads(lines[-1]) if lines else {"failed": run.stderr.strip().splitlines()[-1][:200]}
        print(" | ".join(str(facts.get(name, "")) for name in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
