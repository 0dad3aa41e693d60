"""Speed and error of the VAE's encoder in several precisions, and the speed of all encoders together.

    python benchmarks/vae_precision.py [--vae FOLDER ...] [--images FOLDER] [--out precision.json] [--tiny]

1. Images per second of the encoder in SD3's shape with random weights, pixels and moments on the device, for float32
   (TF32), bf16 and fp16 as diffusers computes them, channels first and last, with the fused kernels of the cache
   stage, and compiled.
2. The error of the latents' means against float32, for the demo's VAE and that of each model folder `--vae`, on test
   images, images of the demo world and some images of `--images`: as a share of the posterior's standard deviation, of
   the change if pixels were not rounded to 8 bits, and of the latents' own deviation. Also whether bits depend on the
   batch.
3. Images per second of the VAE and the three text encoders together (random weights, built on the device, real text
   tokens, results copied to the host), with the VAE in float32 and fp16, and of each part alone.

`--tiny` runs the same code with small models on a CPU.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoders import CLIP_LENGTH, Clock, _clip_g, _clip_l, _copy_tokenizer, _make_vae, _t5_xxl, make_captions
from PIL import Image
from torch import Tensor, nn

from sd3_light.assets import DEMO
from sd3_light.encoding.half_vae import probe_pixels, to_half_encoder
from sd3_light.encoding.vae import encode_pixels, load_vae
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.families.sd3.text import TEXT_ENCODERS, fuse_activations, load_text_model, load_tokenizer
from sd3_light.world import draw_image

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
Prepare = Callable[[Any], Any]
"""Converts a float32 VAE in place and returns it."""


def stock(dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Prepare:
    """Return the conversion of the whole VAE as diffusers does it."""
    return lambda vae: nn.Module.to(vae, dtype).to(memory_format=layout)


def compiled(prepare: Prepare) -> Prepare:
    """Return a conversion followed by compilation of the encoder, for one shape."""

    def convert(vae: Any) -> Any:
        vae = prepare(vae)
        vae.encoder.compile(dynamic=False)
        return vae

    return convert


LAST = torch.channels_last
VARIANTS: dict[str, Prepare] = {
    "float32 (TF32)": stock(FULL),
    "float32 (TF32), channels last": stock(FULL, LAST),
    "bf16": stock(BRAIN),
    "bf16, channels last": stock(BRAIN, LAST),
    "fp16": stock(HALF),
    "fp16, channels last": stock(HALF, LAST),
    "bf16, fused": lambda vae: to_half_encoder(vae, BRAIN),
    "fp16, fused": lambda vae: to_half_encoder(vae, HALF),
    "fp16, channels last, compiled": compiled(stock(HALF, LAST)),
}
MEASURED_ERRORS = ("float32 (TF32)", "bf16, channels last", "fp16, channels last", "bf16, fused", "fp16, fused")


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results; a variant is an experiment: its error is its result."""
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        torch._dynamo.reset()
        gc.collect()


# --- 1. speed of the VAE -----------------------------------------------------------------------


