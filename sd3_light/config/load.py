"""Loads TOML files into one frozen, checked config, or raises one report of everything wrong with them."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from sd3_light.config.base import CacheLocation, absolute_path, walk_tables
from sd3_light.config.cross_checks import adapter_faults, run_cross_checks
from sd3_light.config.family_keys import foreign_keys
from sd3_light.config.faults import ConfigFaults, Fault, UserError
from sd3_light.config.load_dataset import directory_from_arguments, load_directories
from sd3_light.config.schema_dataset import DatasetConfig, DirectoryConfig
from sd3_light.config.schema_objective import PAIRED
from sd3_light.config.schema_tables import AdapterConfig
from sd3_light.config.schema_train import ALIASES, BatchSize, TrainConfig, named_entry
from sd3_light.config.sizes import SIZES
from sd3_light.config.toml_file import SET, apply_overrides, read_toml
from sd3_light.config.unsupported import family_fault, pop_unsupported
from sd3_light.config.validation import check_table, format_value, is_secret_key, looks_like

VALIDATION = "validation"
"""Name of the evaluation set that is held out of the dataset itself."""
FOLDER_RESOLUTION = 128
"""Side in pixels of a folder's images where no dataset TOML says another: that of the icons recipe."""
# Values that let the cross checks run when required keys are missing or faulty.
_PLACEHOLDERS = {"output_dir": "missing", "dataset": "missing.toml"}


@dataclass(frozen=True)
class LoadedConfig:
    """A valid train TOML and the valid dataset TOMLs it names."""

    path: Path
    train: TrainConfig
    dataset: DatasetConfig
    eval_datasets: dict[str, DatasetConfig]

    @property
    def evaluates(self) -> bool:
        """Whether it has evaluation sets, or a part of the dataset is held out."""
        return bool(self.eval_datasets) or self.dataset.is_divided


@dataclass(frozen=True)
class _TrainToml:
    """The valid part of a train TOML, its faulty keys and its faults."""

    config: TrainConfig
    faulty_keys: frozenset[str]
    faults: list[Fault]


def load_config(path: str | Path, overrides: Iterable[str] = (), text: str | None = None) -> LoadedConfig:
    """Read and check a train TOML and its dataset TOMLs. Raises `ConfigFaults` with all their faults at once.

    `overrides` are `key.path=VALUE` strings, applied to the train TOML before it is checked. `text` is taken in place
    of what the file has.
    """
    path = Path(os.path.abspath(path))
    raw, faults = read_toml(path, text)
    if raw is not None and looks_like(raw) == "dataset":
        hint = "give the train TOML that names it: dataset = ..."
        raise ConfigFaults([Fault(str(path), "directory", "this is a dataset TOML, not a train TOML", hint=hint)])
    faults += [] if raw is None else _unalias(raw, str(path))
    set_keys, set_faults = apply_overrides({} if raw is None else raw, overrides)
    faults += set_faults
    if raw is None:
        raise ConfigFaults(faults)
    if fault := family_fault(raw, str(path)):
        raise ConfigFaults([_name_origin(fault, str(path), set_keys)])
    train = _load_train(raw, path)
    datasets, dataset_faults = _load_datasets(train, raw, path)
    faults += train.faults + dataset_faults
    if faults:
        no_data = DatasetConfig(path, _cache_location(train.config.cache_dir, "", path), ())
        partial = LoadedConfig(path, train.config, datasets.pop("", no_data), datasets)
        raise ConfigFaults([_name_origin(fault, str(path), set_keys) for fault in dict.fromkeys(faults)], partial)
    return LoadedConfig(path, train.config, datasets.pop(""), datasets)


def load_dataset(path: str | Path, text: str | None = None) -> DatasetConfig:
    """Read and check a dataset TOML alone, or a `text` in its place. Raises `ConfigFaults` with all its faults."""
    path = Path(os.path.abspath(path))
    directories, faults = load_directories(path, text)
    if faults:
        raise ConfigFaults(faults)
    return DatasetConfig(path, path.with_suffix(".cache"), directories)


def load_images(path: str | Path) -> DatasetConfig:
    """Read a dataset TOML, or take a folder of captioned images as a dataset of 128 px."""
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        return load_dataset(path)
    values = {"path": str(path), "resolutions": [FOLDER_RESOLUTION], "skip_empty_caption": True}
    return DatasetConfig(path, path.with_suffix(".cache"), (directory_from_arguments(values, str(path)),))


