"""Steps of a denoiser of published shape with random weights, on a GPU that may use only some of its memory.

    python benchmarks/memory_cap.py [--gib 24 ...] [--swap 0 19 38 all] [--bits 16 8] [--checkpointing true]
        [--compile] [--side 1024] [--batch 1] [--steps 8] [--toy]
    python benchmarks/memory_cap.py --all-weights [--families sd3 flux2 qwen_image] [--depth full] [--gib 23]
        [--swap 0 all] [--optimizer adamw8bit] [--weights bfloat16 float32] ...

Trains a LoRA on Flux.1, or with `--all-weights` all weights of each family, with released gradients. Runs every
combination of `--families`, `--gib`, `--swap` and `--bits` or `--weights` in its own process, and prints a table:
seconds per step (the median, without the first two), the peak of allocated and of reserved GPU memory, the bytes of
blocks in host memory (pinned, with their optimizer state), the peak of the process's resident memory, and the last
loss. `--out` keeps every row as a line of JSON as soon as it is known. Runs that differ in the number of swapped blocks
alone have equal losses, as far as the kernels of attention repeat theirs. `--gib` is enforced by
`torch.cuda.set_per_process_memory_fraction`; the CUDA context is not part of it. `--depth 20` takes 20 blocks of each
kind, `third` a third of them. `--toy` takes tiny denoisers, on a CPU too. A row of SD3 needs about a minute, one of
Flux.1 two.
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
from common.basics import append_line, child_environment, parser_of
from common.models import FAMILIES, SD3, Model, write_configs
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.compiling import compile_blocks
from sd3_light.core.registry import family_named, family_of
from sd3_light.cost.amount import GIB
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.trainable import load_what_trains
from sd3_light.model.block_swap import HostRing

TEXT_TOKENS = 512
SD3_TEXT_TOKENS = 333
COLUMNS = (
    *("family", "gib", "bits", "weights", "swap", "parameters", "seconds", "allocated_gib", "reserved_gib"),
    *("pinned_gib", "rss_gib", "loss", "failed"),
)


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


def make_config(folder: Path, options: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any]]:
    """Write the config of the denoiser; return that of a run, and the denoiser's."""
    family = options.families[0]
    denoiser = write_configs(Model(family, options.depth, toy=options.toy), folder)
    name = "sd3" if family in SD3 else family
    swap = options.swap[0]
    keys: dict[str, Any] = {
        "output_dir": "out",
        "dataset": "data.toml",
        "max_steps": options.steps,
        "activation_checkpointing": "host" if options.checkpointing == "host" else json.loads(options.checkpointing),
        "swap_blocks": swap if swap == "all" else int(swap),
        "compile": options.compile,
        "model": {"type": name, "diffusers_path": str(folder), "dtype": "bfloat16"},
    }
    if options.all_weights:
        keys["optimizer"] = {"type": options.optimizer, "weight_dtype": options.weights[0]}
        keys |= {"gradient_release": True, "gradient_clipping": 0.0}
    else:
        keys["adapter"] = {"rank": 16, "base_bits": options.bits[0]}
    config = TrainConfig.model_validate(keys, context={"base": folder})
    if config.adapter is None:
        frozen = getattr(family_of(config.model), "frozen", lambda _: ())
        return config.model_copy(update={"freeze": tuple(frozen(denoiser))}), denoiser
    targets = getattr(family_of(config.model), "adapter_targets", config.adapter.target_modules)
    adapter = config.adapter.model_copy(update={"target_modules": tuple(targets)})
    return config.model_copy(update={"adapter": adapter}), denoiser


def make_engine(config: TrainConfig, device: torch.device) -> TorchEngine:
    """Return the engine of a run with random weights."""
    family = family_of(config.model)
    weights: Any = type(family.weights)
    stored_unread = weights.unread

    def unread(self: Any, start: Any) -> Any:
        denoiser = self.empty(start.size.transformer_config())
        state = denoiser.state_dict()
        return denoiser, {name: RandomWeight(name, tuple(value.shape), device) for name, value in state.items()}

    weights.unread = unread
    denoiser = load_what_trains(config, family.weights.start(config.model), device)
    weights.unread = stored_unread
    module = family.training.model(denoiser, config, fast=False)
    if config.compile:
        compile_blocks(denoiser)
    return TorchEngine(module, config, Launch(), device)


