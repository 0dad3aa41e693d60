"""The known families by name; a family's code is imported when it is used."""

from functools import cache
from importlib import import_module
from pathlib import Path

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.family import Family
from sd3_light.core.files import SingleFiles
from sd3_light.core.start import WeightsStart
from sd3_light.inputs import read_json_file

_FAMILIES = {"sd3": "sd3_light.families.sd3:SD3"}
"""`model.type` -> where its class is."""
_CLASSES = {"StableDiffusion3Pipeline": "sd3", "SD3Transformer2DModel": "sd3"}
"""Class of a pipeline or a denoiser in diffusers -> `model.type`."""
_CONFIGS = ("model_index.json", "config.json", "transformer/config.json")


def family_of(model: ModelConfig) -> Family:
    """Return the family of a [model] table."""
    return family_named(model.type)


def family_of_folder(folder: Path) -> Family:
    """Return the family of a diffusers folder, or of a denoiser's folder; SD3 if it names no class.

    Raises UserError if its class belongs to no known family.
    """
    for path in (folder / name for name in _CONFIGS):
        try:
            config = read_json_file(path) if path.is_file() else None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); download or write the folder again") from error
        kind = config.get("_class_name") if isinstance(config, dict) else None
        if isinstance(kind, str) and kind in _CLASSES:
            return family_named(_CLASSES[kind])
        if kind is not None:
            known = ", ".join(name for name in _CLASSES if name.endswith("Pipeline"))
            raise UserError(f"{path} describes a {kind!r:.80}, which is of no known family; give a folder of {known}")
    return family_named("sd3")


def family_of_class(kind: str) -> Family | None:
    """Return the family of a pipeline's or a denoiser's class in diffusers; None if it is not known."""
    return family_named(_CLASSES[kind]) if kind in _CLASSES else None


def family_of_file() -> Family:
    """Return the family of adapter files and single files that are read without a model: they name none, so SD3."""
    return family_named("sd3")


def single_files(family: Family, subject: object) -> SingleFiles:
    """Return a family's single files. Raises UserError about ``subject``, a path, for a family without them."""
    if family.files.single is None:
        known = [other.title for other in map(family_named, _FAMILIES) if other.files.single is not None]
        raise UserError(
            f"{subject}: {family.title} has no single file, only {', '.join(known)} does; use the diffusers folder"
        )
    return family.files.single


@cache
def family_named(name: str) -> Family:
    """Return the family with this name."""
    module, _, kind = _FAMILIES[name].partition(":")
    family = getattr(import_module(module), kind)()
    assert isinstance(family, Family), family
    return family


def starting_weights(model: ModelConfig) -> WeightsStart:
    """Return where the denoiser's weights of a [model] table start. Raises UserError if there is no denoiser."""
    return family_of(model).weights.start(model)
