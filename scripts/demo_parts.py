"""Trains the demo's tokenizers and text encoders, and its VAE if asked, by `sd3-light parts` on images of its world.

    python scripts/demo_parts.py OUT [--images 96000] [--text-steps 1500] [--vae-minutes 0] [--random-text]

Draws the images into OUT/data and writes OUT/model, in half precision. The text encoders learn from the square images,
at their full size; the VAE from all of them. Without `--vae-minutes` the VAE is the shipped one. No image or caption
that a part learns from has a held-out pair of colour and shape. OUT/probe.json says what a linear probe reads from the
text encoders. The same command continues an interrupted one.
"""

import argparse
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from demo_probe import ENCODERS, probe
from safetensors.torch import load_file, save_file

from sd3_light.assets import DEMO
from sd3_light.files import atomic_file
from sd3_light.parts import verb as parts
from sd3_light.parts.contrastive import TextOptions
from sd3_light.parts.fit import FitOptions
from sd3_light.parts.vae import VaeOptions
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.world import write_dataset
from sd3_light.world.captions import ZH_WORDS

NUM_FOLDERS = 16  # image folders, drawn in parallel
TRAIN_SEED, HELD_OUT_SEED, SEED = 100, 2, 7
SQUARES = """# The square images of data.toml: the image tower sees squares, whose side is that of the smallest image.
size_buckets = [[64, 64]]

[[directory]]
path = "data/train"
min_side = 64
"""


def draw_images(out: Path, images: int, held_out: int) -> None:
    """Draw training and held-out images, in parallel; folders that are complete are kept."""
    jobs = [
        (out / "data" / "train" / f"{part:02d}", images // NUM_FOLDERS, TRAIN_SEED + part, False)
        for part in range(NUM_FOLDERS)
    ]
    jobs.append((out / "data" / "held_out", held_out, HELD_OUT_SEED, True))
    jobs = [job for job in jobs if not (job[0] / "captions.json").is_file()]  # written after the images
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_dataset, *zip(*jobs, strict=True)) if jobs else ())


def train_parts(out: Path, args: argparse.Namespace) -> None:
    """Write OUT/model by the parts stage."""
    for recipe in (RECIPES / "demo").glob("*.toml"):
        shutil.copy(recipe, out)
    (out / "parts.toml").write_text(SQUARES, encoding="utf-8")
    common = {"vae_size": "tiny", "text_size": "tiny", "words": ZH_WORDS}
    text = parts.PartsOptions(
        only="text", random_text=args.random_text, text=TextOptions(args.text_batch, SEED, compile=False),
        text_fit=FitOptions(args.text_steps, lr=1e-3, weight_decay=0.05), **common,
    )  # fmt: skip
    vae = parts.PartsOptions(
        only="vae", vae=VaeOptions(256, SEED), vae_fit=FitOptions(minutes=args.vae_minutes, lr=1.5e-3), **common
    )
    parts.run(out / "parts.toml", out / "model", text)
    if args.vae_minutes:
        parts.run(out / "data.toml", out / "model", vae)
    else:
        shutil.copytree(DEMO / "vae", out / "model" / "vae", dirs_exist_ok=True)


def halve(model: Path) -> None:
    """Store the weights in half precision, as they are shipped, so that the cache is made with the same weights."""
    for path in (file for name in (*ENCODERS, "vae") for file in (model / name).glob("*.safetensors")):
        tensors = {name: value.half() for name, value in load_file(path).items()}
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, {"format": "pt"})
    for path in (model / name / "config.json" for name in ENCODERS):
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "dtype": "float16"}, indent=2) + "\n", encoding="utf-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the images and the parts."""
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", "--pictures", type=int, default=96000, help="training images, half of them square")
    parser.add_argument("--held-out", type=int, default=1536, help="images of held-out pairs")
    parser.add_argument("--text-steps", type=int, default=1500)
    parser.add_argument("--text-batch", type=int, default=1024)
    parser.add_argument("--random-text", action="store_true", help="leave the text encoders random")
    parser.add_argument("--vae-minutes", type=float, default=0, help="train a VAE; 0: use the shipped one")


def make_parts(args: argparse.Namespace) -> None:
    """Draw the images, train the parts and measure the text encoders, unless an earlier command did."""
    draw_images(args.out, args.images, args.held_out)
    if not (args.out / "probe.json").is_file():
        train_parts(args.out, args)
        halve(args.out / "model")
        shares = probe(args.out / "model", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        (args.out / "probe.json").write_text(json.dumps(shares, indent=1) + "\n", encoding="utf-8")
    print(f"whole scenes of held-out captions: {(args.out / 'probe.json').read_text(encoding='utf-8')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    make_parts(parser.parse_args())


if __name__ == "__main__":
    main()