def _name_origin(fault: Fault, file: str, set_keys: set[str]) -> Fault:
    """Name `--set` instead of the file if the command line set the faulty key."""
    is_set = any(fault.key == key or fault.key.startswith((f"{key}.", f"{key}[")) for key in set_keys)
    return replace(fault, file=SET) if is_set and fault.file == file else fault


def _load_train(raw: dict[str, Any], path: Path) -> _TrainToml:
    file = str(path)
    faults = list(_pop_unsupported(raw, file))
    checked = check_table(TrainConfig, raw, file_kind="train", file=file, base=path.parent)
    faulty_keys = checked.faulty_keys | {fault.key for fault in faults}
    values = {**_PLACEHOLDERS, **checked.raw}
    values["model"] = {"diffusers_path": "missing", **values.get("model", {})}
    if any(key.startswith("model.shape.") for key in faulty_keys):
        del values["model"]["shape"]  # its required keys have no placeholders
    for table in ("metrics", "objective", "reward"):
        if any(key.startswith(f"{table}.") for key in faulty_keys):
            del values[table]
    config = TrainConfig.model_validate(values, context={"base": path.parent})
    faults += checked.faults
    faults += [replace(fault, file=file) for fault in run_cross_checks(config, faulty_keys)]
    return _TrainToml(config, faulty_keys, faults)


def _unalias(raw: dict[str, Any], file: str) -> Iterator[Fault]:
    """Rename keys that have two spellings; differing values are a fault."""
    for alias, key in ALIASES.items():
        if alias not in raw:
            continue
        value = raw.pop(alias)
        if raw.setdefault(key, value) != value:
            spellings = f"{alias} = {format_value(value)}, {key} = {format_value(raw[key])}"
            yield Fault(file, key, "two spellings of the same key disagree", value=spellings, hint="keep one")


def _pop_unsupported(raw: dict[str, Any], file: str) -> Iterator[Fault]:
    for name, _ in walk_tables(TrainConfig):
        table = raw.get(name) if name else raw
        if isinstance(table, dict):
            yield from pop_unsupported("train", table, file, name, f"{name}." if name else "")


