"""Does training in fp8 go the way of bf16? The same start, pictures, order, noise and times, two kinds of products.

    python benchmarks/fp8_curve.py --products bf16 --out curves
    python benchmarks/fp8_curve.py --products fp8 --out curves
    python benchmarks/fp8_curve.py --compare curves/bf16-0.jsonl curves/fp8-0.jsonl

The real size at 256 px with padded text, batch 64, 1,000 steps of AdamW (1e-4 after 100 steps of warm-up, clip 1.0), on
8,192 pictures of the demo's world, drawn at 256 px, through the demo's VAE and text encoders; text is filled up with
zeros to 333 tokens and SD3's widths. They are made once and kept in `--data`. Every training writes NAME.jsonl, a line
a step, and every 100 steps the loss on 512 other pictures with fixed noise, computed in bf16 whatever trained.
`--seed 1` gives other noise and times: how far two such runs of one kind are apart says what a difference means.
`--compare` prints both beside each other and leaves curves.csv and curves.html beside the first. `--tiny` is for a CPU.
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
from sd3_light.encoders.text import (
    TEXT_ENCODERS,
    encode_clip,
    encode_t5,
    join_text,
    load_text_model,
    load_tokenizer,
    unpad_text,
)
from sd3_light.encoders.vae import LatentScale, draw_latent, load_vae, raw_moments
from sd3_light.flow.objective import flow_loss, interpolate, velocity
from sd3_light.model.fast.block import BlockOptions
from sd3_light.model.fast.forward import FastDenoiser
from sd3_light.model.layers import unpatchify
from sd3_light.model.random_weights import new_transformer
from sd3_light.pages import Chart, ChartLine, render
from sd3_light.randomness import stream
from sd3_light.world.captions import LANGUAGES, scene_captions
from sd3_light.world.rendering import render_scene
from sd3_light.world.scene import draw_scene

WARM_UP, RATE, CLIP = 100, 1e-4, 1.0
T5_TOKENS = 24
EVERY = 100
"""Steps between two losses on other pictures, and the width of what is averaged."""


@dataclass(frozen=True)
class Scale:
    """How large it all is."""

    size: ModelSize
    side: int = 256
    pictures: int = 8192
    others: int = 512
    batch: int = 64
    steps: int = 1000
    tokens: int = 333
    every: int = EVERY


REAL = Scale(SIZES["sd3_light"])
TINY = Scale(SIZES["tiny2"], side=32, pictures=24, others=8, batch=4, steps=10, tokens=44, every=5)

# --- pictures ----------------------------------------------------------------------------------


def draw(index: int, side: int) -> tuple[NDArray[np.uint8], str]:
    """A picture and its caption, English and Chinese in turn."""
    rng = stream(0, "fp8-curve", 0, 0, index)
    scene = draw_scene(rng, held_out=False)
    image = render_scene(scene, side, side, rng)
    return np.asarray(image), scene_captions(scene)[LANGUAGES[index % len(LANGUAGES)]]


def draw_many(indices: range, side: int) -> list[tuple[NDArray[np.uint8], str]]:
    """In a process of its own."""
    return [draw(index, side) for index in indices]


@torch.no_grad()
def encode_texts(texts: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, pooled) of the demo's encoders, as SD3 joins them."""
    found: dict[str, Tensor] = {}
    for name in TEXT_ENCODERS:
        ids = torch.tensor(load_tokenizer(name, DEMO, T5_TOKENS)(texts, padded=True), device=device)
        model = load_text_model(name, DEMO, device, torch.float32)
        if name == "t5":
            found[name] = torch.cat([encode_t5(model, part) for part in ids.split(256)])
            continue
        parts = [encode_clip(model, part) for part in ids.split(256)]
        found |= {name: torch.cat([a for a, _ in parts]), f"{name}.pooled": torch.cat([b for _, b in parts])}
    tokens, pooled, _ = join_text(unpad_text(found))
    return tokens.bfloat16().contiguous(), pooled.bfloat16().contiguous()


