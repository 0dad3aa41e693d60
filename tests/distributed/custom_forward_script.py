"""Trains modules with a custom forward by DeepSpeed, on every process of a launcher."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from sd3_light.tasks import ModelLogger, launch_training_task
from tests.unit.tasks.test_custom_forward import Foreign, Own
from tests.unit.tasks.toy import Images

SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "num_workers": 0, "max_steps": 5, "num_epochs": 9}
SETTINGS |= {"ema_decay": 0.5, "eval_dataset": Images(3), "eval_steps": 2}


AVERAGES: dict[str, Any] = {"ema_decay": None, "ema": {"decay": 0.5, "track": [{"name": "long", "decay": 0.9}]}}
"""The average of `SETTINGS` and another one."""


def draw(model: Any) -> Image.Image:
    return Image.new("L", (2, 2), int(255 * model.pipe.dit.weight.mean().sigmoid()))


class Narrow(Own):
    """A bfloat16 pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.pipe.to(torch.bfloat16)

    def forward(self, data: Any, inputs: Any = None) -> Any:
        return super().forward({**data, "image": data["image"].bfloat16()}, inputs)


class Sometimes(Own):
    """A weight that trains gets no gradient from odd samples."""

    def forward(self, data: Any, inputs: Any = None) -> Any:
        loss: Tensor = super().forward(data, inputs)
        return self.pipe.dit.bias.square().mean() if int(data["name"]) % 2 else loss


def main(out: str, batch_size: str) -> None:
    """Train whole and interrupted, with both stages of ZeRO, and other kinds of modules."""

    def run(name: str, model: Any = None, accelerator: Any = None, **settings: Any) -> None:
        settings = {**SETTINGS, "batch_size": int(batch_size), "engine": "deepspeed", **settings}
        launch_training_task(accelerator, Images(), model or Own(), ModelLogger(Path(out, name)), **settings)

    run("whole")
    run("broken", max_steps=3)
    run("broken", resume=True)
    run("zero-1", accelerator=Accelerator(), zero_stage=1)
    run("foreign", Foreign(), batch_size=int(batch_size) // 2, gradient_accumulation_steps=2)
    run("narrow", Narrow())
    run("averages", **AVERAGES, draw=draw, draw_steps=5)
    run("fsdp2", engine="torch", parallel="fsdp2")
    run("sometimes", Sometimes(), batch_size=1)  # raises


if __name__ == "__main__":
    main(*sys.argv[1:])
