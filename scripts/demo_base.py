"""Trains the base that the demo continues from: draws images, caches them and trains recipes/demo/base.toml on a GPU.

    python scripts/demo_base.py OUT [--images 96000] [--set KEY=VALUE ...]

The result is OUT/base/exports/step-N; the package ships its transformer in assets/demo.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.world import write_dataset

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "sd3_light" / "assets" / "demo"
NUM_FOLDERS = 16  # image folders, drawn in parallel


def draw(job: tuple[Path, int, int, bool]) -> None:
    folder, count, seed, held_out = job
    write_dataset(folder, count, seed, held_out=held_out)


def prepare_folder(out: Path, images: int) -> None:
    """Draw the images and copy the frozen parts and the recipes."""
    out.mkdir(parents=True)
    jobs = [
        (out / "data" / "train" / f"{part:02d}", images // NUM_FOLDERS, 100 + part, False)
        for part in range(NUM_FOLDERS)
    ]
    jobs.append((out / "data" / "held_out", 1536, 2, True))
    with ProcessPoolExecutor() as pool:
        list(pool.map(draw, jobs))
    shutil.copytree(ASSETS, out / "model", ignore=shutil.ignore_patterns("transformer"))
    for recipe in (RECIPES / "demo").glob("*.toml"):
        shutil.copy(recipe, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", "--pictures", type=int, default=96000)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="caching processes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    prepare_folder(args.out, args.images)
    config = [
        "--config",
        str(args.out / "base.toml"),
        *(argument for override in args.set for argument in ("--set", override)),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.processes)]
    subprocess.run([*torchrun, str(ROOT / "train.py"), *config, "--cache-only"], check=True)
    subprocess.run([sys.executable, str(ROOT / "train.py"), *config, "--trust-cache"], check=True)


if __name__ == "__main__":
    main()
