"""Open a model folder: its pipeline, and how its text was encoded in training."""

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from sd3_light.config.faults import UserError
from sd3_light.core.drawing import stated_drawing
from sd3_light.core.family import Family
from sd3_light.core.registry import family_of_folder
from sd3_light.core.sampling import PipelineInputs
from sd3_light.export.diffusers_folder import is_finite, read_facts
from sd3_light.export.export_spec import DYNAMIC
from sd3_light.export.model_facts import trained_size
from sd3_light.export.stored_parts import read_denoiser
from sd3_light.flow.scheduler import flow_scheduler, folder_scheduler
from sd3_light.model.folder import check_configs
from sd3_light.model.part_configs import FACTS_FILE, LOAD_ERRORS, LOCAL_WEIGHTS, check_files


def open_pipeline(
    folder: Path,
    device: torch.device,
    text_facts: Path | None = None,
    dtype: torch.dtype = torch.float32,
    parts: Mapping[str, Any] | None = None,
) -> tuple[Any, PipelineInputs]:
    """Load the folder's pipeline and its text policy (that of its stock pipeline by default).

    The denoiser and the text encoders are loaded in ``dtype``, the VAE in float32. ``text_facts`` is the folder that
    states the policy, if it is not the same: that of an adapter, whose shift the scheduler gets. ``parts`` are used in
    place of the folder's own; one that is None is left out.
    A model with a custom pipeline opens with this package's own class: a folder's `pipeline.py` is not run. An
    incomplete or non-finite denoiser is a UserError: diffusers would fill gaps with random weights.
    """
    parts = parts or {}
    family, policy = open_policy(folder, text_facts)
    if "transformer" not in parts:
        read_denoiser(folder / "transformer", family)  # reports missing or wrong weights
    try:
        pipe = _load(folder, family, policy, dtype, parts)
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"diffusers cannot load {folder}: {reason}; download or export the folder again") from error
    if "transformer" not in parts:
        require_finite_denoiser(pipe.transformer, folder)
    if (shift := None if text_facts is None else adapter_shift(text_facts)) is not None:
        pipe.scheduler = flow_scheduler(None, True) if shift == DYNAMIC else folder_scheduler(folder, float(shift))
    return pipe.to(device), policy


def require_finite_denoiser(denoiser: nn.Module, folder: Path) -> None:
    """Raise a UserError if the denoiser of a model folder has a weight that is not finite."""
    for name, tensor in denoiser.state_dict().items():
        if not is_finite(tensor):
            raise UserError(f"{folder}: {name} of its denoiser contains NaN or infinity; pass another model")


def open_policy(folder: Path, text_facts: Path | None = None) -> tuple[Family, PipelineInputs]:
    """Return the family and the text policy of a model folder; its configs are checked, and no weight is read."""
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{folder} is not a diffusers folder (no model_index.json); pass an export or a model folder")
    family = family_of_folder(folder)
    for package in family.packages:
        if find_spec(package) is None:
            needs = f"{family.title} needs {package} for its captions, which is not installed"
            raise UserError(f"{folder}: {needs}; run `pip install {package}`")
    policy = read_text_policy(text_facts or folder, family).for_folder(folder)
    policy = policy.stating(stated_drawing(read_facts(folder), folder / FACTS_FILE))
    check_configs(folder)
    family.weights.require(folder / "transformer")
    has_own = text_facts is not None and isinstance(adapter_shift(text_facts), int | float)
    if not has_own and (reason := family.scheduler_fault(folder)):
        raise UserError(f"{folder}: {reason}")
    return family, policy


def _load(
    folder: Path, family: Family, policy: PipelineInputs, dtype: torch.dtype, parts: Mapping[str, Any] | None = None
) -> Any:
    check_files(folder, *(part for part in folder.iterdir() if part.is_dir()))
    options = {"dtype": {"vae": torch.float32, "default": dtype}, **LOCAL_WEIGHTS, **(parts or {})}
    custom = family.files.custom_pipeline(policy.facts())
    if custom is None:
        return getattr(diffusers, family.pipeline).from_pretrained(folder, **options)
    return custom.kind.from_pretrained(folder, **custom.settings, **options)


def adapter_shift(folder: Path) -> float | str | None:
    """Return the shift of an adapter that was trained with another one than its base: a number, or `DYNAMIC`."""
    shift = None if (folder / "model_index.json").is_file() else read_facts(folder).get("shift")
    is_number = isinstance(shift, int | float) and not isinstance(shift, bool) and 0 < shift < math.inf
    if shift is None or shift == DYNAMIC or is_number:
        return shift
    raise UserError(f"{folder / FACTS_FILE}: shift has the invalid value {shift!r:.80}; export the folder again")


def read_text_policy(folder: Path, family: Family) -> PipelineInputs:
    """Return how a folder's text was encoded in training; if it does not say, as its stock pipeline does."""
    facts = read_facts(folder)
    policy = family.files.text_policy(folder, facts.get("text", {}))
    return policy.drawn_at(trained_size(facts))
