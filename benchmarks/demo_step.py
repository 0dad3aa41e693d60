"""Where the time of the demo's training steps goes on a CPU, stock blocks and fast ones in turn.

    python benchmarks/demo_step.py [--recipe pretrain] [--steps 100] [--threads 1] [--profile]

Makes random batches of the demo's shapes, so it needs no cache. Both kinds of block take each batch in turn, so that
whoever shares the machine disturbs both alike; the figures are CPU time (user and system, all threads) and wall time
of a step, lower quartiles, and their ratio. With several threads a wait is CPU time too: compare wall time then, on a
calm machine. The last line is the roofline: the step's products alone, at their shapes. `--profile` adds torch's table
of operations for the fast step.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from sd3_light.config import SIZES, ModelSize, TrainConfig, load_config
from sd3_light.engines import Launch
from sd3_light.engines.protocol import Prepared
from sd3_light.engines.torch import TorchEngine
from sd3_light.model.cost import step_flops
from sd3_light.model.initial import new_transformer
from sd3_light.model.linears import linear_layers
from sd3_light.recipes import FOLDER
from sd3_light.training.module import SD3TrainingModule

RECIPES = {"pretrain": "tiny2", "continue": "demo"}
SHAPES = ((8, 8), (6, 10), (10, 6))
TEXT = 32


def batches(size: ModelSize, config: TrainConfig, count: int) -> list[Prepared]:
    """Random micro-batches, the demo's three shapes in turn."""
    generator = torch.Generator().manual_seed(0)
    samples = config.micro_batch_size_per_gpu

    def normal(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, generator=generator)

    found: list[Prepared] = []
    for number in range(count):
        latent = (size.latent_channels, *SHAPES[number % len(SHAPES)])
        times = 1000 * torch.rand(samples, generator=generator)
        features = (normal(*latent), times, normal(TEXT, size.text_width), normal(size.pooled_width))
        found.append((features, (normal(*latent), None)))
    return found


def engine(size: ModelSize, config: TrainConfig, fast: bool) -> TorchEngine:
    """A fresh model in torch's engine."""
    module = SD3TrainingModule(new_transformer(size.transformer_config(), config.seed), config, fast)
    return TorchEngine(module, config, Launch(), torch.device("cpu"))


def quartile(values: list[float]) -> float:
    """The lower one."""
    return sorted(values)[len(values) // 4]


def measure(engines: dict[str, TorchEngine], given: list[Prepared], rate: float) -> dict[str, tuple[float, float]]:
    """Name -> (CPU ms, wall ms) of a step; says how far the losses of both are apart."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    apart = 0.0
    for batch in given:
        losses = []
        for name, each in engines.items():
            cpu, wall = time.process_time(), time.perf_counter()
            result = each.train_step([batch], rate)
            taken[name].append((1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)))
            losses.append(result.read().losses["loss"])
        apart = max(apart, abs(losses[0] - losses[-1]) / losses[0])
    print(f"losses of {len(given)} steps differ by {apart:.1e} at most")
    return {name: (quartile([c for c, _ in rows]), quartile([w for _, w in rows])) for name, rows in taken.items()}


def products(size: ModelSize, config: TrainConfig, repeats: int = 20) -> float:
    """Wall ms of a step's products alone: every linear layer forward, its input's gradient and its weight's."""
    samples = config.micro_batch_size_per_gpu
    total = 0.0
    for name, (inputs, outputs) in linear_layers(size).items():
        rows = samples
        if "norm" not in name and "time_text" not in name:
            is_text = any(part in name for part in ("add_", "context"))
            rows *= TEXT if is_text else 16
        x, weight, grad = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
        spent = []
        for _ in range(repeats):
            start = time.perf_counter()
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)
            spent.append(1e3 * (time.perf_counter() - start))
        total += quartile(spent)
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="pretrain")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = SIZES[RECIPES[options.recipe]]
    config = load_config(Path(FOLDER) / "demo" / f"{options.recipe}.toml", []).train
    engines = {name: engine(size, config, name == "fast") for name in ("stock", "fast")}
    given = batches(size, config, options.steps)
    found = measure(engines, given, config.optimizer.lr)
    for name, (cpu, wall) in found.items():
        print(f"{name:6} {cpu:7.1f} ms CPU {wall:7.1f} ms wall")
    print("ratio  " + "  ".join(f"{old / new:.2f}" for old, new in zip(*found.values(), strict=True)))
    flops = step_flops(size, 16, [TEXT] * config.micro_batch_size_per_gpu)
    alone = products(size, config)
    print(
        f"products alone: {alone:.1f} ms wall; the step's {flops / 1e9:.2f} GFLOP at {flops / alone / 1e6:.0f} GFLOP/s"
    )
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for batch in given[:20]:
                engines["fast"].train_step([batch], config.optimizer.lr)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


if __name__ == "__main__":
    main()
