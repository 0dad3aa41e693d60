"""The parts of a model folder as tensors on disk, checked against their configs."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import diffusers
import torch

from sd3_light.config.faults import UserError
from sd3_light.core.family import Family
from sd3_light.export.export_spec import first_few
from sd3_light.model.folder import missing_weights, weight_files
from sd3_light.model.part_configs import LOAD_ERRORS, WEIGHTS_STEM, check_config, read_config
from sd3_light.tensor_file import StoredTensor, open_tensors

PartConfig = dict[str, Any]
Build = Callable[[PartConfig], Any]
"""Builds the module of a config; the same function for all parts of one kind."""
# written by some programs but not needed: position numbers, and a second copy of T5's embedding
_IGNORED = re.compile(r"\.position_ids$|^encoder\.embed_tokens\.weight$")


def read_denoiser(folder: Path, family: Family) -> tuple[PartConfig, dict[str, StoredTensor]]:
    """Return config and tensors of a denoiser from its own folder; an incomplete one is a UserError."""
    return read_stored(folder, "transformer", WEIGHTS_STEM, getattr(diffusers, family.denoiser).from_config)


def read_stored(folder: Path, part: str, stem: str, build: Build) -> tuple[PartConfig, dict[str, StoredTensor]]:
    """Return config and tensors of a part from its own folder, from weight files of that stem."""
    config = read_config(folder, part)
    missing = list(missing_weights(folder, stem))
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}; pass a complete folder")
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder, stem):
        file_tensors, _ = open_tensors(file)
        repeated = tensors.keys() & file_tensors.keys()
        if repeated:
            raise UserError(f"{file} and another file of {folder} contain {min(repeated)}; export the folder again")
        tensors.update(file_tensors)
    shapes = part_shapes(part, config, build, str(folder))
    require_shapes(tensors, shapes, str(folder))
    return config, {name: tensors[name] for name in shapes}


def part_shapes(part: str, config: Mapping[str, Any], build: Build, where: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the part's tensors in diffusers' layout; an invalid config is a UserError."""
    check_config(config, part, f"{where}: the config of {part}")  # a wrong number would take forever
    try:
        return dict(_shapes(build, json.dumps(config)))
    except (*LOAD_ERRORS, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: the config of {part} is invalid ({reason}); download or export it again") from error


@lru_cache
def _shapes(build: Build, config: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = build(json.loads(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in shapes.items() if not _IGNORED.search(name)}


def require_shapes(tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise a UserError unless ``tensors`` has exactly these names and shapes."""
    unexpected = [name for name in tensors if name not in shapes and not _IGNORED.search(name)]
    problems = [f"it lacks {name}" for name in shapes if name not in tensors]
    problems += [f"it has {name}, which does not belong to it" for name in unexpected]
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    if problems:
        raise UserError(f"{where} does not match its config: {first_few(problems, 5, '; ')}. Nothing was written")
