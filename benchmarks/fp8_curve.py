"""Compares training in FP8 and bf16 with the same initial weights, images, order, noise and timesteps.

    python benchmarks/fp8_curve.py --products bf16 --out curves
    python benchmarks/fp8_curve.py --products fp8 --out curves
    python benchmarks/fp8_curve.py --compare curves/bf16-0.jsonl curves/fp8-0.jsonl

The full size at 256 px with padded text, batch 64, 1,000 steps of AdamW (1e-4 after 100 warm-up steps, clip 1.0), on
8,192 images of the demo world at 256 px, encoded by the demo's VAE and text encoders; text is padded with zeros to 333
tokens and SD3's widths. They are generated once and stored in `--data`. Every run writes NAME.jsonl, one line per step,
and every 100 steps the loss on 512 held-out images with fixed noise, always computed in bf16. `--seed 1` changes the
noise and timesteps: the difference of two such runs of the same kind shows the noise level. `--compare` prints two runs
side by side and writes curves.csv and curves.html next to the first. `--tiny` runs on a CPU.
"""

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from sd3_light.assets import DEMO
from sd3_light.config import SIZES, ModelSize
from sd3_light.encoding.vae import LatentScale, draw_latent, load_vae, raw_moments
from sd3_light.families.sd3.fast.block import BlockOptions
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.layers import unpatchify
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.families.sd3.text import (
    TEXT_ENCODERS,
    encode_clip,
    encode_t5,
    join_text,
    load_text_model,
    load_tokenizer,
    unpad_text,
)
from sd3_light.flow.objective import flow_loss, interpolate, velocity
from sd3_light.pages import Chart, ChartLine, render_template
from sd3_light.randomness import stream
from sd3_light.world.captions import LANGUAGES, scene_captions
from sd3_light.world.rendering import render_scene
from sd3_light.world.scene import draw_scene

WARM_UP, RATE, CLIP = 100, 1e-4, 1.0
T5_TOKENS = 24
EVERY = 100
"""Steps between held-out losses, and the number of steps per mean."""


@dataclass(frozen=True)
class Scale:
    """Size of the model, the data and the run."""

    size: ModelSize
    side: int = 256
    num_images: int = 8192
    num_held_out: int = 512
    batch: int = 64
    steps: int = 1000
    tokens: int = 333
    every: int = EVERY


REAL = Scale(SIZES["sd3_light"])
TINY = Scale(SIZES["tiny2"], side=32, num_images=24, num_held_out=8, batch=4, steps=10, tokens=44, every=5)

# --- images ----------------------------------------------------------------------------------


def draw(index: int, side: int) -> tuple[NDArray[np.uint8], str]:
    """Draw an image and its caption, alternating between English and Chinese."""
    rng = stream(0, "fp8-curve", 0, 0, index)
    scene = draw_scene(rng, held_out=False)
    image = render_scene(scene, side, side, rng)
    return np.asarray(image), scene_captions(scene)[LANGUAGES[index % len(LANGUAGES)]]


def draw_many(indices: range, side: int) -> list[tuple[NDArray[np.uint8], str]]:
    """Draw several images in one process."""
    return [draw(index, side) for index in indices]