def make_batch(options: argparse.Namespace, denoiser: dict[str, Any]) -> Batch:
    """Return a micro-batch of random values."""
    generator = torch.Generator().manual_seed(0)
    side = 8 if options.toy else options.side // 8
    is_sd3 = options.families[0] in SD3
    stock: Any = None if is_sd3 else family_named(options.families[0])
    channels = denoiser["in_channels"] // (4 if stock is not None and stock.packs_latents else 1)
    width = denoiser["joint_attention_dim" if stock is None else stock.text_inputs["text"]]
    tokens = 8 if options.toy else SD3_TEXT_TOKENS if is_sd3 else TEXT_TOKENS

    def draw(*sizes: int) -> Tensor:
        return torch.randn(options.batch, *sizes, generator=generator)

    values = {"noisy": draw(channels, side, side), "target": draw(channels, side, side)}
    values["t"] = torch.rand(options.batch, generator=generator)
    values["prompt" if is_sd3 else "text"] = draw(tokens, width).bfloat16()
    if "pooled_projection_dim" in denoiser:
        values["pooled"] = draw(denoiser["pooled_projection_dim"]).bfloat16()
    return Batch(options.batch, values)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps in this process."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gib[0] * GIB / total), device)
    rings: list[HostRing] = []
    start = HostRing.start
    HostRing.start = lambda ring: (start(ring), rings.append(ring))  # type: ignore[assignment, method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config, denoiser = make_config(Path(folder), options)
        engine = make_engine(config, device)
    batch = make_batch(options, denoiser)
    seconds = []
    loss = 0.0
    for step in range(options.steps):
        begin = time.perf_counter()
        engine.module.begin(step)
        loss = engine.train_step([batch], options.lr).read().losses["loss"]  # waits for the device
        seconds.append(time.perf_counter() - begin)
    parameters = sum(weight.numel() for weight in engine.module.denoiser.parameters())
    facts = {"seconds": round(statistics.median(seconds[2:]), 4), "loss": loss, "parameters": parameters}
    if device.type == "cuda":
        facts["allocated_gib"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)
        facts["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / GIB, 2)
    facts["pinned_gib"] = round(sum(ring.host_bytes for ring in rings) / GIB, 2)
    facts["rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2)
    return facts


def main() -> None:
    """Measure each case in its own process."""
    parser = parser_of(__doc__)
    parser.add_argument("--all-weights", action="store_true")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["flux"])
    parser.add_argument("--depth", default="full")
    parser.add_argument("--gib", type=float, nargs="+", default=[24.0])
    parser.add_argument("--swap", nargs="+", default=["0", "19", "38", "all"])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--weights", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16"])
    parser.add_argument("--optimizer", choices=["adamw", "adamw8bit", "adafactor"], default="adamw8bit")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--checkpointing", default="true", help="true, false, host or a share of the blocks")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--timeout", type=int, default=300, help="of a row, in seconds")
    parser.add_argument("--out", type=Path, help="file of results, to which lines are added")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    print(" | ".join(COLUMNS), flush=True)
    stored = "weights" if options.all_weights else "bits"
    for values in itertools.product(options.families, options.gib, getattr(options, stored), options.swap):
        facts = dict(zip(("families", "gib", stored, "swap"), values, strict=True))
        case = [text for name, value in facts.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, __file__, *sys.argv[1:], *case, "--one"]
        facts |= _run(command, options.timeout)
        facts["family"] = facts.pop("families")
        print(" | ".join(str(facts.get(name, "")) for name in COLUMNS), flush=True)
        if options.out is not None:
            append_line(options.out, {"arguments": sys.argv[1:], **facts})


def _run(command: list[str], timeout: int) -> dict[str, Any]:
    """Return what a case prints last, or how it failed."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"it did not end within {timeout} s"}
    if run.returncode == 0:
        facts: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return facts
    return {"failed": "".join(run.stderr.strip().splitlines()[-1:])[:200] or f"exit code {run.returncode}"}


if __name__ == "__main__":
    main()