@torch.no_grad()
def prepare(scale: Scale, path: Path, device: torch.device) -> None:
    """Draw and encode all pictures; the others stand behind those that train."""
    begun, total, share = time.perf_counter(), scale.pictures + scale.others, 64
    parts = [range(first, min(first + share, total)) for first in range(0, total, share)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        drawn = [pair for part in pool.map(draw_many, parts, [scale.side] * len(parts)) for pair in part]
    print(f"{total} pictures drawn, {time.perf_counter() - begun:.1f} s", flush=True)
    vae, normal = load_vae(DEMO, device, torch.float32), LatentScale.of_folder(DEMO)
    latents = []
    for first in range(0, total, 32):
        pixels = torch.from_numpy(np.stack([image for image, _ in drawn[first : first + 32]])).to(device)
        latents.append(normal.normalise(draw_latent(raw_moments(vae, pixels), None)))
    tokens, pooled = encode_texts([text for _, text in drawn], device)
    made = {"latents": torch.cat(latents).contiguous(), "tokens": tokens, "pooled": pooled}
    assert all(bool(torch.isfinite(part).all()) for part in made.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    save_file({name: part.cpu() for name, part in made.items()}, fresh)
    fresh.rename(path)
    spread = float(made["latents"].std())
    print(f"encoded after {time.perf_counter() - begun:.1f} s; latents have deviation {spread:.3f}", flush=True)


# --- training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """All samples on the device."""

    scale: Scale
    latents: Tensor
    tokens: Tensor
    pooled: Tensor

    def given(self, indices: Tensor, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """(features, target) of some samples with noise and times drawn."""
        clean, size = self.latents[indices], self.scale.size
        noise = torch.randn(clean.shape, generator=generator, device=clean.device)
        t = torch.sigmoid(torch.randn(len(clean), generator=generator, device=clean.device))
        tokens = self.tokens[indices]
        wide = F.pad(tokens, (0, size.text_width - tokens.shape[2], 0, self.scale.tokens - tokens.shape[1]))
        pooled = F.pad(self.pooled[indices], (0, size.pooled_width - self.pooled.shape[1]))
        return (interpolate(clean, noise, t), 1000 * t, wide, pooled), velocity(clean, noise)


def loss_of(denoiser: FastDenoiser, given: tuple[tuple[Tensor, ...], Tensor]) -> Tensor:
    """The mean flow loss of a batch."""
    (noisy, times, prompt, pooled), target = given
    patches = denoiser((noisy, times, prompt.to(denoiser.dtype), pooled))
    return flow_loss(unpatchify(patches, *target.shape[-2:]), target).mean()


@torch.no_grad()
def held_out(denoiser: FastDenoiser, data: Data) -> float:
    """On the other pictures, always with the same noise."""
    scale, generator = data.scale, torch.Generator(data.latents.device).manual_seed(12345)
    indices = torch.arange(scale.pictures, scale.pictures + scale.others, device=data.latents.device)
    losses = [loss_of(denoiser, data.given(part, generator)) for part in indices.split(scale.batch)]
    return float(torch.stack(losses).mean())


def optimizer_of(parameters: list[Any]) -> Callable[[int], Tensor]:
    """``update(step)`` clips, steps and gives the norm of the gradients."""
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
    """Which pictures a step sees: all of them once an epoch, in a new order each."""
    a_epoch = scale.pictures // scale.batch
    epoch, at = divmod(step, a_epoch)
    mixed = np.random.default_rng([7, epoch]).permutation(scale.pictures)
    return mixed[at * scale.batch : (at + 1) * scale.batch].tolist()  # type: ignore[no-any-return]


def train(args: argparse.Namespace, scale: Scale, device: torch.device) -> None:
    """One training, its lines into a file."""
    if not args.data.is_file():
        prepare(scale, args.data, device)
    data = Data(scale, **{name: part.to(device) for name, part in load_file(args.data).items()})
    transformer = new_transformer(scale.size.transformer_config(), 0).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    how = BlockOptions(products="fp8" if args.products == "fp8" else "plain", fast_sums=not args.exact_sums)
    plain = FastDenoiser(transformer, dtype)
    own = FastDenoiser(transformer, dtype, how) if args.products == "fp8" else plain
    update = optimizer_of(list(transformer.parameters()))
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.name or f"{args.products}-{args.seed}"
    generator, waiting = torch.Generator(device), []
    seconds, images = 0.0, 0
    with open(args.out / f"{name}.jsonl", "w", encoding="utf-8") as file:

        def write(**values: Any) -> None:
            file.write(json.dumps(values) + "\n")
            file.flush()

        write(step=0, held_out=held_out(plain, data), held_out_own=held_out(own, data))
        begun = time.perf_counter()
        for step in range(scale.steps):
            indices = torch.tensor(order(scale, step), device=device)
            loss = loss_of(own, data.given(indices, generator.manual_seed(1_000_000 * args.seed + step)))
            loss.backward()
            waiting.append((step + 1, loss.detach(), update(step)))
            if (step + 1) % scale.every and step + 1 < scale.steps:
                continue
            lines = [(at, float(one), float(norm)) for at, one, norm in waiting]  # waits for the device
            seconds, images = seconds + time.perf_counter() - begun, images + scale.batch * len(lines)
            for at, one, norm in lines:
                write(step=at, loss=one, norm=norm)
            other = {"held_out": held_out(plain, data), "held_out_own": held_out(own, data)}
            write(step=step + 1, **other, images_per_second=images / seconds)
            mean = sum(one for _, one, _ in lines) / len(lines)
            print(f"{name} {step + 1:5} loss {mean:.4f} {other} {images / seconds:.1f} images/s", flush=True)
            waiting, begun = [], time.perf_counter()
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        write(end=True, step=scale.steps, images_per_second=images / seconds, memory_gib=memory, how=str(how))


# --- both --------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[int, float], dict[int, float], dict[str, Any]]:
    """(loss by step, held-out loss by step, the last line)"""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return losses, {line["step"]: line["held_out"] for line in lines if "held_out" in line}, lines[-1]


def means(losses: dict[int, float], every: int) -> dict[int, float]:
    """Of each stretch of steps, by its last step."""
    steps, found = iter(sorted(losses)), {}
    while part := list(islice(steps, every)):
        found[part[-1]] = sum(losses[at] for at in part) / len(part)
    return found


def compare(first: Path, second: Path) -> None:
    """Both beside each other, in words, in a table and as curves."""
    runs = [read(path) for path in (first, second)]
    (losses, others, end), (losses_too, others_too, end_too) = runs
    steps = sorted(set(losses) & set(losses_too))
    every = max(1, min(EVERY, len(steps) // 10))
    one, two = means({at: losses[at] for at in steps}, every), means({at: losses_too[at] for at in steps}, every)
    print(f"{'step':>6} {first.stem:>12} {second.stem:>12} {'by':>8}   held out: {first.stem}, {second.stem}, by")
    for at in one:
        line = f"{at:6} {one[at]:12.5f} {two[at]:12.5f} {two[at] / one[at] - 1:8.3%}"
        if at in others and at in others_too:
            line += f"   {others[at]:.5f} {others_too[at]:.5f} {others_too[at] / others[at] - 1:.3%}"
        print(line)
    apart = [losses_too[at] / losses[at] - 1 for at in steps]
    largest = np.max(np.abs(apart))
    print(f"of single steps: mean {np.mean(apart):.3%}, deviation {np.std(apart):.3%}, largest {largest:.3%}")
    speeds = [run.get("images_per_second", 0.0) for run in (end, end_too)]
    print(f"images/s: {speeds[0]:.1f} and {speeds[1]:.1f}, ratio {speeds[1] / speeds[0]:.3f}")
    with open(first.with_name("curves.csv"), "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", first.stem, second.stem])
        table.writerows([at, losses[at], losses_too[at]] for at in steps)
    charts = [
        _chart(f"loss, means of {every} steps", (one, two), (first.stem, second.stem)),
        _chart("loss on other pictures, in bf16", (others, others_too), (first.stem, second.stem)),
    ]
    page = render("charts.html", title="fp8 and bf16", charts=charts)
    first.with_name("curves.html").write_text(page, encoding="utf-8")


def _chart(title: str, curves: tuple[dict[int, float], dict[int, float]], names: tuple[str, str]) -> Chart:
    lines = [
        ChartLine(name, sorted(curve.items()), f"c{at}")
        for at, (name, curve) in enumerate(zip(names, curves, strict=True))
    ]
    return Chart(title, lines)


def main() -> None:
    """Parse and do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", choices=("bf16", "fp8"), help="train with these")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="two files that trainings wrote")
    parser.add_argument("--prepare", action="store_true", help="make the pictures and stop")
    parser.add_argument("--exact-sums", action="store_true", help="fp8 without fast accumulation")
    parser.add_argument("--seed", type=int, default=0, help="of noise and times")
    parser.add_argument("--steps", type=int, help="fewer steps")
    parser.add_argument("--name", help="of the file, in place of PRODUCTS-SEED")
    parser.add_argument("--out", type=Path, default=Path("curves"), help="folder for the files")
    parser.add_argument("--data", type=Path, help="file with the encoded pictures, made where it is missing")
    parser.add_argument("--tiny", action="store_true", help="a small stand-in")
    args = parser.parse_args()
    scale, device = TINY if args.tiny else REAL, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.data = args.data or Path(tempfile.gettempdir()) / f"fp8-curve-{scale.side}-{scale.pictures}.safetensors"
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
