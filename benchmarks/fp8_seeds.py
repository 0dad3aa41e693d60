"""Compares the final losses of bf16 and FP8 training over several seeds: means, spread and their difference.

    python benchmarks/fp8_seeds.py [--seeds 4] [--steps 2000] [--out seeds.json] [--limit 300] [--tiny]

A model of 4 blocks of width 768, 128 px, batch 64, AdamW (3e-4 after 100 warm-up steps, clip 1.0) on 16,384 images of
the demo world, encoded by the demo's VAE and text encoders. A seed determines weights, order, noise and timesteps; bf16
and FP8 share them. Two results per run: the mean training loss of the last 200 steps, and the loss on 512 held-out
images with fixed noise, computed in bf16. On GPUs the step is one CUDA graph. `--tiny` runs on a CPU.
"""

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8_curve import CLIP, TINY, WARM_UP, Data, Scale, held_out, loss_of, prepare
from safetensors.torch import load_file
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.families.sd3.fast.block import BlockOptions
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.random_weights import new_transformer

RATE = 3e-4
LAST = 200
"""Number of steps in the mean training loss."""
KINDS = ("bf16", "fp8")
SMALL = Scale(
    replace(SIZES["tiny2"], name="fp8-seeds", num_layers=4, num_heads=12),
    side=128, num_images=16384, num_held_out=512, batch=64, steps=2000, tokens=44,
)  # fmt: skip

Inputs = tuple[tuple[Tensor, ...], Tensor]


