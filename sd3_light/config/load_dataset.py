"""Loads one dataset TOML: checks each table and merges the defaults into each directory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd3_light.config.faults import MOST_SHOWN, Fault, UserError
from sd3_light.config.schema_dataset import DatasetDefaults, DirectoryConfig
from sd3_light.config.toml_file import read_toml
from sd3_light.config.unsupported import pop_unsupported
from sd3_light.config.validation import CheckedTable, check_table, format_value, looks_like

RANGE_KEYS = ("min_ar", "max_ar", "num_ar_buckets")
AR_KEYS = ("ar_buckets", *RANGE_KEYS)
# A key of a directory overrides the inherited keys that set the same thing in another way.
OVERRIDES = {
    "size_buckets": ("resolutions", "enable_ar_bucket", *AR_KEYS),
    "resolutions": ("size_buckets",),
    "ar_buckets": RANGE_KEYS,
    **dict.fromkeys(RANGE_KEYS, ("ar_buckets",)),
}


@dataclass(frozen=True)
class _Source:
    """One directory: its own keys, its key prefix, the merged config, and its faulty keys (inherited ones included)."""

    own: dict[str, Any]
    prefix: str
    config: DirectoryConfig
    faulty_keys: frozenset[str]


def load_directories(path: Path, text: str | None = None) -> tuple[tuple[DirectoryConfig, ...], list[Fault]]:
    """Return all directories of a dataset TOML, or of a ``text`` in its place, and all its faults.

    Faulty keys keep their defaults.
    """
    raw, faults = read_toml(path, text)
    if raw is None:
        return (), faults
    if looks_like(raw) == "train":
        hint = "give a dataset TOML, with one [[directory]] or more"
        return (), [Fault(str(path), "directory", "this is a train TOML, not a dataset TOML", hint=hint)]
    directories = raw.pop("directory", None)
    defaults, default_faults = _check(DatasetDefaults, raw, path)
    faults += default_faults
    entries, entry_faults = _entries(directories, str(path))
    faults += entry_faults
    sources = []
    for index, entry in entries:
        source, own_faults = _source(entry, index, defaults, path, is_shown=len(faults) < MOST_SHOWN)
        sources.append(source)
        faults += own_faults
    faults += _cross_faults(sources, defaults, str(path))
    return tuple(source.config for source in sources), list(dict.fromkeys(faults))


def directory_from_arguments(values: Mapping[str, Any], caller: str) -> DirectoryConfig:
    """Validate the arguments of ``caller`` as a `[[directory]]`. Relative paths start at the working directory."""
    defaults = CheckedTable({}, (), frozenset())
    file = Path.cwd() / caller
    source, faults = _source(dict(values), 0, defaults, file)
    for fault in [*faults, *_cross_faults([source], defaults, str(file))]:
        raise UserError(str(replace(fault, file=caller, key=fault.key.removeprefix(source.prefix))))
    return source.config


def _check(
    schema: type[DatasetDefaults],
    raw: dict[str, Any],
    path: Path,
    prefix: str = "",
    table: str = "",
    is_shown: bool = True,
) -> tuple[CheckedTable, list[Fault]]:
    """Check a table; ``is_shown`` says whether the report shows its faults."""
    unsupported = pop_unsupported("dataset", raw, str(path), table, prefix)
    kind = "dataset" if is_shown else None
    checked = check_table(schema, raw, file_kind=kind, file=str(path), base=path.parent, prefix=prefix, table=table)
    return checked, [*unsupported, *checked.faults]


def _entries(directories: Any, file: str) -> tuple[list[tuple[int, dict[str, Any]]], list[Fault]]:
    allowed = "one [[directory]] table or more"
    if directories is None or directories == []:
        return [], [Fault(file, "directory", "is required and missing", allowed=allowed)]
    if not isinstance(directories, list):
        hint = "write [[directory]], with two brackets" if isinstance(directories, dict) else None
        return [], [Fault(file, "directory", "wrong type", value=format_value(directories), allowed=allowed, hint=hint)]
    faults = [
        Fault(file, f"directory[{index}]", "wrong type", value=format_value(entry), allowed="a table")
        for index, entry in enumerate(directories)
        if not isinstance(entry, dict)
    ]
    return [(index, dict(entry)) for index, entry in enumerate(directories) if isinstance(entry, dict)], faults


def _source(
    entry: dict[str, Any], index: int, defaults: CheckedTable, path: Path, is_shown: bool = True
) -> tuple[_Source, list[Fault]]:
    prefix = f"directory[{index}]."
    checked, faults = _check(DirectoryConfig, entry, path, prefix, "directory", is_shown)
    own_keys = frozenset(entry) | checked.faulty_keys
    overridden = {other for key in own_keys for other in OVERRIDES.get(key, ())}
    inherited = {key: value for key, value in defaults.raw.items() if key not in overridden | own_keys}
    merged: dict[str, Any] = {"path": "missing", **inherited, **checked.raw}
    if merged.get("shuffle_tags") or merged.get("cache_shuffle_num"):  # either key turns shuffling on
        merged["shuffle_tags"] = True
        merged["cache_shuffle_num"] = max(1, merged.get("cache_shuffle_num", 0))
    config = DirectoryConfig.model_validate(merged, context={"base": path.parent})
    return _Source(checked.raw, prefix, config, checked.faulty_keys | (defaults.faulty_keys - own_keys)), faults


def _cross_faults(sources: list[_Source], defaults: CheckedTable, file: str) -> Iterator[Fault]:
    any_buckets = any(source.config.enable_ar_bucket for source in sources)
    if "enable_ar_bucket" not in defaults.faulty_keys:
        buckets_off = not any_buckets and not any("enable_ar_bucket" in source.faulty_keys for source in sources)
        yield from _table_faults(defaults.raw, "", buckets_off, file)
    for source in sources:
        buckets_off = not source.config.enable_ar_bucket and "enable_ar_bucket" not in source.faulty_keys
        yield from _table_faults(source.own, source.prefix, buckets_off, file)
        yield from _directory_faults(source, defaults.raw, file)


def _table_faults(raw: dict[str, Any], prefix: str, buckets_off: bool, file: str) -> Iterator[Fault]:
    """Find keys of one table that exclude each other or have no effect."""

    def fault(key: str, problem: str, hint: str) -> Fault:
        return Fault(file, prefix + key, problem, value=format_value(raw[key]), hint=hint)

    for key in AR_KEYS:
        if key in raw and buckets_off:
            hint = "write enable_ar_bucket = true, or remove it"
            yield fault(key, "has no effect without enable_ar_bucket = true", hint)
    if "size_buckets" in raw:
        for key in ("resolutions", "enable_ar_bucket"):
            if raw.get(key):
                yield fault(key, "conflicts with size_buckets", "keep one: size_buckets sets exact sizes")
    if "ar_buckets" in raw and (range_keys := [key for key in RANGE_KEYS if key in raw]):
        yield fault("ar_buckets", f"conflicts with {', '.join(range_keys)}", "keep one or the other")


def _directory_faults(source: _Source, defaults: dict[str, Any], file: str) -> Iterator[Fault]:
    """Check a directory with its inherited keys. A fault names the table that contains the key."""
    config = source.config
    values = {**defaults, **source.own}

    def are_valid(*keys: str) -> bool:
        return source.faulty_keys.isdisjoint(keys)

    def fault(key: str, problem: str, hint: str | None = None) -> Fault:
        prefix = "" if key not in source.own and key in defaults else source.prefix
        return Fault(file, prefix + key, problem, format_value(values[key]) if key in values else None, hint=hint)

    if not config.resolutions and config.size_buckets is None and are_valid("resolutions", "size_buckets"):
        hint = "give resolutions (or size_buckets) here or at the top of the file"
        yield fault("resolutions", "is required and missing", hint)
    if config.enable_ar_bucket and config.min_ar > config.max_ar and are_valid("min_ar", "max_ar"):
        key = "min_ar" if "min_ar" in source.own or "max_ar" not in source.own else "max_ar"
        yield fault(key, f"min_ar is greater than max_ar: {config.min_ar} and {config.max_ar}")
    if config.fps is not None and config.frames is None and are_valid("fps", "frames"):
        yield fault("fps", "has no effect without frames", "write how many frames a clip has, such as frames = 81")
    if config.rejected is not None and config.frames is not None and are_valid("rejected", "frames"):
        yield fault("frames", "conflicts with rejected", "remove one: preferences are pairs of images")
    weights = config.caption_weights
    columns = config.caption_columns
    if weights and len(weights) != len(columns) and are_valid("caption_column", "caption_weights"):
        problem = f"{len(weights)} weights for {len(columns)} columns of captions"
        yield fault("caption_weights", problem, "give one for each entry of caption_column")
    if are_valid("shuffle_tags", "cache_shuffle_num", "cache_shuffle_delimiter"):
        yield from _shuffling_faults(values, fault)


def _shuffling_faults(values: dict[str, Any], fault: Callable[[str, str, str], Fault]) -> Iterator[Fault]:
    """Find keys of shuffled captions that have no effect without others."""
    is_shuffled = values.get("shuffle_tags")
    num = values.get("cache_shuffle_num")
    has_delimiter = "cache_shuffle_delimiter" in values
    unused = "has no effect without shuffle_tags or cache_shuffle_num"
    for key in ("keep_tokens", "tag_dropout"):
        if values.get(key) and not is_shuffled and not num:
            yield fault(key, unused, "write shuffle_tags = true")
    if num and not is_shuffled and not has_delimiter:
        hint = "write shuffle_tags = true, or give cache_shuffle_delimiter"
        yield fault("cache_shuffle_num", "nothing defines how captions are split", hint)
    if has_delimiter and not is_shuffled and not num:
        yield fault("cache_shuffle_delimiter", unused, "write shuffle_tags = true, or remove it")