def _eval_entries(raw: dict[str, Any], base: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (name, key, TOML) of every eval dataset that has a path, even if other entries are faulty."""
    entries = raw.get("eval_datasets")
    for index, value in enumerate(entries if isinstance(entries, list) else []):
        entry = named_entry(value)
        if isinstance(entry, dict) and isinstance(entry.get("config"), str) and entry["config"]:
            with suppress(ValueError):  # an impossible path is a fault of its key
                yield str(entry.get("name")), f"eval_datasets[{index}]", absolute_path(base, entry["config"])


def _load_datasets(train: _TrainToml, raw: dict[str, Any], path: Path) -> tuple[dict[str, DatasetConfig], list[Fault]]:
    """Load the dataset TOML under the name "" and each eval dataset TOML under its own; missing files are left out."""
    entries = [] if "dataset" in train.faulty_keys else [("", "dataset", train.config.dataset)]
    entries += _eval_entries(raw, path.parent)
    compared = len(entries) > 1 or train.config.metrics is not None
    datasets: dict[str, DatasetConfig] = {}
    faults: list[Fault] = []
    for name, key, toml in entries:
        if not toml.exists():
            hint = "relative paths start at the folder of the TOML file"
            faults.append(Fault(str(path), key, "no such file", value=str(toml), hint=hint))
            continue
        directories, directory_faults = load_directories(toml)
        faults += directory_faults
        faults += _joint_faults(train, name, directories, str(path), toml)
        location = _cache_location(train.config.cache_dir, name, toml)
        dataset = DatasetConfig(toml, location, directories)
        datasets[name] = replace(dataset, compared=compared or dataset.is_divided)
    return datasets, [*faults, *_split_faults(datasets, str(path))]


def _cache_location(cache_dir: CacheLocation | None, name: str, toml: Path) -> CacheLocation:
    """Return the cache location of a dataset; `name` is "" for the training set."""
    if cache_dir is None:
        return toml.with_suffix(".cache")
    suffix = f"-eval-{name}" if name else ""
    return cache_dir + suffix if isinstance(cache_dir, str) else cache_dir.with_name(cache_dir.name + suffix)


def _joint_faults(
    train: _TrainToml, dataset: str, directories: tuple[DirectoryConfig, ...], file: str, toml: Path
) -> Iterator[Fault]:
    """Find disagreements between the train TOML and one dataset TOML."""
    sizes = {size: "resolutions" for directory in directories for size in directory.resolutions}
    sizes |= {size: "size_buckets" for directory in directories for size in directory.size_buckets or ()}
    key = "eval_micro_batch_size_per_gpu" if dataset else "micro_batch_size_per_gpu"
    written_key = key if key in train.config.model_fields_set else "micro_batch_size_per_gpu"
    batch_size: BatchSize = getattr(train.config, key)
    if not isinstance(batch_size, int) and not train.faulty_keys & {key, written_key}:
        for width, height in sorted(sizes.keys() - dict(batch_size).keys()):
            side = str(width) if width == height else f"[{width}, {height}]"
            problem = f"has no size for the resolution {side} of {toml}"
            hint = f"add [{side}, SIZE]"
            yield Fault(file, written_key, problem, hint=hint)
    yield from _pair_faults(train, not dataset, directories, file, toml)
    model_size = train.config.model.size
    if model_size is None or train.faulty_keys & {"model", "model.size"}:
        return
    limit = SIZES[model_size].pos_embed_max_size * 16
    for (width, height), name in sizes.items():
        if max(width, height) > limit:
            problem = f"the position table of size {model_size} ends at {limit} px"
            yield Fault(str(toml), name, problem, value=f"[{width}, {height}]", hint="choose another model.size")


def _split_faults(datasets: Mapping[str, DatasetConfig], file: str) -> Iterator[Fault]:
    """Find evaluation sets that would be divided, and one with the name of the part that is held out."""
    for name, dataset in datasets.items():
        if name and dataset.is_divided:
            hint = "remove it: all images of an evaluation set are held out"
            yield Fault(str(dataset.path), "validation", "only the training set is divided", value="true", hint=hint)
    if "" in datasets and datasets[""].is_divided and VALIDATION in datasets:
        problem = "is the name of the part of the dataset that is held out"
        hint = "give {name = ..., config = ...}"
        yield Fault(file, "eval_datasets", problem, value=f'"{VALIDATION}"', hint=hint)


def _pair_faults(
    train: _TrainToml, trains: bool, directories: tuple[DirectoryConfig, ...], file: str, toml: Path
) -> Iterator[Fault]:
    """Find directories without rejected images where other directories, or the objective, have them."""
    missing = [index for index, directory in enumerate(directories) if directory.rejected is None]
    terms = [name for name in PAIRED if name in train.config.terms.tables()]
    if trains and missing and terms:
        problem = f"needs a rejected image beside every image, and directory[{missing[0]}] of {toml} names none"
        yield Fault(file, f"objective.{terms[0]}", problem, hint='write rejected = "FOLDER" in every [[directory]]')
    elif missing and len(missing) < len(directories):
        problem = "is missing here and given in other directories, whose samples share batches"
        yield Fault(str(toml), f"directory[{missing[0]}].rejected", problem, hint="write it in all of them, or in none")


def adapter_from_arguments(values: Mapping[str, Any], caller: str) -> AdapterConfig:
    """Validate the arguments of ``caller`` as the `[adapter]` table. Relative paths start at the working directory."""
    base = Path.cwd()
    for fault in check_table(AdapterConfig, values, file_kind="train", file=caller, base=base, table="adapter").faults:
        raise UserError(str(fault))
    adapter = AdapterConfig.model_validate(dict(values), context={"base": base})
    for fault in adapter_faults(adapter):
        raise UserError(str(replace(fault, file=caller, key=fault.key.removeprefix("adapter."))))
    return adapter


def resolved_toml(loaded: LoadedConfig) -> str:
    """Return TOML text without secrets that `load_config` reads back as an equal config, apart from its own path."""
    table = loaded.train.model_dump()
    for key in foreign_keys(loaded.train.model, loaded.train.model.type):
        del table["model"][key]
    return tomli_w.dumps(_plain_table(table))


def _plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """Drop absent and secret keys. Scalars come first, as TOML requires: keys after a table belong to that table."""
    plain = {key: _plain(value) for key, value in table.items() if value is not None and not is_secret_key(key)}
    return dict(sorted(plain.items(), key=lambda item: isinstance(item[1], dict)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain_table(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
