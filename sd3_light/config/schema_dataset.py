"""The dataset TOML: keys that may stand at the top or in a directory, and keys of a directory alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, Le, MinLen
from pydantic import BeforeValidator, Field, Strict

from sd3_light.config.base import Allowed, CacheLocation, Count, CountOrZero, Flag, Positive, Table, Text, TomlPath, bad
from sd3_light.config.faults import UserError
from sd3_light.config.schema_train import Resolution, as_resolution

SIDE_MULTIPLE = 16  # the VAE shrinks by 8 and a patch covers 2
_SIDE = f"sides are multiples of {SIDE_MULTIPLE}"


def parse_resolutions(value: Any) -> tuple[Resolution, ...]:
    """(width, height) pairs from a list of sides or [width, height] pairs; one side alone counts as a list of one."""
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise bad("an empty list")
    found = []
    for item in items:
        resolution = as_resolution(item)
        if resolution is None:
            raise bad("not a list of sides or [width, height] pairs")
        if any(side % SIDE_MULTIPLE for side in resolution):
            raise bad(f"{item} has a side that is not a multiple of {SIDE_MULTIPLE}")
        found.append(resolution)
    if len(set(found)) < len(found):
        raise bad("names one size twice")
    return tuple(found)


def parse_size_buckets(value: Any) -> tuple[Resolution, ...]:
    """(width, height) pairs from a list of them; a third number (frames) is refused."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, list | tuple) for item in value):
        raise bad("not a list of [width, height] pairs")
    if any(len(item) == 3 for item in value):
        raise bad("has a third number (frames): images only, write [width, height]")
    return parse_resolutions(value)


def parse_ratios(value: Any) -> tuple[float, ...]:
    """Ratios width / height from numbers or [width, height] pairs."""
    if not isinstance(value, list | tuple) or not value:
        raise bad("not a list of ratios")
    ratios = []
    for item in value:
        pair = as_resolution(item) if isinstance(item, list | tuple) else None
        if pair is not None:
            ratios.append(pair[0] / pair[1])
        elif isinstance(item, int | float) and not isinstance(item, bool) and 0 < item < float("inf"):
            ratios.append(float(item))
        else:
            raise bad("not a list of ratios above 0 or [width, height] pairs")
    return tuple(ratios)


Resolutions = Annotated[
    tuple[Resolution, ...], BeforeValidator(parse_resolutions), Allowed(f"a list of sides or [width, height]; {_SIDE}")
]
SizeBuckets = Annotated[
    tuple[Resolution, ...], BeforeValidator(parse_size_buckets), Allowed(f"a list of [width, height]; {_SIDE}")
]
Ratios = Annotated[
    tuple[float, ...], BeforeValidator(parse_ratios), Allowed("a list of ratios or [width, height] pairs")
]


class DatasetDefaults(Table):
    """Keys that may stand at the top of a dataset TOML or in a directory, where they win."""

    resolutions: Resolutions = Field(
        default=(),
        description="Training sizes in pixels; a side r means [r, r]. Needed unless `size_buckets` is given.",
    )
    enable_ar_bucket: Flag = Field(
        default=False, description="Sort images into buckets of several shapes; else all get one shape."
    )
    ar_buckets: Ratios | None = Field(
        default=None, description="The buckets' ratios width / height, in place of the next three."
    )
    min_ar: Positive = Field(default=0.5, description="Smallest ratio width / height of a bucket.")
    max_ar: Positive = Field(default=2.0, description="Largest ratio width / height of a bucket.")
    num_ar_buckets: Count = Field(default=7, description="Number of ratios, evenly spaced in their logarithm.")
    size_buckets: SizeBuckets | None = Field(
        default=None, description="The buckets' exact sizes in pixels, in place of `resolutions` and ratios."
    )
    caption_prefix: Text = Field(default="", description="Text put before every caption.")
    num_repeats: Annotated[float, Strict(), Gt(0), Le(10_000)] = Field(
        default=1.0, description="How often a sample appears in an epoch; may be fractional."
    )
    flip: Flag = Field(default=False, description="Cache the mirrored image too, and choose one of both each time.")
    shuffle_tags: Flag = Field(default=False, description="Shuffle the parts of a caption between delimiters.")
    cache_shuffle_num: CountOrZero = Field(
        default=0, description="Shuffled variants cached of each caption; with `shuffle_tags` at least 1."
    )
    cache_shuffle_delimiter: Annotated[str, Strict(), MinLen(1), Allowed("a text that is not empty")] = Field(
        default=", ", description="What separates the parts of a caption."
    )
    subsample_ratio: Annotated[float, Strict(), Gt(0), Le(1)] = Field(
        default=1.0, description="Share of the samples that is used, chosen by their ids."
    )
    image_column: Text = Field(
        default="", description="Column of a table or Parquet that holds the picture or its file. Empty: found by name."
    )
    caption_column: Text = Field(
        default="", description="Column (or JSON key) that holds the captions. Empty: found by name."
    )
    skip_empty_caption: Flag = Field(default=False, description="Leave out samples whose caption is empty or missing.")


class DirectoryConfig(DatasetDefaults):
    """[[directory]]: one source of samples, the dataset's defaults merged in."""

    path: TomlPath = Field(description="Folder (or file) of images, tables, tars or Parquet.")
    mask_path: TomlPath | None = Field(default=None, description="Folder of masks, each named as its image.")
    default_mask_file: TomlPath | None = Field(
        default=None, description="Mask of the images that have none of their own."
    )


class DatasetFile(DatasetDefaults):
    """The dataset TOML as it is written."""

    directory: tuple[DirectoryConfig, ...] = Field(description="One table a source; at least one.")


@dataclass(frozen=True)
class DatasetConfig:
    """A dataset TOML as the program uses it: defaults merged into each directory."""

    path: Path
    cache_dir: CacheLocation
    directories: tuple[DirectoryConfig, ...]

    @property
    def local_cache_dir(self) -> Path:
        """The folder that the cache is built in; a fault of the user where `cache_dir` is a URL."""
        if isinstance(self.cache_dir, str):
            raise UserError(
                f"cache_dir: {self.cache_dir} is a URL, and a cache is built in a folder: give a local cache_dir, then "
                "copy the folder there"
            )
        return self.cache_dir
