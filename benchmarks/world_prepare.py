"""Prepares the data of the ablations and the speedrun: encoders, images, prompts and caches.

    python benchmarks/world_prepare.py FOLDER [--scenes hard|simple] [--side 64|128|256|512] [--images 49152]
                                       [--prompts 256] [--report 512] [--parts FOLDER] [--caches padded real]
                                       [--vae-seconds 240] [--tower-seconds 120] [--processes 8]

`simple` scenes are those of the demo and use its encoders. `hard` scenes have up to six objects with sizes, textures
and overlaps; their captions need other tokenizers and text encoders, which stay random, and their textures another VAE.
The parts stage makes them from the images; the VAE needs a GPU. `--parts` takes both from the `model` of an earlier
folder instead. At the end the judge checks images that the VAE reconstructed: a model can hardly score higher.
`encoders.json` states the text encoders and what they were trained on. The `--prompts` of the curves, by which runs are
tuned and stopped, and those of the `--report` are different.

Steps that are done are skipped, so that an interrupted command continues. `cache` holds padded text, `cache-real` real
tokens, which only the row `real-text` needs. `cache-tower` and `cache-random` have features of an image tower beside
padded text, for the rows `align-*`: one that learns from the training images and their captions, and the same with
random weights. `cache-equivariance` and `cache-adversarial` are those of another VAE, for the rows `vae-*`: trained
like that of hard scenes, with one more term. All of these are built if `--caches` names them.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common.basics import best_device, parser_of
from common.hard.captions import ZH_HARD_WORDS
from common.hard.dataset import HardPrompt, captions_of, draw_square_image
from common.world import BENCH_FILE, ENCODERS_FILE, REAL_CACHE, Bench, load
from PIL import Image
from transformers import AutoConfig, VisionTextDualEncoderModel

from sd3_light.assets import DEMO
from sd3_light.cache import verb as cache
from sd3_light.config import UserError
from sd3_light.encoding.vae import load_vae
from sd3_light.evaluate.composition import judge_images
from sd3_light.model.folder import JUDGE, missing_parts
from sd3_light.parts import verb as parts
from sd3_light.parts.contrastive import TextOptions
from sd3_light.parts.fit import FitOptions
from sd3_light.parts.vae import VaeOptions
from sd3_light.world import Prompt, write_dataset

ROOT = Path(__file__).parents[1]
NUM_FOLDERS = 16  # image folders, drawn in parallel
NUM_HELD_OUT = 1024
TRAIN_SEED, HELD_OUT_SEED = 100, 2
VAE_PIXELS = 48_000 * 128**2  # of all images that the VAE is trained on
VAE_BATCH_PIXELS = 128 * 256**2
CACHING_PIXELS = 512 * 128**2  # of the images that are encoded at once

TOWERS = {"tower": "tower", "random": "tower-random"}
"""Caches with features of a vision model -> its folder."""
VAES = {"equivariance": {"equivariance": 0.5}, "adversarial": {"adversarial": 0.1}}
"""Caches of another VAE -> its options beside those of the usual one."""
CACHES: dict[str, tuple[str, ...]] = {
    "padded": (),
    "real": REAL_CACHE,
    **{name: (f'model.teacher_path="{folder}"', f'cache_dir="cache-{name}"') for name, folder in TOWERS.items()},
    **{name: (f'model.diffusers_path="model-{name}"', f'cache_dir="cache-{name}"') for name in VAES},
}
"""Overrides by kind of cache."""


def prepare(args: argparse.Namespace, bench: Bench) -> None:
    """Do the steps that are missing in the folder."""
    if (args.folder / BENCH_FILE).is_file() and Bench.read(args.folder) != bench:
        raise UserError(f"{args.folder} was prepared as {Bench.read(args.folder)}; choose another folder")
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / BENCH_FILE).write_text(json.dumps(asdict(bench), indent=1) + "\n", encoding="utf-8")
    draw_images(args.folder, bench, args.images, args.processes)
    make_parts(args.folder, bench, args.parts, args.vae_seconds)
    stated = json.dumps(describe_encoders(args.folder / "model"), indent=1)
    (args.folder / ENCODERS_FILE).write_text(stated + "\n", encoding="utf-8")
    if TOWERS.keys() & set(args.caches):
        make_towers(args.folder, bench, args.tower_seconds)
    for name in args.caches:
        if name in VAES:
            make_vae(args.folder, bench, name, args.vae_seconds)
        build_cache(args.folder, CACHES[name], args.processes)


def make_towers(folder: Path, bench: Bench, seconds: float) -> None:
    """Write an image tower that learns to find the captions of images, and one with the same config and no training."""
    trained, random = (folder / name for name in TOWERS.values())
    options = parts.PartsOptions(
        only="text", text_size="tiny", words=ZH_HARD_WORDS if bench.hard else (), text=TextOptions(seed=11),
        text_fit=FitOptions(minutes=seconds / 60),
    )  # fmt: skip
    parts.run(folder / "data.toml", trained, options)
    if (random / JUDGE).is_dir():
        return
    shutil.copytree(trained / JUDGE, random / JUDGE)
    torch.manual_seed(12)
    VisionTextDualEncoderModel(AutoConfig.from_pretrained(trained / JUDGE)).save_pretrained(random / JUDGE)


def make_parts(folder: Path, bench: Bench, source: Path | None, vae_seconds: float) -> None:
    """Write the encoders, tokenizers, scheduler and VAE."""
    model, source = folder / "model", source or (None if bench.hard else DEMO)
    if not missing_parts(model, transformer=False):
        return
    if source is not None:
        ignored = shutil.ignore_patterns("transformer", parts.WORK)
        shutil.copytree(source, model, ignore=ignored, dirs_exist_ok=True)
        return
    parts.run(folder / "data.toml", model, parts_options(bench, vae_seconds))


def parts_options(bench: Bench, vae_seconds: float, **vae: float) -> parts.PartsOptions:
    """Return how the parts of hard scenes are made; ``vae`` are more options of the VAE."""
    return parts.PartsOptions(
        vae_size="tiny", text_size="tiny", random_text=True, words=ZH_HARD_WORDS,
        max_images=VAE_PIXELS // bench.side**2,
        vae=VaeOptions(batch=min(128, VAE_BATCH_PIXELS // bench.side**2), seed=7, **vae),
        vae_fit=FitOptions(minutes=vae_seconds / 60, lr=1.5e-3),
    )  # fmt: skip


def make_vae(folder: Path, bench: Bench, name: str, seconds: float) -> None:
    """Write a model folder with another VAE and the text encoders of the usual one."""
    out = folder / f"model-{name}"
    if not missing_parts(out, transformer=False):
        return
    parts.run(folder / "data.toml", out, replace(parts_options(bench, seconds, **VAES[name]), only="vae"))
    ignored = shutil.ignore_patterns("vae", "transformer", parts.WORK)
    shutil.copytree(folder / "model", out, ignore=ignored, dirs_exist_ok=True)


def describe_encoders(model: Path) -> dict[str, str]:
    """Return what each text encoder of a model folder learned from, and the hash of its weights."""
    stated = {}
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        made = json.loads((model / name / parts.MADE).read_text(encoding="utf-8"))
        is_demo = "demo_text.py" in made.get("command", "")
        if made.get("random") or (is_demo and name == "text_encoder_3"):
            supervision = "random weights, not trained"
        elif is_demo:
            supervision = "trained on captions to predict the fields of the scene"
        else:
            supervision = "trained with images and captions of the training set by a contrastive loss"
        digest = hashlib.sha256((model / name / "model.safetensors").read_bytes()).hexdigest()
        stated[name] = f"{supervision} (sha256 {digest[:12]})"
    return stated


def draw_images(folder: Path, bench: Bench, images: int, processes: int) -> None:
    """Draw the training images, one folder per process at a time, and the held-out images."""
    size = f"size_buckets = [[{bench.side}, {bench.side}]]\n\n[[directory]]\npath = "
    (folder / "data.toml").write_text(f'{size}"data/train"\n', encoding="utf-8")
    (folder / "eval.toml").write_text(f'{size}"data/held_out"\n', encoding="utf-8")
    num_folders = min(NUM_FOLDERS, images)
    jobs = [
        (folder / "data" / "train" / f"{part:02d}", images // num_folders, TRAIN_SEED + part, False)
        for part in range(num_folders)
    ]
    jobs.append((folder / "data" / "held_out", min(NUM_HELD_OUT, images), HELD_OUT_SEED, True))
    jobs = [job for job in jobs if not (job[0] / "captions.json").is_file()]  # written after the images
    if processes == 1:
        list(map(partial(draw_folder, bench), jobs))
        return
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(draw_folder, bench), jobs))


def draw_folder(bench: Bench, job: tuple[Path, int, int, bool]) -> None:
    """Draw the images of one folder."""
    folder, count, seed, held_out = job
    write_dataset(folder, count, seed, held_out, draw=partial(draw_captioned, bench))


def draw_captioned(bench: Bench, index: int, seed: int, held_out: bool) -> tuple[Image.Image, dict[str, str]]:
    """Draw one image; return it with its captions."""
    image, scene = draw_square_image(index, seed, bench.side, bench.hard, held_out)
    return image, captions_of(scene)


def build_cache(folder: Path, overrides: tuple[str, ...], processes: int) -> None:
    """Encode images, captions and prompts with several processes."""
    bench = Bench.read(folder)
    overrides = (*overrides, f"caching_batch_size={min(512, CACHING_PIXELS // bench.side**2)}")
    loaded = load(folder, overrides)
    if processes == 1:
        cache.run(loaded)
        return
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    options = ["--config", str(loaded.path), "--cache-only"]
    for override in bench.overrides(overrides):
        options += ["--set", override]
    subprocess.run([*launcher, str(ROOT / "train.py"), *options], check=True)


@torch.no_grad()
def check_vae(folder: Path, bench: Bench, count: int = 128) -> dict[str, float]:
    """Return the quality of reconstructed held-out images: PSNR in dB, and the share that the judge finds right."""
    device = best_device()
    vae = load_vae(folder / "model", device, torch.float32)
    drawn = [draw_square_image(index, HELD_OUT_SEED, bench.side, bench.hard, True) for index in range(count)]
    kind = HardPrompt if bench.hard else Prompt
    prompts, images, errors = [kind("", scene) for _, scene in drawn], [], []
    for first in range(0, count, 16):
        pixels = np.stack([np.asarray(image) for image, _ in drawn[first : first + 16]])
        x = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
        y = vae.decode(vae.encode(x).latent_dist.mean).sample.clamp(-1, 1)
        errors += ((x - y) / 2).square().flatten(1).mean(1).tolist()
        images += [
            Image.fromarray(array) for array in ((y + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        ]
    psnr = -10 * math.log10(sum(errors) / count)
    return {"psnr_db": round(psnr, 2), "judged_right": float(judge_images(prompts, images).rates["all"] or 0)}


def main() -> None:
    """Prepare a folder."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", choices=("hard", "simple"), default="hard")
    parser.add_argument("--side", type=int, choices=(64, 128, 256, 512), default=128)
    parser.add_argument("--images", type=int, default=49152)
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts of the curves")
    parser.add_argument("--report", type=int, default=512, help="other held-out prompts, of the results")
    parser.add_argument("--parts", type=Path, help="folder with encoders and VAE of an earlier preparation")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=["padded", "real"], help="caches to build")
    parser.add_argument("--vae-seconds", type=float, default=240)
    parser.add_argument("--tower-seconds", type=float, default=120)
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="processes that encode; 1 does everything in this one",
    )
    parser.add_argument("--check", type=int, default=128, help="images to reconstruct for the check of the VAE")
    args = parser.parse_args()
    bench = Bench(args.scenes == "hard", args.side, args.prompts, args.report)
    try:
        prepare(args, bench)
    except UserError as error:
        sys.exit(f"error: {error}")
    quality = check_vae(args.folder, bench, args.check)
    (args.folder / "vae.json").write_text(json.dumps(quality) + "\n", encoding="utf-8")
    print(f"reconstructed images: {quality['psnr_db']} dB, {quality['judged_right']:.3f} judged right")


if __name__ == "__main__":
    main()
