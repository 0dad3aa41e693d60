"""The known families by name; a family's code is imported when it is used."""

from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path

from sd3_light.config import LoadedConfig, ModelConfig, UserError
from sd3_light.config.family_keys import AUTO, is_installed_class
from sd3_light.core.clips import with_clip_lengths
from sd3_light.core.family import Family
from sd3_light.core.files import SingleFiles
from sd3_light.core.other_pipelines import why_not_trained
from sd3_light.core.start import WeightsStart
from sd3_light.inputs import read_json_file

_FAMILIES = {
    "sd3": "sd3_light.families.sd3:SD3",
    "flux": "sd3_light.families.flux:Flux",
    "flux_kontext": "sd3_light.families.flux:FluxKontext",
    "flux2": "sd3_light.families.flux2:Flux2",
    "krea2": "sd3_light.families.krea2:Krea2",
    "prx": "sd3_light.families.prx:PRX",
    "qwen_image": "sd3_light.families.qwen_image:QwenImage",
    "qwen_image_edit": "sd3_light.families.qwen_image:QwenImageEdit",
    "qwen_image_edit_plus": "sd3_light.families.qwen_image:QwenImageEditPlus",
    "sana": "sd3_light.families.sana:Sana",
    "wan": "sd3_light.families.wan:Wan",
    "z_image": "sd3_light.families.z_image:ZImage",
}
"""`model.type` -> where its class is."""
_CLASSES = {
    "StableDiffusion3Pipeline": "sd3",
    "SD3Transformer2DModel": "sd3",
    "FluxPipeline": "flux",
    "FluxTransformer2DModel": "flux",
    "FluxKontextPipeline": "flux_kontext",
    "Flux2KleinPipeline": "flux2",
    "Flux2Transformer2DModel": "flux2",
    "Krea2Pipeline": "krea2",
    "Krea2Transformer2DModel": "krea2",
    "PRXPipeline": "prx",
    "PRXTransformer2DModel": "prx",
    "QwenImagePipeline": "qwen_image",
    "QwenImageEditPipeline": "qwen_image_edit",
    "QwenImageEditPlusPipeline": "qwen_image_edit_plus",
    "QwenImageTransformer2DModel": "qwen_image",
    "SanaPipeline": "sana",
    "SanaTransformer2DModel": "sana",
    "WanPipeline": "wan",
    "WanTransformer3DModel": "wan",
    "ZImagePipeline": "z_image",
    "ZImageTransformer2DModel": "z_image",
}
"""Class of a pipeline or a denoiser in diffusers -> `model.type`."""
_INDEX = "model_index.json"
_INDEXES = (_INDEX, "modular_model_index.json")
_CONFIGS = (*_INDEXES, "config.json", "transformer/config.json")


def family_of(model: ModelConfig) -> Family:
    """Return the family of a [model] table: the named one, or that of its folder's pipeline.

    Raises UserError for a class that is not a family's, for a file in place of a folder, and for a denoiser without
    its pipeline.
    """
    if model.diffusers_path.is_file():
        raise UserError(
            f"{model.diffusers_path} is a file; give a diffusers folder, with text encoders and VAE (the single file "
            "of an SD3 denoiser is model.init beside it)"
        )
    if model.type != AUTO:
        return family_named(model.type)
    return _pipeline_family(model.diffusers_path)


def family_of_folder(folder: Path) -> Family:
    """Return the family of a diffusers folder, or of a denoiser's folder; SD3 if no file there names a class.

    Raises UserError if its class belongs to no known family.
    """
    return _first_family(folder, _CONFIGS)


def names_family(model: ModelConfig) -> bool:
    """Return whether the family of a [model] table is known: by its type, or by a folder that exists."""
    return model.type != AUTO or (model.diffusers_path / _INDEX).is_file()


def with_family_values(loaded: LoadedConfig) -> LoadedConfig:
    """Return a config with what its family has in place of absent keys, and the lengths of clips that it allows."""
    family = family_of(loaded.train.model)
    step = family.frame_step(loaded.train.model.diffusers_path)
    return replace(
        loaded,
        train=family.completed(loaded.train),
        dataset=with_clip_lengths(loaded.dataset, step),
        eval_datasets={name: with_clip_lengths(dataset, step) for name, dataset in loaded.eval_datasets.items()},
    )


