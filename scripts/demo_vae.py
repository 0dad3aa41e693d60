"""Trains the demo's small VAE on images of the demo world, with the VAE training of `sd3-light parts`.

    python scripts/demo_vae.py OUT [--seconds 200] [--images 48000] [--hard]

16 latent channels at 1/8 resolution and the scale and shift of SD3; the weights are written in half precision. `--hard`
trains on the harder scenes of the benchmarks, at 128 px; the demo's VAE blurs their textures and mixes their colours.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from sd3_light.engines import Launch
from sd3_light.parts.fit import Fit, FitOptions
from sd3_light.parts.images import Pool, on_device
from sd3_light.parts.sizes import VAE_SIZES
from sd3_light.parts.vae import VaeOptions, VaeTask, build_vae
from sd3_light.randomness import stream
from sd3_light.world import draw_scene, draw_square_image, render_scene

SEED = 7
IMAGE_SIZES = {(64, 64): 0.5, (80, 48): 0.25, (48, 80): 0.25}  # with their share of the images
HARD_SIZES = {(128, 128): 1.0}
HELD_OUT_PART = 50  # one image in 50 measures the quality
JOB = 500  # images that a process draws at once


def draw_images(job: tuple[int, int, tuple[int, int], bool]) -> np.ndarray:
    start, stop, (width, height), hard = job
    images = []
    for index in range(start, stop):
        if hard:
            images.append(np.asarray(draw_square_image(index, SEED, width, hard=True)[0]))
            continue
        rng = stream(SEED, "vae-picture", 0, 0, index)
        images.append(np.asarray(render_scene(draw_scene(rng, held_out=False), width, height, rng)))
    return np.stack(images)


def image_pools(count: int, hard: bool) -> list[Pool]:
    """Return the images of each size, without held-out compositions."""
    pools = []
    with ProcessPoolExecutor() as pool:
        for size, share in (HARD_SIZES if hard else IMAGE_SIZES).items():
            total = round(share * count)
            jobs = [(start, min(start + JOB, total), size, hard) for start in range(0, total, JOB)]
            pixels = torch.from_numpy(np.concatenate(list(pool.map(draw_images, jobs))))
            pools.append(Pool(pixels, tuple(range(total)), ((),) * total, total // HELD_OUT_PART, f"{total} of {size}"))
    return pools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--images", type=int, default=48000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--hard", action="store_true", help="train on harder scenes at 128 px")
    args = parser.parse_args()
    device = Launch().device()
    pools = on_device(image_pools(args.images, args.hard), device)
    task = VaeTask(build_vae(VAE_SIZES["tiny"], 16, SEED), pools, device, VaeOptions(batch=args.batch, seed=SEED))
    task.start_new()
    with TemporaryDirectory() as state:
        fit = Fit("vae", task, FitOptions(minutes=args.seconds / 60, lr=1.5e-3), Path(state), {})
        progress = fit.run(lambda: None)
        fit.use_averages()
    task.vae.half().float()  # measure the weights as they are written
    note = {
        "command": f"python scripts/demo_vae.py OUT --seconds {args.seconds:g} --images {args.images} "
        f"--batch {args.batch}{' --hard' if args.hard else ''}",
        "steps": progress.step,
        "psnr_db": round(task.evaluate()["psnr"], 2),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }  # fmt: skip
    print(json.dumps(note))
    task.finished().half().save_pretrained(args.out)
    (args.out / "made.json").write_text(json.dumps(note, indent=1) + "\n")


if __name__ == "__main__":
    main()