def orders(scale: Scale, seed: int) -> Tensor:
    """Return the images of every step: every image once per epoch."""
    per_epoch = scale.num_images // scale.batch
    epochs = [
        np.random.default_rng([7, seed, epoch]).permutation(scale.num_images)[: per_epoch * scale.batch]
        for epoch in range(-(-scale.steps // per_epoch))
    ]
    return torch.from_numpy(np.concatenate(epochs)).view(-1, scale.batch)[: scale.steps]


class Trainer:
    """One training: a step on static inputs, recorded as a CUDA graph on GPUs."""

    def __init__(self, transformer: Any, options: BlockOptions, inputs: Inputs) -> None:
        device = inputs[1].device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.denoiser = FastDenoiser(transformer, dtype, options)
        self.parameters = list(transformer.parameters())
        self.rate = torch.zeros((), device=device)
        self.optimizer: Any = torch.optim.AdamW(
            self.parameters, lr=self.rate, weight_decay=0.01, fused=True, capturable=device.type == "cuda"
        )
        self.static = (tuple(part.clone() for part in inputs[0]), inputs[1].clone())
        self.run = self._recorded() if device.type == "cuda" else self._step

    def _step(self) -> Tensor:
        loss = loss_of(self.denoiser, self.static)
        loss.backward()
        norm = torch.stack(torch._foreach_norm([p.grad for p in self.parameters])).square().sum().sqrt()
        self.optimizer.grad_scale = torch.clamp(norm / CLIP + 1e-6, min=1.0)
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _recorded(self) -> Callable[[], Tensor]:
        """Record the step after warm-up steps with a rate of zero, whose traces in the optimizer are removed."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

        def replay() -> Tensor:
            graph.replay()
            return loss.clone()

        return replay

    def step(self, inputs: Inputs, rate: float) -> Tensor:
        """Train on a batch and return its loss."""
        for target, source in zip((*self.static[0], self.static[1]), (*inputs[0], inputs[1]), strict=True):
            target.copy_(source)
        self.rate.fill_(rate)
        return self.run()


def train(kind: str, seed: int, data: Data) -> dict[str, Any]:
    """Run one training and return its results."""
    scale, device = data.scale, data.latents.device
    started = time.perf_counter()
    transformer: Any = new_transformer(scale.size.transformer_config(), seed).to(device)
    indices, generator = orders(scale, seed).to(device), torch.Generator(device)

    def inputs(step: int) -> Inputs:
        return data.inputs(indices[step], generator.manual_seed(1_000_000 * seed + step))

    options = BlockOptions(products="fp8" if kind == "fp8" else "plain")
    trainer, losses = Trainer(transformer, options, inputs(0)), []
    ready = time.perf_counter()
    for step in range(scale.steps):
        losses.append(trainer.step(inputs(step), RATE * min(1.0, (step + 1) / WARM_UP)))
    values = torch.stack(losses).tolist()  # waits for the device
    seconds = time.perf_counter() - ready
    assert all(map(math.isfinite, values)), f"{kind}, seed {seed}: the loss is not finite"
    plain = FastDenoiser(transformer, trainer.denoiser.dtype)
    every = max(1, scale.steps // 40)
    return {
        "kind": kind,
        "seed": seed,
        "first": values[0],
        "train": statistics.fmean(values[-LAST:]),
        "held_out": held_out(plain, data),
        "images_per_second": scale.steps * scale.batch / seconds,
        "seconds": time.perf_counter() - started,
        "curve": [statistics.fmean(values[at : at + every]) for at in range(0, len(values), every)],
    }


def earlier_runs(file: Path | None, scale: str) -> list[dict[str, Any]]:
    """Return the pairs of runs that an earlier command wrote with the same data and model."""
    content = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}
    runs: list[dict[str, Any]] = content.get("runs", []) if content.get("scale") == scale else []
    return runs


def compare(runs: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """Return means and deviations of both kinds, and fp8's difference in standard errors: unpaired, and by seed."""
    by_kind = {kind: {run["seed"]: run[key] for run in runs if run["kind"] == kind} for kind in KINDS}
    seeds = sorted(set(by_kind["bf16"]) & set(by_kind["fp8"]))
    values = {kind: [by_kind[kind][seed] for seed in seeds] for kind in KINDS}
    results: dict[str, float] = {"seeds": len(seeds)}
    for kind in KINDS:
        results |= {f"{kind} mean": statistics.fmean(values[kind]), f"{kind} std": _deviation(values[kind])}
    pairs = [fp8 - bf16 for bf16, fp8 in zip(values["bf16"], values["fp8"], strict=True)]
    difference, count = statistics.fmean(pairs), len(seeds)
    unpaired = math.sqrt((results["bf16 std"] ** 2 + results["fp8 std"] ** 2) / count)
    paired = _deviation(pairs) / math.sqrt(count)
    results |= {"difference": difference, "relative": difference / results["bf16 mean"]}
    return results | {
        "standard errors": difference / unpaired if unpaired else math.nan,
        "standard errors, paired": difference / paired if paired else math.nan,
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def report(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Print and return the comparison of the training and held-out losses."""
    print("\n| loss | bf16 mean | std | fp8 mean | std | difference | standard errors | paired by seed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    results = {key: compare(runs, key) for key in ("train", "held_out")}
    for key, row in results.items():
        values = [row[name] for name in ("bf16 mean", "bf16 std", "fp8 mean", "fp8 std")]
        cells = [*(f"{value:.5f}" for value in values), f"{row['difference']:+.5f} ({row['relative']:+.2%})"]
        cells += [f"{row[name]:+.2f}" for name in ("standard errors", "standard errors, paired")]
        print(f"| {key} | {' | '.join(cells)} |", flush=True)
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file for the results, complete after each pair of runs; the same command continues it",
    )
    parser.add_argument("--data", type=Path, help="file with the encoded images, created if it is missing")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no pair of runs starts")
    parser.add_argument("--tiny", action="store_true", help="a small version for a CPU")
    args = parser.parse_args()
    device, scale = torch.device("cuda" if torch.cuda.is_available() else "cpu"), TINY if args.tiny else SMALL
    scale = scale if args.steps is None else replace(scale, steps=args.steps)
    path = args.data or Path(tempfile.gettempdir()) / f"fp8-seeds-{scale.side}-{scale.num_images}.safetensors"
    started = time.perf_counter()
    if not path.is_file():
        prepare(scale, path, device)
    data = Data(scale, **{name: part.to(device) for name, part in load_file(path).items()})
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; {scale}; data ready after {time.perf_counter() - started:.1f} s")
    print("| kind | seed | first loss | train | held out | images/s | seconds |\n|---|---|---:|---:|---:|---:|---:|")
    runs = earlier_runs(args.out, str(scale))
    done = {run["seed"] for run in runs}
    for seed in (seed for seed in range(args.seeds) if seed not in done):
        if runs and time.perf_counter() - started > args.limit:
            print(f"stopped before seed {seed}: {args.limit:.0f} s have passed")
            break
        for kind in KINDS:
            runs.append(run := train(kind, seed, data))
            cells = [f"{run[key]:.5f}" for key in ("first", "train", "held_out")]
            cells += [f"{run['images_per_second']:.0f}", f"{run['seconds']:.1f}"]
            print(f"| {kind} | {seed} | {' | '.join(cells)} |", flush=True)
            gc.collect()
        if args.out is not None:
            content = {"device": name, "torch": torch.__version__, "scale": str(scale), "runs": runs}
            args.out.write_text(json.dumps({**content, "comparison": report(runs)}, indent=1) + "\n", encoding="utf-8")
    if args.out is None:
        report(runs)


if __name__ == "__main__":
    main()