def _pipeline_family(folder: Path) -> Family:
    """Return the family of a pipeline's folder; without an index SD3, whose checks name the missing parts."""
    if any((folder / name).is_file() for name in _INDEXES):
        return _first_family(folder, _INDEXES)
    family = family_of_folder(folder)
    if family.name != "sd3" or (folder / "config.json").is_file():
        raise UserError(
            f"{folder} has a denoiser of {family.title} and no {_INDEX}; give the folder of the whole pipeline, with "
            f"{_INDEX}, VAE and text encoders"
        )
    return family


def _first_family(folder: Path, names: tuple[str, ...]) -> Family:
    """Return the family of the first file that names a class; SD3 if none does."""
    for path in (folder / name for name in names):
        kind = _class_name(path, path.stat().st_mtime_ns) if path.is_file() else None
        if isinstance(kind, str) and kind in _CLASSES:
            return family_named(_CLASSES[kind])
        if kind is not None:
            raise UserError(f"{path} describes a {kind!r:.80}, which is {_why_unknown(kind)}")
    return family_named("sd3")


def _why_unknown(kind: object) -> str:
    """Return why a class that a file names is not trained, and what to do."""
    if isinstance(kind, str) and (reason := why_not_trained(kind)):
        return f"not trained: {reason}"
    known = ", ".join(name for name in _CLASSES if name.endswith("Pipeline"))
    return f"of no known family; give a folder of {known}"


@lru_cache(maxsize=64)
def _class_name(path: Path, modified: int) -> object:
    """Return the class that a JSON file names; ``modified`` is the file's time."""
    try:
        config = read_json_file(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); download or write the folder again") from error
    return config.get("_class_name") if isinstance(config, dict) else None


def family_of_class(kind: type) -> Family | None:
    """Return the family of a denoiser's class, or of the diffusers class that it is made from; None if unknown."""
    names = (_CLASSES[parent.__name__] for parent in kind.__mro__ if parent.__name__ in _CLASSES)
    return next(map(family_named, names), None)


def family_of_file(name: object = None) -> Family:
    """Return the family of an adapter file or single file that is read without a model: SD3 unless it states one."""
    return family_named(name if isinstance(name, str) and name in _FAMILIES else "sd3")


def single_files(family: Family, subject: object) -> SingleFiles:
    """Return a family's single files. Raises UserError about ``subject``, a path, for a family without them."""
    if family.files.single is None:
        known = [other.title for other in map(family_named, _FAMILIES) if other.files.single is not None]
        raise UserError(
            f"{subject}: {family.title} has no single file, only {', '.join(known)} does; use the diffusers folder"
        )
    return family.files.single


def video_titles() -> list[str]:
    """Return the titles of the families that train on clips."""
    return [family.title for family in map(family_named, _FAMILIES) if family.media == "video"]


@cache
def family_named(name: str) -> Family:
    """Return the family with this name, or of a class `package.module:Class` in an installed package.

    Raises UserError if there is no such class, or if it is not a family.
    """
    module, _, kind = _FAMILIES.get(name, name).partition(":")
    if name in _FAMILIES:
        return _made(getattr(import_module(module), kind), name)
    assert is_installed_class(name), name
    try:
        found = getattr(import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model.type = {name!r}: {error}; install the package, or correct the name") from error
    return _made(found, name)


def _made(kind: object, name: str) -> Family:
    if not isinstance(kind, type) or not issubclass(kind, Family):
        raise UserError(f"model.type = {name!r} is not a `sd3_light.core.family.Family`; name a class that is one")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(f"model.type = {name!r} is an unfinished family; it lacks {', '.join(missing)}")
    return kind()


def starting_weights(model: ModelConfig) -> WeightsStart:
    """Return where the denoiser's weights of a [model] table start. Raises UserError if there is no denoiser."""
    return family_of(model).weights.start(model)
