"""Replace ids of the Hugging Face hub in a config by folders of the hub's local cache."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sd3_light.config import ConfigFaults, DatasetConfig, Fault, LoadedConfig, ModelConfig, UserError
from sd3_light.config.base import DataLocation
from sd3_light.config.hub_ids import SCHEME, HubId, hub_id_of
from sd3_light.core.registry import family_of
from sd3_light.downloads import download
from sd3_light.model.folder import components

_TOP_FILES = ("model_index.json", "modular_model_index.json", "sd3_light*.json", "README.md", "LICENSE*")
_CONFIGS = ("transformer/config.json", "vae/config.json")
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".safetensors")
OTHER_VARIANTS = ("*.fp16*", "*.bf16*")
"""Copies of the weights in another dtype, which are not."""


def hub_keys(loaded: LoadedConfig) -> Iterator[tuple[str, str, HubId]]:
    """Yield file, key and id of everything that a config takes from the hub."""
    if model := hub_id_of(loaded.train.model.diffusers_path):
        yield str(loaded.path), "model.diffusers_path", model
    for dataset in (loaded.dataset, *loaded.eval_datasets.values()):
        for index, directory in enumerate(dataset.directories):
            if data := hub_id_of(directory.path):
                yield str(dataset.path), f"directory[{index}].path", data


def with_local_paths(loaded: LoadedConfig) -> LoadedConfig:
    """Download what a config takes from the hub. Raises a report of everything that is not available."""
    folders: dict[HubId, Path] = {}
    faults = []
    for file, key, hub_id in hub_keys(loaded):
        try:
            folders[hub_id] = (
                _download_model(hub_id, loaded.train.model) if hub_id.kind == "model" else download(hub_id)
            )
        except UserError as error:
            faults.append(Fault(file, key, str(error).removeprefix(SCHEME)))
    if faults:
        raise ConfigFaults(list(dict.fromkeys(faults)))
    return _replaced(loaded, folders)


def _download_model(hub_id: HubId, model: ModelConfig) -> Path:
    """Download the parts that a repository's `model_index.json` names, after the configs that may refuse it."""
    folder = download(hub_id, (*_TOP_FILES, *_CONFIGS))
    family = family_of(model.model_copy(update={"diffusers_path": folder}))
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{hub_id}: the repository has no model_index.json, so it is not a diffusers folder; give one")
    if all((folder / name).is_file() for name in _CONFIGS) and (reason := family.refusal(folder)):
        raise UserError(f"{hub_id}: {reason}")
    files = (f"{name}/*{suffix}" for name in components(folder) for suffix in _SUFFIXES)
    return download(hub_id, (*_TOP_FILES, *files), OTHER_VARIANTS)


def _replaced(loaded: LoadedConfig, folders: dict[HubId, Path]) -> LoadedConfig:
    def local(path: DataLocation) -> DataLocation:
        hub_id = hub_id_of(path)
        return path if hub_id is None else folders[hub_id]

    def local_dataset(dataset: DatasetConfig) -> DatasetConfig:
        directories = tuple(d.model_copy(update={"path": local(d.path)}) for d in dataset.directories)
        return replace(dataset, directories=directories)

    model = loaded.train.model
    model = model.model_copy(update={"diffusers_path": local(model.diffusers_path)})
    return replace(
        loaded,
        train=loaded.train.model_copy(update={"model": model}),
        dataset=local_dataset(loaded.dataset),
        eval_datasets={name: local_dataset(dataset) for name, dataset in loaded.eval_datasets.items()},
    )
