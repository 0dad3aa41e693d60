"""TOML files -> one frozen, checked config, or one report of everything that is wrong with them."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd3_light.config.base import CacheLocation, against, tables
from sd3_light.config.cross_checks import run_cross_checks
from sd3_light.config.faults import ConfigFaults, Fault
from sd3_light.config.load_dataset import load_directories
from sd3_light.config.schema_dataset import DatasetConfig, DirectoryConfig
from sd3_light.config.schema_train import ALIASES, BatchSize, Resolution, TrainConfig, named_entry
from sd3_light.config.sizes import SIZES
from sd3_light.config.toml_file import SET, apply_overrides, read_toml
from sd3_light.config.unsupported import retired_faults
from sd3_light.config.validation import check_table, show

# Stand-ins that let the cross checks run when required keys are missing or faulty.
_PLACEHOLDERS = {"output_dir": "missing", "dataset": "missing.toml"}


@dataclass(frozen=True)
class LoadedConfig:
    """A train TOML and the dataset TOMLs it names, all sound."""

    path: Path
    train: TrainConfig
    dataset: DatasetConfig
    eval_datasets: dict[str, DatasetConfig]


@dataclass(frozen=True)
class _Train:
    """The train TOML as far as it is sound."""

    config: TrainConfig
    bad: frozenset[str]
    faults: list[Fault]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Read and check a train TOML and its dataset TOMLs; all their faults are raised at once as `ConfigFaults`.

    `overrides` are `key.path=VALUE` texts that go over the train TOML before it is checked.
    """
    path = Path(os.path.abspath(path))
    raw, faults = read_toml(path)
    faults += [] if raw is None else _unalias(raw, str(path))
    set_keys, set_faults = apply_overrides({} if raw is None else raw, overrides)
    faults += set_faults
    if raw is None:
        raise ConfigFaults(faults)
    train = _load_train(raw, path)
    datasets, dataset_faults = _load_datasets(train, raw, path)
    faults += train.faults + dataset_faults
    if faults:
        nothing = DatasetConfig(path, cache_dir_of(train.config, "", path), ())
        partial = LoadedConfig(path, train.config, datasets.pop("", nothing), datasets)
        raise ConfigFaults([_blame(fault, str(path), set_keys) for fault in dict.fromkeys(faults)], partial)
    return LoadedConfig(path, train.config, datasets.pop(""), datasets)


def _blame(fault: Fault, file: str, set_keys: set[str]) -> Fault:
    """A fault of a key that the command line set is the command line's."""
    hit = any(fault.key == key or fault.key.startswith((f"{key}.", f"{key}[")) for key in set_keys)
    return replace(fault, file=SET) if hit and fault.file == file else fault


def _load_train(raw: dict[str, Any], path: Path) -> _Train:
    file = str(path)
    faults = list(_retired(raw, file))
    gone = frozenset(fault.key for fault in faults)
    checked = check_table(TrainConfig, raw, kind="train", file=file, base=path.parent)
    bad = checked.bad | gone
    sound = {**_PLACEHOLDERS, **checked.raw}
    sound["model"] = {"diffusers_path": "missing", **sound.get("model", {})}
    config = TrainConfig.model_validate(sound, context={"base": path.parent})
    faults += checked.faults
    faults += [Fault(file, **vars(finding)) for finding in run_cross_checks(config, bad)]
    return _Train(config, bad, faults)


def _unalias(raw: dict[str, Any], file: str) -> Iterator[Fault]:
    """Give keys of two spellings their one name."""
    for alias, key in ALIASES.items():
        if alias not in raw:
            continue
        value = raw.pop(alias)
        if raw.setdefault(key, value) != value:
            given = f"{alias} = {show(value)}, {key} = {show(raw[key])}"
            yield Fault(file, key, "two spellings of one key disagree", given=given, hint="keep one")


def _retired(raw: dict[str, Any], file: str) -> Iterator[Fault]:
    for name, _ in tables(TrainConfig):
        table = raw.get(name) if name else raw
        if isinstance(table, dict):
            yield from retired_faults("train", table, file, name, f"{name}." if name else "")


def _eval_entries(raw: dict[str, Any], base: Path) -> Iterator[tuple[str, str, Path]]:
    """(name, key, TOML) of every eval dataset that can be told, whatever is wrong with the others."""
    listed = raw.get("eval_datasets")
    for index, value in enumerate(listed if isinstance(listed, list) else []):
        entry = named_entry(value)
        if isinstance(entry, dict) and isinstance(entry.get("config"), str) and entry["config"]:
            yield str(entry.get("name")), f"eval_datasets[{index}]", against(base, entry["config"])


def _load_datasets(train: _Train, raw: dict[str, Any], path: Path) -> tuple[dict[str, DatasetConfig], list[Fault]]:
    """The dataset TOML under "", each eval dataset TOML under its name; what cannot be read is left out."""
    named = [] if "dataset" in train.bad else [("", "dataset", train.config.dataset)]
    named += _eval_entries(raw, path.parent)
    found: dict[str, DatasetConfig] = {}
    faults: list[Fault] = []
    for name, key, toml in named:
        if not toml.is_file():
            hint = "relative paths are taken from the folder of the TOML"
            faults.append(Fault(str(path), key, "no such file", given=str(toml), hint=hint))
            continue
        directories, more = load_directories(toml)
        faults += more
        faults += _joint_faults(train, name, directories, str(path), toml)
        found[name] = DatasetConfig(toml, cache_dir_of(train.config, name, toml), directories)
    return found, faults


def cache_dir_of(train: TrainConfig, name: str, toml: Path) -> CacheLocation:
    """Where a dataset's cache lies; `name` is "" for the training set."""
    place, ending = train.cache_dir, f"-eval-{name}" if name else ""
    if place is None:
        return toml.with_suffix(".cache")
    return place + ending if isinstance(place, str) else place.with_name(place.name + ending)


def _joint_faults(
    train: _Train, dataset: str, directories: tuple[DirectoryConfig, ...], file: str, toml: Path
) -> Iterator[Fault]:
    """What the train TOML and one dataset TOML must agree on."""
    where = {size: "resolutions" for one in directories for size in one.resolutions}
    where |= {size: "size_buckets" for one in directories for size in one.size_buckets or ()}
    key = "eval_micro_batch_size_per_gpu" if dataset else "micro_batch_size_per_gpu"
    written = key if key in train.config.model_fields_set else "micro_batch_size_per_gpu"
    if not train.bad & {key, written}:
        yield from _batch_faults(getattr(train.config, key), sorted(where), written, file, toml)
    size = train.config.model.size
    if size is None or train.bad & {"model", "model.size"}:
        return
    limit = SIZES[size].pos_embed_max_size * 16
    for (width, height), name in where.items():
        if max(width, height) > limit:
            problem, hint = f"the position table of size {size} ends at {limit} px", "choose another model.size"
            yield Fault(str(toml), name, problem, given=f"[{width}, {height}]", hint=hint)


def _batch_faults(batch: BatchSize, asked: list[Resolution], key: str, file: str, toml: Path) -> Iterator[Fault]:
    if isinstance(batch, int):
        return
    for width, height in asked:
        if (width, height) not in dict(batch):
            side = str(width) if width == height else f"[{width}, {height}]"
            yield Fault(file, key, f"has no size for the resolution {side} of {toml}", hint=f"add [{side}, SIZE]")
