"""Where a denoiser's initial weights come from: random, a folder or a single file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sd3_light.config import ModelConfig

MARKER = "sd3_light_init.json"
"""The file that marks a folder written by `sd3-light init`."""


@dataclass(frozen=True)
class WeightsStart:
    """The denoiser's initial weights: in a ``folder`` with its ``config.json``, in a single ``file``, or random.

    ``size`` is the family's own description of the denoiser; all of them have a ``name`` and a `transformer_config`.
    """

    kind: Literal["random", "folder", "file"]
    folder: Path | None
    size: Any
    sentence: str
    file: Path | None = None

    @property
    def source(self) -> Path | None:
        """The denoiser's folder or file; None for random weights."""
        return self.folder or self.file


def start_source(model: ModelConfig) -> Path | None:
    """Return the folder or file that the denoiser comes from; None for random weights.

    `init` takes precedence. Without it, pretraining starts at random unless `sd3-light init` wrote `diffusers_path`,
    and fine-tuning starts from `diffusers_path`.
    """
    if model.init is not None:
        return None if model.init == "random" else model.init
    if model.train_type is None or (model.diffusers_path / MARKER).is_file():
        return model.diffusers_path
    return None


def why_source(model: ModelConfig) -> str:
    """Say which key names the source of the weights."""
    if model.init is not None:
        return "from model.init"
    return f"written by sd3-light init: {MARKER}" if model.train_type else "fine-tuning of diffusers_path"


def denoiser_folder(source: Path) -> Path:
    """Return the denoiser folder of ``source``: its ``transformer`` subfolder, or ``source`` itself."""
    inner = source / "transformer"
    if inner.is_dir() or not (source / "config.json").is_file():
        return inner
    return source
