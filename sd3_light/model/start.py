"""Where the denoiser's weights start: drawn at random, or taken from a folder or a single file. Reads config files and
headers, never weights."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from sd3_light.config import SIZES, ModelConfig, ModelSize, UserError, resolve_size, size_from_transformer_config
from sd3_light.model.single_file_config import single_file_config

MARKER = "sd3_light_init.json"
"""The file by which a folder that `sd3-light init` wrote is known."""

WEIGHTS_STEM = "diffusion_pytorch_model"
"""File name, without its ending, of the weights in a diffusers model folder."""

_NO_SHAPE = ("name", "sample_size")  # a size's fields that no weight depends on


@dataclass(frozen=True)
class WeightsStart:
    """Where training starts. ``folder`` holds the denoiser itself (its ``config.json`` and weights), ``file`` is a
    single file that holds one; both are None at random."""

    kind: Literal["random", "folder", "file"]
    folder: Path | None
    size: ModelSize
    sentence: str
    file: Path | None = None

    @property
    def source(self) -> Path | None:
        """The denoiser's folder or file; None for random weights."""
        return self.folder or self.file


def where_weights_start(model: ModelConfig) -> WeightsStart:
    """The one truth about a [model] table's start; raises UserError where it names a folder without a denoiser."""
    source = start_source(model)
    if source is None:
        size = resolve_size(model)
        return WeightsStart("random", None, size, f"random weights of size {size.name}, drawn from the seed")
    if source.is_file():
        size = named_size(single_file_config(source), source)
        return WeightsStart("file", None, size, f"weights of the single file {source} ({_why(model)})", source)
    folder = denoiser_folder(source)
    size = folder_size(folder)
    return WeightsStart("folder", folder, size, f"weights of {folder} ({_why(model)})")


def start_source(model: ModelConfig) -> Path | None:
    """The folder or file that the table takes the denoiser from; None for random weights.

    `init` wins. Without it, pretraining starts at random unless `diffusers_path` bears the marker of
    `sd3-light init`, and fine-tuning starts from `diffusers_path`.
    """
    if model.init is not None:
        return None if model.init == "random" else model.init
    if model.train_type is None or has_marker(model.diffusers_path):
        return model.diffusers_path
    return None


def has_marker(folder: Path) -> bool:
    """Whether `sd3-light init` wrote this folder."""
    return (folder / MARKER).is_file()


def denoiser_folder(source: Path) -> Path:
    """The denoiser of ``source``: its ``transformer`` folder, or ``source`` itself where it is a denoiser's."""
    inner = source / "transformer"
    if inner.is_dir() or not (source / "config.json").is_file():
        return inner
    return source


def folder_size(folder: Path) -> ModelSize:
    """The size of the denoiser in ``folder``, under its name in the table where it has one."""
    path = folder / "config.json"
    return named_size(read_json(path), path)


def named_size(config: dict[str, Any], path: Path) -> ModelSize:
    """The size of an SD3 denoiser's config, which ``path`` has; another model's is a fault."""
    kind = config.get("_class_name", "SD3Transformer2DModel")
    if kind != "SD3Transformer2DModel":
        raise UserError(f"{path} describes a {kind}; give the folder of an SD3Transformer2DModel")
    for key, only in (("patch_size", ModelSize.patch_size), ("in_channels", ModelSize.latent_channels)):
        if config.get(key, only) != only:
            raise UserError(f"{path} has {key} {config[key]}, SD3 has {only}; give the folder of an SD3 denoiser")
    try:
        size = size_from_transformer_config(config, name="custom")
    except KeyError as missing:
        raise UserError(f"{path} lacks {missing}; give the folder of an SD3 denoiser") from missing
    known = (name for name, other in SIZES.items() if not differences(other, size))
    return replace(size, name=next(known, size.name))


def differences(asked: ModelSize, found: ModelSize) -> tuple[str, ...]:
    """In which fields two sizes differ, those left out that no weight depends on."""
    names = (field.name for field in fields(ModelSize) if field.name not in _NO_SHAPE)
    return tuple(name for name in names if getattr(asked, name) != getattr(found, name))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises UserError where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a complete folder") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); fetch or write the folder anew") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; fetch or write the folder anew")
    return found


def _why(model: ModelConfig) -> str:
    if model.init is not None:
        return "model.init names it"
    return f"it was written by sd3-light init: {MARKER}" if model.train_type else "fine-tuning starts from there"
