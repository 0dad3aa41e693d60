"""A task's step against the train stage's, for the same model and batch: images per second and peak GPU memory.

    python benchmarks/task_run.py [--size sd3_light] [--batch 64] [--steps 40] [--warm 15]

Both train all weights of an SD3 transformer with stock blocks in bf16 on random numbers of real shapes: the stage from
a cache (`train_run.py --fast false`), the task with `launch_training_task` from a dataset of latents and padded text.
They run one after the other in separate processes, so that each has its own peak memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import SD3Transformer2DModel
from torch import Tensor
from torch.utils.data import Dataset
from train_run import summary
from train_run_folder import Shape

from sd3_light import tasks
from sd3_light.config import SIZES

NUM_SAMPLES = 256


class RandomSamples(Dataset[Any]):
    """Latents and padded text of random numbers, held in memory."""

    def __init__(self, shape: Shape) -> None:
        generator, side = torch.Generator().manual_seed(0), shape.pixels // 8
        self.latents = torch.randn(NUM_SAMPLES, 16, side, side, generator=generator)
        text = torch.randn(shape.clip_tokens + shape.t5_tokens, shape.t5, generator=generator)
        self.text = (0.2 * text).bfloat16().repeat(NUM_SAMPLES, 1, 1)
        self.pooled = torch.randn(NUM_SAMPLES, shape.clip_l + shape.clip_g, generator=generator).bfloat16()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"latents": self.latents[index], "text": self.text[index], "pooled": self.pooled[index]}


class Sd3(tasks.DiffusionTrainingModule):
    """Full training of the transformer."""

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        super().__init__(transformer, [], tasks.FlowMatchSFTLoss(shift=3.0), reads=("text", "pooled"))

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        """Return the velocity."""
        output: Tensor = self.transformer(noisy, inputs["text"], inputs["pooled"], 1000 * t, return_dict=False)[0]
        return output


def run_task(folder: Path, args: argparse.Namespace) -> None:
    """Train the task in this process."""
    size = SIZES[args.size]
    torch.manual_seed(0)
    settings = {"batch_size": args.batch, "max_steps": args.steps, "num_epochs": args.steps, "logging_steps": 5}
    tasks.launch_training_task(
        Accelerator(mixed_precision="bf16"),
        RandomSamples(Shape.of(size)),
        Sd3(SD3Transformer2DModel(**size.transformer_config())),
        Quiet(folder),
        1e-4,
        num_workers=args.workers,
        ema_decay=0.99,
        ema_update_every=100,
        **settings,
    )


class Quiet(tasks.ModelLogger):
    """Writes no models."""

    def on_epoch_end(self, *args: Any, **options: Any) -> None:
        """Skip the save."""

    def on_training_end(self, *args: Any, **options: Any) -> None:
        """Skip the save."""


def main() -> None:
    """Run both and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="sd3_light")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=15)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--task", type=Path, help="run only the task, in this folder")
    args = parser.parse_args()
    if args.task is not None:
        run_task(args.task, args)
        return
    same = [f"--{name}={getattr(args, name)}" for name in ("size", "batch", "steps", "warm", "workers")]
    with tempfile.TemporaryDirectory() as name:
        stage, task = Path(name, "stage"), Path(name, "task")
        script = Path(__file__)
        logging = ["--fast=false", "--no-save", "--logging-steps=5", f"--out={stage}"]
        subprocess.run([sys.executable, script.with_name("train_run.py"), *same, *logging], check=True)
        subprocess.run([sys.executable, script, *same, f"--task={task}"], check=True)
        results = {
            "stage": json.loads((stage / "summary.json").read_text(encoding="utf-8")),
            "task": summary(task / "log.jsonl", args.warm, 0.0),
        }
    for kind, values in results.items():
        print(f"{kind:6} {values['samples_per_second']:7.1f} images/s  {values['gpu_memory_gib']:6.2f} GiB")
    ratios = [results["task"][key] / results["stage"][key] for key in ("samples_per_second", "gpu_memory_gib")]
    print(f"task / stage: speed {ratios[0]:.3f}, memory {ratios[1]:.3f}")


if __name__ == "__main__":
    main()