def vae_speed(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Print and return images per second of each variant."""
    pixels = torch.randint(0, 256, (args.batch_size, args.side, args.side, 3), dtype=torch.uint8, device=device)
    results: dict[str, Any] = {}
    print(f"\n## VAE, {args.side} px, batches of {args.batch_size}, random weights\n")
    print("| variant | images/s | first call, s | peak GiB |\n|---|---:|---:|---:|", flush=True)
    for name, prepare in VARIANTS.items():

        def measure(prepare: Prepare = prepare) -> dict[str, Any]:
            vae = prepare(new_vae(args.tiny, device))
            started = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

            @torch.inference_mode()
            def work() -> None:
                encode_pixels(vae, pixels)

            work()
            clock = Clock(device)
            clock.wait()
            first = time.perf_counter() - started
            rate = len(pixels) / clock.seconds(work, args.seconds)
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
            return {"images_per_second": rate, "first_seconds": first, "peak_gib": peak}

        row = results[name] = attempt(measure)
        cells = row.get("error") or " | ".join(f"{value:.1f}" for value in row.values())
        print(f"| {name} | {cells} |", flush=True)
    return results


def new_vae(tiny: bool, device: torch.device) -> Any:
    """Return a VAE of SD3's shape with the same random weights each time, or the demo's."""
    if tiny:
        return load_vae(DEMO, device, FULL)
    torch.manual_seed(0)
    return _make_vae(device).eval().requires_grad_(False)


# --- 2. error of the VAE -----------------------------------------------------------------------


def error_images(args: argparse.Namespace) -> dict[str, Tensor]:
    """Return uint8 images [B, H, W, 3] by kind."""
    side = args.side
    kinds = {"test": probe_pixels()[: args.num_images, :side, :side]}
    drawn = [draw_image(index, seed=0)[0].convert("RGB").resize((side, side)) for index in range(args.num_images)]
    kinds["world"] = torch.from_numpy(np.stack([np.asarray(image) for image in drawn]))
    if args.images is not None:
        paths = sorted(path for path in args.images.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".webp"))
        spread = paths[:: max(1, len(paths) // args.num_images)][: args.num_images]
        opened = [Image.open(path).convert("RGB").resize((side, side)) for path in spread]
        kinds["files"] = torch.from_numpy(np.stack([np.asarray(image) for image in opened]))
    return kinds


def vae_errors(folder: Path, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Print and return the errors of a trained VAE by kind of images and variant."""
    results: dict[str, Any] = {}
    print(f"\n## Error of the means, {folder.name}\n")
    print("| images | variant | rms error | largest | / posterior std | / 8-bit rounding | / latents' std | bits |")
    print("|---|---|---:|---:|---:|---:|---:|---|", flush=True)
    for kind, images in error_images(args).items():
        pixels = images.to(device)
        exact = load_vae(folder, device, FULL)
        with torch.inference_mode():
            mean, logvar = encode_pixels(exact, pixels, tf32=False).chunk(2, dim=1)
            noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(0)).to(device) - 0.5
            rounding = rms(encode_pixels(exact, pixels + noise, tf32=False).chunk(2, dim=1)[0] - mean)
        posterior, spread = rms(torch.exp(0.5 * logvar)), float(mean.std())
        for name in MEASURED_ERRORS:

            def measure(name: str = name, mean: Tensor = mean, pixels: Tensor = pixels) -> dict[str, Any]:
                vae = VARIANTS[name](load_vae(folder, device, FULL))
                with torch.inference_mode():
                    moments = encode_pixels(vae, pixels)
                    repeated = torch.equal(moments, encode_pixels(vae, pixels))
                    alone = torch.cat([encode_pixels(vae, pixels[at : at + 1]) for at in range(len(pixels))])
                error = moments.chunk(2, dim=1)[0].float() - mean
                same = {True: "equal alone", False: "differ alone"}[torch.equal(moments, alone)]
                return {"rms": rms(error), "largest": float(error.abs().max()), "repeats": repeated, "batch": same}

            row = results[f"{kind}, {name}"] = attempt(measure)
            if "error" in row:
                print(f"| {kind} | {name} | {row['error']} |", flush=True)
                continue
            row |= {"posterior": posterior, "rounding": rounding, "latents": spread}
            shares = [row["rms"] / value for value in (posterior, rounding, spread)]
            cells = [f"{row['rms']:.2e}", f"{row['largest']:.2e}", *(f"{share:.3f}" for share in shares[:2])]
            bits = f"{'repeat' if row['repeats'] else 'do not repeat'}, {row['batch']}"
            print(f"| {kind} | {name} | {' | '.join(cells)} | {shares[2]:.1e} | {bits} |", flush=True)
        print(f"| {kind} | noise | posterior {posterior:.2e} | rounding {rounding:.2e} | latents {spread:.2e} |")
    return results


def rms(values: Tensor) -> float:
    """Return the root mean square."""
    return float(values.double().square().mean().sqrt())


# --- 3. all encoders ---------------------------------------------------------------------------


class ReadyParts(FrozenParts):
    """Encoders that were built on the device instead of being read from a folder."""

    def __init__(self, modules: dict[str, nn.Module], *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.ready = modules

    def part(self, name: str) -> Any:
        """Return a module."""
        return self.ready[name]


def random_text_models(folder: Path, device: torch.device) -> dict[str, nn.Module]:
    """Build the text encoders in bf16 with random weights."""
    models: dict[str, nn.Module] = {}
    for name, build in (("clip_l", _clip_l), ("clip_g", _clip_g), ("t5", _t5_xxl)):
        model: Any = build(load_tokenizer(name, folder, 256).tokenizer).to(BRAIN).to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=parameter.shape[-1] ** -0.5)
            for key, buffer in model.named_buffers():  # `to_empty` leaves them undefined
                assert key.endswith("position_ids"), key
                buffer.copy_(torch.arange(buffer.shape[-1], device=device))
        model.tie_weights()
        models[name] = model.eval().requires_grad_(False)
    return models


