"""A toy task: a small convolution learns random latents. Run as a script it trains on several processes."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from sd3_light import tasks
from sd3_light.runlog import read_log
from sd3_light.tasks import ModelLogger, ProcessedDataset, launch_data_process_task, launch_training_task


class Images(Dataset[Any]):
    def __init__(self, count: int = 8, mixed: bool = False) -> None:
        self.count, self.mixed = count, mixed

    def __len__(self) -> int:
        return self.count

    def bucket_of(self, index: int) -> str:
        return str(4 + 2 * (self.mixed and index % 2))

    def __getitem__(self, index: int) -> dict[str, Any]:
        side = int(self.bucket_of(index))
        return {"image": torch.randn(3, side, side, generator=torch.Generator().manual_seed(index)), "name": str(index)}


class Encode(tasks.PipelineUnit):
    reads, writes, uses = ("image",), ("latents",), ("encoder",)
    runs = 0

    def run(self, module: Any, image: Tensor) -> dict[str, Tensor]:
        Encode.runs += 1
        return {"latents": module.encoder(image[None])[0]}


class Toy(tasks.DiffusionTrainingModule):
    def __init__(self, adapter: bool = False, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        net = (
            nn.Sequential(nn.Flatten(2), nn.Linear(16, 16), nn.Linear(16, 16))
            if adapter
            else nn.Conv2d(3, 3, 3, padding=1)
        )
        super().__init__(net, [Encode()])
        self.encoder = nn.Conv2d(3, 3, 1)
        if adapter:
            self.train_adapter(rank=2, dropout=dropout, target_modules=["1", "2"])

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        velocity: Tensor = self.transformer(noisy).reshape(noisy.shape)
        return velocity


def train(
    out: Path, model: Any = None, data: Any = None, logger: Any = None, accelerator: Any = "cpu", **settings: Any
) -> list[dict[str, Any]]:
    """Train a module, by default the toy, without workers; return the log's events."""
    settings = {"learning_rate": 1e-2, "num_workers": 0, **settings}
    accelerator = Accelerator(cpu=True) if accelerator == "cpu" else accelerator
    dataset = Images() if data is None else data
    launch_training_task(accelerator, dataset, model or Toy(), logger or ModelLogger(out), **settings)
    return list(read_log(out / "log.jsonl"))


def steps(events: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(event[key] for key in keys) for event in events if event["event"] == "step"]


def process(out: Path, data: Any = None, model: Any = None, **settings: Any) -> ProcessedDataset:
    """Process data, by default of the toy, without workers; return the result."""
    dataset = Images(6) if data is None else data
    settings = {"num_workers": 0, **settings}
    launch_data_process_task(Accelerator(cpu=True), dataset, model or Toy(), ModelLogger(out), **settings)
    return ProcessedDataset(out)


class PackageLogger:
    """Saves when, and under the names, that the logger of the package `diffsynth` does."""

    def __init__(self, output_path: Path) -> None:
        self.output_path, self.num_steps = str(output_path), 0
        self.files: list[str] = []

    def on_step_end(self, accelerator: Any, model: Any, save_steps: int | None = None, **kwargs: Any) -> None:
        self.num_steps += 1
        if save_steps is not None and self.num_steps % save_steps == 0:
            self.save_model(accelerator, model, f"step-{self.num_steps}.safetensors")

    def on_epoch_end(self, accelerator: Any, model: Any, epoch_id: int) -> None:
        self.save_model(accelerator, model, f"epoch-{epoch_id}.safetensors")

    def on_training_end(self, accelerator: Any, model: Any, save_steps: int | None = None) -> None:
        if save_steps is not None and self.num_steps % save_steps != 0:
            self.save_model(accelerator, model, f"step-{self.num_steps}.safetensors")

    def save_model(self, accelerator: Any, model: Any, file_name: str) -> None:
        accelerator.wait_for_everyone()
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            self.files.append(Path(file_name).stem)
            state = accelerator.unwrap_model(model).export_trainable_state_dict(state)
            accelerator.save(state, Path(self.output_path, file_name), safe_serialization=True)


class Stopping(ModelLogger):
    """Asks its process to stop after the second step."""

    def on_step_end(self, accelerator: Any, model: Any, save_steps: int | None = None, **fields: Any) -> None:
        super().on_step_end(accelerator, model, save_steps)
        if self.num_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_asked(out: str) -> None:
    """Train until the last process asks to stop."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    logger = (Stopping if rank == world - 1 else ModelLogger)(out)
    launch_training_task(None, Images(), Toy(), logger, num_workers=0, num_epochs=9, engine="torch")


def stop_twice(out: str) -> None:
    """Stop, catch the exception and continue; then let the exception end the script."""
    try:
        train_until_asked(f"{out}/caught")
    except Exception as stopped:
        print(f"caught: {stopped}")
    train_until_asked(f"{out}/stopped")


def finish_twice(out: str) -> None:
    """Train to the middle of an epoch, remove what was saved, and resume the finished task."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    settings: dict[str, Any] = {"num_workers": 0, "engine": "torch", "max_steps": 2}
    for resume in (False, True):
        logger: Any = PackageLogger(Path(out))
        launch_training_task(None, Images(), Toy(), logger, **settings, resume=resume)
        print(f"wrote {logger.files}")
        if not resume:
            Path(out, "step-2.safetensors").unlink(missing_ok=True)  # by the first process that gets here


def main(out: str, stage: str) -> None:
    """On every process of a launcher: process the data and train on the result, or train at once."""
    if stage == "stop":
        finish_twice(f"{out}/finished")
        stop_twice(out)
    accelerator = None if stage in ("deepspeed", "fsdp2") else Accelerator()
    assert accelerator is None or accelerator.num_processes == 2
    data: Any = Images()
    if stage == "process":
        logger = ModelLogger(Path(out, "processed"))
        launch_data_process_task(accelerator, data, Toy(), logger, num_workers=0, shard_size=2)
        data = ProcessedDataset(Path(out, "processed"))
    settings: dict[str, Any] = {"batch_size": 2, "max_steps": 4, "ema_decay": 0.9, "num_epochs": 9}
    if stage == "deepspeed":
        settings |= {"engine": "deepspeed", "batch_size": 1, "gradient_accumulation_steps": 2}
    if stage == "fsdp2":
        settings |= {"engine": "torch", "parallel": "fsdp2", "draw": draw, "draw_steps": 2, "resume": True}
        settings |= {"eval_dataset": Images(3), "eval_steps": 2}
        launch_training_task(None, data, Toy(), ModelLogger(out), 1e-2, num_workers=0, **{**settings, "max_steps": 2})
    launch_training_task(accelerator, data, Toy(), ModelLogger(out), 1e-2, num_workers=0, save_steps=4, **settings)


def draw(model: Any) -> Image.Image:
    """Call the denoiser on its own, as a pipeline does."""
    value = model.transformer(torch.ones(1, 3, 4, 4)).mean()
    return Image.new("L", (2, 2), int(255 * value.sigmoid()))


if __name__ == "__main__":
    main(*sys.argv[1:])