@torch.no_grad()
def encode_texts(texts: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (tokens, pooled) of the demo's encoders, joined as in SD3."""
    results: dict[str, Tensor] = {}
    for name in TEXT_ENCODERS:
        ids = torch.tensor(load_tokenizer(name, DEMO, T5_TOKENS)(texts, padded=True), device=device)
        model = load_text_model(name, DEMO, device, torch.float32)
        if name == "t5":
            results[name] = torch.cat([encode_t5(model, part) for part in ids.split(256)])
            continue
        parts = [encode_clip(model, part) for part in ids.split(256)]
        results |= {name: torch.cat([a for a, _ in parts]), f"{name}.pooled": torch.cat([b for _, b in parts])}
    tokens, pooled, _ = join_text(unpad_text(results))
    return tokens.bfloat16().contiguous(), pooled.bfloat16().contiguous()


@torch.no_grad()
def prepare(scale: Scale, path: Path, device: torch.device) -> None:
    """Draw and encode all images; the held-out images follow the training images."""
    started, total, share = time.perf_counter(), scale.num_images + scale.num_held_out, 64
    parts = [range(first, min(first + share, total)) for first in range(0, total, share)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        drawn = [pair for part in pool.map(draw_many, parts, [scale.side] * len(parts)) for pair in part]
    print(f"{total} images drawn, {time.perf_counter() - started:.1f} s", flush=True)
    vae, normal = load_vae(DEMO, device, torch.float32), LatentScale.of_folder(DEMO)
    latents = []
    for first in range(0, total, 32):
        pixels = torch.from_numpy(np.stack([image for image, _ in drawn[first : first + 32]])).to(device)
        latents.append(normal.normalise(draw_latent(raw_moments(vae, pixels), None)))
    tokens, pooled = encode_texts([text for _, text in drawn], device)
    samples = {"latents": torch.cat(latents).contiguous(), "tokens": tokens, "pooled": pooled}
    assert all(bool(torch.isfinite(part).all()) for part in samples.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    save_file({name: part.cpu() for name, part in samples.items()}, partial)
    partial.rename(path)
    spread = float(samples["latents"].std())
    print(
        f"encoded after {time.perf_counter() - started:.1f} s; standard deviation of latents {spread:.3f}", flush=True
    )


# --- training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """All samples on the device."""

    scale: Scale
    latents: Tensor
    tokens: Tensor
    pooled: Tensor

    def inputs(self, indices: Tensor, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return (features, target) of some samples with drawn noise and timesteps."""
        clean, size = self.latents[indices], self.scale.size
        noise = torch.randn(clean.shape, generator=generator, device=clean.device)
        t = torch.sigmoid(torch.randn(len(clean), generator=generator, device=clean.device))
        tokens = self.tokens[indices]
        wide = F.pad(tokens, (0, size.text_width - tokens.shape[2], 0, self.scale.tokens - tokens.shape[1]))
        pooled = F.pad(self.pooled[indices], (0, size.pooled_width - self.pooled.shape[1]))
        return (interpolate(clean, noise, t), 1000 * t, wide, pooled), velocity(clean, noise)


def loss_of(denoiser: FastDenoiser, inputs: tuple[tuple[Tensor, ...], Tensor]) -> Tensor:
    """Return the mean flow loss of a batch."""
    (noisy, times, prompt, pooled), target = inputs
    patches = denoiser((noisy, times, prompt.to(denoiser.dtype), pooled))
    return flow_loss(unpatchify(patches, *target.shape[-2:]), target).mean()


@torch.no_grad()
def held_out(denoiser: FastDenoiser, data: Data) -> float:
    """Return the loss on the held-out images, always with the same noise."""
    scale, generator = data.scale, torch.Generator(data.latents.device).manual_seed(12345)
    indices = torch.arange(scale.num_images, scale.num_images + scale.num_held_out, device=data.latents.device)
    losses = [loss_of(denoiser, data.inputs(part, generator)) for part in indices.split(scale.batch)]
    return float(torch.stack(losses).mean())


def optimizer_of(parameters: list[Any]) -> Callable[[int], Tensor]:
    """Return ``update(step)``, which clips, steps and returns the gradient norm."""
    optimizer: Any = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, fused=True)

    def update(step: int) -> Tensor:
        norm = torch.stack(torch._foreach_norm([parameter.grad for parameter in parameters])).square().sum().sqrt()
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        optimizer.grad_scale = torch.clamp(norm / CLIP + 1e-6, min=1.0)
        optimizer.found_inf = (~torch.isfinite(norm)).float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return update


def order(scale: Scale, step: int) -> list[int]:
    """Return the images of a step: every image once per epoch, in a new order each epoch."""
    epoch, index = divmod(step, scale.num_images // scale.batch)
    shuffled = np.random.default_rng([7, epoch]).permutation(scale.num_images)
    return shuffled[index * scale.batch : (index + 1) * scale.batch].tolist()  # type: ignore[no-any-return]


def train(args: argparse.Namespace, scale: Scale, device: torch.device) -> None:
    """Run one training and write its log."""
    if not args.data.is_file():
        prepare(scale, args.data, device)
    data = Data(scale, **{name: part.to(device) for name, part in load_file(args.data).items()})
    transformer = new_transformer(scale.size.transformer_config(), 0).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    block_options = BlockOptions(products="fp8" if args.products == "fp8" else "plain", fast_sums=not args.exact_sums)
    plain = FastDenoiser(transformer, dtype)
    own = FastDenoiser(transformer, dtype, block_options) if args.products == "fp8" else plain
    update = optimizer_of(list(transformer.parameters()))
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.name or f"{args.products}-{args.seed}"
    generator, pending = torch.Generator(device), []
    seconds, images = 0.0, 0
    with open(args.out / f"{name}.jsonl", "w", encoding="utf-8") as file:

        def write(**values: Any) -> None:
            file.write(json.dumps(values) + "\n")
            file.flush()

        write(step=0, held_out=held_out(plain, data), held_out_own=held_out(own, data))
        started = time.perf_counter()
        for step in range(scale.steps):
            indices = torch.tensor(order(scale, step), device=device)
            loss = loss_of(own, data.inputs(indices, generator.manual_seed(1_000_000 * args.seed + step)))
            loss.backward()
            pending.append((step + 1, loss.detach(), update(step)))
            if (step + 1) % scale.every and step + 1 < scale.steps:
                continue
            lines = [(number, float(value), float(norm)) for number, value, norm in pending]  # waits for the device
            seconds, images = seconds + time.perf_counter() - started, images + scale.batch * len(lines)
            for number, value, norm in lines:
                write(step=number, loss=value, norm=norm)
            other = {"held_out": held_out(plain, data), "held_out_own": held_out(own, data)}
            write(step=step + 1, **other, images_per_second=images / seconds)
            mean = sum(value for _, value, _ in lines) / len(lines)
            print(f"{name} {step + 1:5} loss {mean:.4f} {other} {images / seconds:.1f} images/s", flush=True)
            pending, started = [], time.perf_counter()
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        write(
            end=True,
            step=scale.steps,
            images_per_second=images / seconds,
            memory_gib=memory,
            block_options=str(block_options),
        )


# --- comparison --------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[int, float], dict[int, float], dict[str, Any]]:
    """Return (loss by step, held-out loss by step, the last line)."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return losses, {line["step"]: line["held_out"] for line in lines if "held_out" in line}, lines[-1]


def means(losses: dict[int, float], every: int) -> dict[int, float]:
    """Return the mean of each group of ``every`` steps, by its last step."""
    steps, results = iter(sorted(losses)), {}
    while part := list(islice(steps, every)):
        results[part[-1]] = sum(losses[step] for step in part) / len(part)
    return results


def compare(first: Path, second: Path) -> None:
    """Compare two runs on the console, as a table and as curves."""
    runs = [read(path) for path in (first, second)]
    (first_losses, first_held_out, first_end), (second_losses, second_held_out, second_end) = runs
    steps = sorted(set(first_losses) & set(second_losses))
    every = max(1, min(EVERY, len(steps) // 10))
    first_means = means({step: first_losses[step] for step in steps}, every)
    second_means = means({step: second_losses[step] for step in steps}, every)
    names = f"{first.stem:>12} {second.stem:>12} {'change':>8}"
    print(f"{'step':>6} {names}   held out: {first.stem}, {second.stem}, change")
    for step, value in first_means.items():
        line = f"{step:6} {value:12.5f} {second_means[step]:12.5f} {second_means[step] / value - 1:8.3%}"
        if step in first_held_out and step in second_held_out:
            change = second_held_out[step] / first_held_out[step] - 1
            line += f"   {first_held_out[step]:.5f} {second_held_out[step]:.5f} {change:.3%}"
        print(line)
    changes = [second_losses[step] / first_losses[step] - 1 for step in steps]
    largest = np.max(np.abs(changes))
    print(f"single steps: mean {np.mean(changes):.3%}, deviation {np.std(changes):.3%}, largest {largest:.3%}")
    speeds = [run.get("images_per_second", 0.0) for run in (first_end, second_end)]
    print(f"images/s: {speeds[0]:.1f} and {speeds[1]:.1f}, ratio {speeds[1] / speeds[0]:.3f}")
    with open(first.with_name("curves.csv"), "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", first.stem, second.stem])
        table.writerows([step, first_losses[step], second_losses[step]] for step in steps)
    charts = [
        _chart(f"loss, means of {every} steps", (first_means, second_means), (first.stem, second.stem)),
        _chart("loss on held-out images, in bf16", (first_held_out, second_held_out), (first.stem, second.stem)),
    ]
    page = render_template("charts.html", title="fp8 and bf16", charts=charts)
    first.with_name("curves.html").write_text(page, encoding="utf-8")


def _chart(title: str, curves: tuple[dict[int, float], dict[int, float]], names: tuple[str, str]) -> Chart:
    lines = [
        ChartLine(name, sorted(curve.items()), f"c{at}")
        for at, (name, curve) in enumerate(zip(names, curves, strict=True))
    ]
    return Chart(title, lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", choices=("bf16", "fp8"), help="train with these products")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="two .jsonl files to compare")
    parser.add_argument("--prepare", action="store_true", help="generate the images and exit")
    parser.add_argument("--exact-sums", action="store_true", help="FP8 without fast accumulation")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and timesteps")
    parser.add_argument("--steps", type=int, help="number of steps")
    parser.add_argument("--name", help="name of the file; default: PRODUCTS-SEED")
    parser.add_argument("--out", type=Path, default=Path("curves"), help="folder for the files")
    parser.add_argument("--data", type=Path, help="file with the encoded images, created if it is missing")
    parser.add_argument("--tiny", action="store_true", help="a small version for a CPU")
    args = parser.parse_args()
    scale, device = TINY if args.tiny else REAL, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.data = args.data or Path(tempfile.gettempdir()) / f"fp8-curve-{scale.side}-{scale.num_images}.safetensors"
    if args.steps is not None:
        scale = Scale(**{**scale.__dict__, "steps": args.steps})
    if args.compare:
        compare(*args.compare)
    elif args.prepare:
        prepare(scale, args.data, device)
    elif args.products:
        train(args, scale, device)
    else:
        parser.error("give --products, --prepare or --compare")


if __name__ == "__main__":
    main()