def all_speed(args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    """Print and return images per second of all encoders and of each alone, before and after."""
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        length = 16 if args.tiny else 512 if name == "tokenizer_3" else CLIP_LENGTH
        _copy_tokenizer(DEMO / name, folder / name, length)
    started = time.perf_counter()
    models = (
        {name: load_text_model(name, DEMO, device, FULL) for name in TEXT_ENCODERS}
        if args.tiny
        else random_text_models(folder, device)
    )
    captions = make_captions(args.samples, args.caption_tokens)
    pixels = np.random.default_rng(0).integers(0, 256, (args.samples, args.side, args.side, 3), dtype=np.uint8)
    print(f"\n## All encoders, real text tokens, {args.caption_tokens} T5 tokens on average", end="")
    print(f" (built in {time.perf_counter() - started:.1f} s)\n")
    print("| setting | together, images/s | VAE | CLIP-L | CLIP-G | T5 |\n|---|---:|---:|---:|---:|---:|", flush=True)
    results: dict[str, Any] = {}
    for title, prepare, fused in (
        ("before: VAE in float32 (TF32)", stock(FULL), False),
        ("VAE in fp16, fused", VARIANTS["fp16, fused"], False),
        ("VAE in fp16, fused; T5's GELU fused", VARIANTS["fp16, fused"], True),
    ):
        for model in models.values() if fused else ():
            fuse_activations(model)

        def measure(prepare: Prepare = prepare) -> dict[str, Any]:
            modules = {**models, "vae": prepare(new_vae(args.tiny, device))}
            return speeds(modules, captions, pixels, args, device, folder)

        row = results[title] = attempt(measure)
        cells = row.get("error") or " | ".join(f"{value:.0f}" for value in row.values())
        print(f"| {title} | {cells} |", flush=True)
    return results


def speeds(
    modules: dict[str, nn.Module],
    captions: list[str],
    pixels: np.ndarray[Any, Any],
    args: argparse.Namespace,
    device: torch.device,
    folder: Path,
) -> dict[str, float]:
    """Return samples per second of the encoders together and alone, as in the cache stage."""
    with ReadyParts(
        modules, folder, device, text_dtype=BRAIN, t5_max_length=16 if args.tiny else 256, text_tokens="real",
        batch_size=args.batch_size, one_at_a_time=False,
    ) as parts:  # fmt: skip
        tokens = parts.tokenize(captions)

        def encode(images: bool, names: tuple[str, ...]) -> float:
            started = time.perf_counter()
            for start in range(0, len(pixels) if images else 0, args.batch_size):
                parts.encode_images(pixels[start : start + args.batch_size], flip=False)
            for name in names:
                parts.encode_text(name, tokens[name])
            parts.synchronize()
            return len(pixels) / (time.perf_counter() - started)

        names = tuple(TEXT_ENCODERS)
        encode(True, names)  # warm-up
        return {"all": encode(True, names), "vae": encode(True, ()), **{name: encode(False, (name,)) for name in names}}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, nargs="*", default=[], help="model folders (with a subfolder vae)")
    parser.add_argument("--images", type=Path, help="folder of images for the errors")
    parser.add_argument("--num_images", type=int, default=16, help="images of each kind for the errors")
    parser.add_argument("--out", type=Path, help="JSON file for the results, complete after each part")
    parser.add_argument("--samples", type=int, default=2048, help="images, each with a caption, of the third part")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--caption_tokens", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=1.5, help="minimum time of each measurement")
    parser.add_argument("--parts", nargs="*", default=["speed", "errors", "all"], choices=("speed", "errors", "all"))
    parser.add_argument("--tiny", action="store_true", help="small models and images, also on a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.side, args.samples, args.batch_size, args.seconds, args.num_images = 32, 4, 2, 0.01, 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    results: dict[str, Any] = {"device": name, "torch": torch.__version__}

    def keep(key: str, values: dict[str, Any]) -> None:
        results[key] = values
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if "errors" in args.parts:
        for folder in (DEMO, *args.vae):
            keep(f"errors {folder.name}", vae_errors(folder, args, device))
    if "speed" in args.parts:
        keep("speed", vae_speed(args, device))
    if "all" in args.parts:
        with tempfile.TemporaryDirectory() as temporary:
            keep("all", all_speed(args, device, Path(temporary)))


if __name__ == "__main__":
    main()
