"""Writes files of every format with this version into `tests/released/VERSION`: `python -m tests.released.make`.

Run it once for every release, and never again: `tests/unit/test_released.py` reads the files of all releases.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sd3_light import __version__
from sd3_light.config import load_config
from sd3_light.engines import Launch
from sd3_light.export import convert
from sd3_light.journeys import cache_then_train
from sd3_light.tasks import DiffusionTrainingModule, ModelLogger, launch_data_process_task
from sd3_light.train.verb import Resume
from sd3_light.world import write_dataset
from tests.project import DATA_TOML, TRAIN_TOML, Project
from tests.tiny_sd3 import tiny_pipeline

CHANGES = (
    ("max_steps = 4", "max_steps = 2"),
    ("caching_batch_size = 8\ncaching_num_workers = 1", "caching_batch_size = 4\ncaching_num_workers = 0"),
    ("sd3_shard_size = 8", "sd3_shard_size = 4"),
    ('train_type = "sd3_light_pretrain"\n', ""),
    ('init = "random"\nsize = "tiny2"', 'init = "model"'),
)
"""From the project of the tests to a short run that starts from the model's weights."""

ADAPTER = "\n[adapter]\nrank = 2\nalpha = 2.0\n"
FROZEN = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3", "vae")


class Task(DiffusionTrainingModule):
    """A script's task that stores what its dataset has."""

    def __init__(self) -> None:
        super().__init__(transformer=nn.Linear(2, 2), reads=("prompt",))


class Values:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"latents": torch.arange(4.0).reshape(1, 2, 2) + index, "prompt": f"number {index}"}


def write_project(folder: Path) -> None:
    write_dataset(folder / "images", 8, seed=1)
    pipeline = tiny_pipeline()
    pipeline.vae = _vae_of_8_pixels(pipeline.vae)
    pipeline.save_pretrained(folder / "model")
    project = Project(folder, folder / "model")
    project.data(DATA_TOML.replace(", [80, 48], [48, 80]", ""))
    text = TRAIN_TOML.format(model="model")
    for old, new in CHANGES:
        text = text.replace(old, new)
    project.train_toml.write_text(text, encoding="utf-8")
    text = text.replace('output_dir = "run"', 'output_dir = "lora_run"').partition("\n[ema]")[0]
    (folder / "lora.toml").write_text(text + ADAPTER, encoding="utf-8")


def _vae_of_8_pixels(vae: Any) -> Any:
    """Make a VAE that shrinks images 8 times instead of 4."""
    down = ("DownEncoderBlock2D",) * 4
    up = ("UpDecoderBlock2D",) * 4
    torch.manual_seed(0)
    blocks = {"block_out_channels": (8, 8, 8, 8), "down_block_types": down, "up_block_types": up}
    return type(vae).from_config(vae.config, **blocks).eval()


def losses(folder: Path, run: str) -> dict[str, float]:
    return {str(step): loss for step, loss in Project(folder, folder / "model").losses(run).items()}


def continued_losses(folder: Path, toml: str, run: str) -> dict[str, float]:
    """Resume a run of two steps for two more, and return the losses of all."""
    cache_then_train(load_config(folder / toml, ("max_steps=4",)), Launch(), resume=Resume())
    return losses(folder, run)


def inputs() -> dict[str, Tensor]:
    """Return inputs of the denoiser that no generator decides."""
    return {
        "hidden_states": torch.linspace(-1, 1, 4 * 8 * 8).reshape(1, 4, 8, 8),
        "encoder_hidden_states": torch.linspace(-1, 1, 5 * 48).reshape(1, 5, 48),
        "pooled_projections": torch.linspace(-1, 1, 40).reshape(1, 40),
        "timestep": torch.tensor([500.0]),
    }


@torch.no_grad()
def output(transformer: nn.Module) -> list[float]:
    """Return a few values that the denoiser computes."""
    values: Tensor = transformer(**inputs(), return_dict=False)[0]
    return [float(value) for value in values.flatten()[::16]]


def make(folder: Path) -> None:
    """Write the files, and what a later version must compute from them."""
    write_project(folder)
    cache_then_train(load_config(folder / "train.toml"), Launch())
    cache_then_train(load_config(folder / "lora.toml"), Launch())
    launch_data_process_task(Accelerator(cpu=True), Values(), Task(), ModelLogger(folder / "processed"), num_workers=0)  # type: ignore[arg-type]
    (export,) = (folder / "run" / "exports").iterdir()
    (lora,) = (folder / "lora_run" / "exports").iterdir()
    shutil.move(export, folder / "export")
    shutil.move(lora, folder / "lora")
    convert.run(folder / "export", folder / "single.safetensors")
    for name in FROZEN:  # those of the model
        shutil.rmtree(folder / "export" / name)
    copy = folder.with_name(f"{folder.name}-continued")
    shutil.copytree(folder, copy)
    pipeline = tiny_pipeline()
    expected: dict[str, Any] = {
        "version": __version__,
        "losses": continued_losses(copy, "train.toml", "run"),
        "lora_losses": continued_losses(copy, "lora.toml", "lora_run"),
        "export": output(type(pipeline.transformer).from_pretrained(folder / "export" / "transformer")),
    }
    pipeline = type(pipeline).from_pretrained(folder / "model")
    pipeline.load_lora_weights(folder / "lora")
    expected["lora"] = output(pipeline.transformer)
    shutil.rmtree(copy)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the files of this version; those that exist are kept."""
    target = Path(__file__).with_name(__version__)
    if target.exists():
        sys.exit(f"{target} exists: files of a released version are not made again")
    folder = Path(tempfile.gettempdir(), "sd3_light_released", __version__)  # configs and logs name it
    shutil.rmtree(folder, ignore_errors=True)
    make(folder)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(".lock", "tensorboard"))


if __name__ == "__main__":
    main()
