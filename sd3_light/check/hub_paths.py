"""Replace ids of the Hugging Face hub in a config by folders of the hub's local cache."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sd3_light.config import ConfigFaults, DatasetConfig, Fault, LoadedConfig, UserError
from sd3_light.config.base import DataLocation
from sd3_light.config.hub_ids import SCHEME, HubId, hub_id_of
from sd3_light.downloads import download
from sd3_light.model.folder import REQUIRED_PARTS, TRANSFORMER

_FOLDERS = tuple(part.name for part in (*REQUIRED_PARTS, TRANSFORMER) if part.name != ".")
MODEL_FILES = (
    *("model_index.json", "sd3_light*.json", "README.md", "LICENSE*"),
    *(f"{folder}/*{suffix}" for folder in _FOLDERS for suffix in (".json", ".txt", ".model", ".safetensors")),
)
"""The files of an SD3 repository that are downloaded."""
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
            is_model = hub_id.kind == "model"
            folders[hub_id] = download(hub_id, MODEL_FILES, OTHER_VARIANTS) if is_model else download(hub_id)
        except UserError as error:
            faults.append(Fault(file, key, str(error).removeprefix(SCHEME)))
    if faults:
        raise ConfigFaults(list(dict.fromkeys(faults)))
    return _replaced(loaded, folders)


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
