"""One dataset TOML: read, checked table by table, defaults merged into each directory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.config.faults import Fault
from sd3_light.config.schema_dataset import DatasetDefaults, DirectoryConfig
from sd3_light.config.toml_file import read_toml
from sd3_light.config.unsupported import retired_faults
from sd3_light.config.validation import Checked, check_table, show

RANGE_KEYS = ("min_ar", "max_ar", "num_ar_buckets")
AR_KEYS = ("ar_buckets", *RANGE_KEYS)
# A directory's own key puts out of force what it inherits of the other way to say the same thing.
REPLACES = {
    "size_buckets": ("resolutions", "enable_ar_bucket", *AR_KEYS),
    "resolutions": ("size_buckets",),
    "ar_buckets": RANGE_KEYS,
    **dict.fromkeys(RANGE_KEYS, ("ar_buckets",)),
}


@dataclass(frozen=True)
class _Source:
    """One directory: its own keys, its key prefix, what it became, and its faulty keys (inherited ones too)."""

    own: dict[str, Any]
    prefix: str
    config: DirectoryConfig
    bad: frozenset[str]


def load_directories(path: Path) -> tuple[tuple[DirectoryConfig, ...], list[Fault]]:
    """All directories of a dataset TOML and all its faults; with faults, the directories are a best effort."""
    raw, faults = read_toml(path)
    if raw is None:
        return (), faults
    listed = raw.pop("directory", None)
    defaults, default_faults = _checked(DatasetDefaults, raw, path)
    faults += default_faults
    entries, entry_faults = _entries(listed, str(path))
    faults += entry_faults
    sources = []
    for index, entry in entries:
        source, own_faults = _source(entry, index, defaults, path)
        sources.append(source)
        faults += own_faults
    faults += _cross(sources, defaults, str(path))
    return tuple(source.config for source in sources), list(dict.fromkeys(faults))


def _checked(
    schema: type[DatasetDefaults], raw: dict[str, Any], path: Path, prefix: str = "", table: str = ""
) -> tuple[Checked, list[Fault]]:
    retired = retired_faults("dataset", raw, str(path), table, prefix)
    checked = check_table(schema, raw, kind="dataset", file=str(path), base=path.parent, prefix=prefix, table=table)
    return checked, [*retired, *checked.faults]


def _entries(listed: Any, file: str) -> tuple[list[tuple[int, dict[str, Any]]], list[Fault]]:
    allowed = "one [[directory]] table or more"
    if listed is None or listed == []:
        return [], [Fault(file, "directory", "is required and missing", allowed=allowed)]
    if not isinstance(listed, list):
        hint = "write [[directory]], with two brackets" if isinstance(listed, dict) else None
        return [], [Fault(file, "directory", "wrong type", given=show(listed), allowed=allowed, hint=hint)]
    faults = [
        Fault(file, f"directory[{index}]", "wrong type", given=show(entry), allowed="a table")
        for index, entry in enumerate(listed)
        if not isinstance(entry, dict)
    ]
    return [(index, dict(entry)) for index, entry in enumerate(listed) if isinstance(entry, dict)], faults


def _source(entry: dict[str, Any], index: int, defaults: Checked, path: Path) -> tuple[_Source, list[Fault]]:
    prefix = f"directory[{index}]."
    checked, faults = _checked(DirectoryConfig, entry, path, prefix, "directory")
    given = frozenset(entry) | checked.bad
    gone = {other for key in given for other in REPLACES.get(key, ())}
    inherited = {key: value for key, value in defaults.raw.items() if key not in gone | given}
    merged: dict[str, Any] = {"path": "missing", **inherited, **checked.raw}
    if merged.get("shuffle_tags") or merged.get("cache_shuffle_num"):  # either asks for shuffled captions
        merged["shuffle_tags"], merged["cache_shuffle_num"] = True, max(1, merged.get("cache_shuffle_num", 0))
    config = DirectoryConfig.model_validate(merged, context={"base": path.parent})
    return _Source(checked.raw, prefix, config, checked.bad | (defaults.bad - given)), faults


def _cross(sources: list[_Source], defaults: Checked, file: str) -> Iterator[Fault]:
    bucketed = any(source.config.enable_ar_bucket for source in sources)
    if "enable_ar_bucket" not in defaults.bad:
        off = not bucketed and not any("enable_ar_bucket" in source.bad for source in sources)
        yield from _table_cross(defaults.raw, "", off, file)
    for source in sources:
        off = not source.config.enable_ar_bucket and "enable_ar_bucket" not in source.bad
        yield from _table_cross(source.own, source.prefix, off, file)
        yield from _directory_cross(source, defaults.raw, file)


def _table_cross(raw: dict[str, Any], prefix: str, ratios_off: bool, file: str) -> Iterator[Fault]:
    """Keys of one table that exclude each other or have no effect."""
    for key in AR_KEYS:
        if key in raw and ratios_off:
            problem, hint = (
                "has no meaning without enable_ar_bucket = true",
                "write enable_ar_bucket = true, or remove it",
            )
            yield Fault(file, prefix + key, problem, given=show(raw[key]), hint=hint)
    if "size_buckets" in raw:
        for key in ("resolutions", "enable_ar_bucket"):
            if raw.get(key):
                hint = "keep one: size_buckets gives exact sizes"
                yield Fault(file, prefix + key, "given together with size_buckets", given=show(raw[key]), hint=hint)
    if "ar_buckets" in raw and (ranged := [key for key in RANGE_KEYS if key in raw]):
        yield Fault(file, prefix + "ar_buckets", f"given together with {', '.join(ranged)}", hint="keep one way")


def _directory_cross(source: _Source, defaults: dict[str, Any], file: str) -> Iterator[Fault]:
    """What a directory needs, its inherited keys counted; a fault is named where its key stands."""
    config, own = source.config, source.own

    def key(name: str) -> str:
        return name if name not in own and name in defaults else source.prefix + name

    if not config.resolutions and config.size_buckets is None and not source.bad & {"resolutions", "size_buckets"}:
        hint = "give resolutions (or size_buckets) here or at the top of the file"
        yield Fault(file, key("resolutions"), "is required and missing", hint=hint)
    if config.enable_ar_bucket and config.min_ar > config.max_ar and not source.bad & {"min_ar", "max_ar"}:
        name = "min_ar" if "min_ar" in own or "max_ar" not in own else "max_ar"
        yield Fault(file, key(name), "min_ar is above max_ar", given=f"min_ar {config.min_ar}, max_ar {config.max_ar}")
    yield from _shuffle_cross(
        source, {**defaults, **own}, key("cache_shuffle_num"), key("cache_shuffle_delimiter"), file
    )


def _shuffle_cross(source: _Source, given: dict[str, Any], num: str, delimiter: str, file: str) -> Iterator[Fault]:
    if source.bad & {"shuffle_tags", "cache_shuffle_num", "cache_shuffle_delimiter"}:
        return
    tags, count, cut = given.get("shuffle_tags"), given.get("cache_shuffle_num"), given.get("cache_shuffle_delimiter")
    if count and not tags and cut is None:
        hint = "write shuffle_tags = true, or give cache_shuffle_delimiter"
        yield Fault(file, num, "nothing says how captions are cut into parts", given=show(count), hint=hint)
    if cut is not None and not tags and not count:
        hint = "write shuffle_tags = true, or remove it"
        yield Fault(
            file, delimiter, "has no meaning without shuffle_tags or cache_shuffle_num", given=show(cut), hint=hint
        )
