"""The dataset TOML: keys for the top level or a directory, and keys for a directory only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BeforeValidator, Strict

from sd3_light.config.base import (
    SIDE_RULE,
    Allowed,
    CacheLocation,
    CountOrZero,
    Decay,
    Flag,
    Fraction,
    Positive,
    Resolution,
    Table,
    TomlLocation,
    TomlPath,
    TomlString,
    as_resolution,
    check_sides,
    invalid_value,
    is_count,
)
from sd3_light.config.condition import ConditionError, parse_condition
from sd3_light.config.hub_ids import DataPath, repo_or_name

MOST_FRAMES = 10_000
"""A limit of `frames` that only a mistake reaches."""


def parse_resolutions(value: Any) -> tuple[Resolution, ...]:
    """Return (width, height) pairs from a list of sides or [width, height] pairs, or from a single side."""
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise invalid_value("an empty list")
    resolutions = []
    for item in items:
        resolution = as_resolution(item)
        if resolution is None:
            raise invalid_value("not a list of sides or [width, height] pairs")
        check_sides(resolution, item)
        resolutions.append(resolution)
    if len(set(resolutions)) < len(resolutions):
        raise invalid_value("contains the same size twice")
    return tuple(resolutions)


def parse_size_buckets(value: Any) -> tuple[Resolution, ...]:
    """Return (width, height) pairs from a list of pairs. A third number (frames) is rejected."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, list | tuple) for item in value):
        raise invalid_value("not a list of [width, height] pairs")
    if any(len(item) == 3 for item in value):
        raise invalid_value("has a third number: write [width, height], and how long clips are with the key frames")
    return parse_resolutions(value)


def parse_frames(value: Any) -> int | tuple[int, ...]:
    """Return a number of frames, or several different ones in rising order."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or not all(is_count(number) and number <= MOST_FRAMES for number in numbers):
        raise invalid_value("not a number of frames or a list of them")
    if len(set(numbers)) < len(numbers):
        raise invalid_value("contains the same number twice")
    return tuple(sorted(numbers)) if isinstance(value, list | tuple) else int(value)


def parse_ratios(value: Any) -> tuple[float, ...]:
    """Return ratios width / height from numbers or [width, height] pairs."""
    if not isinstance(value, list | tuple) or not value:
        raise invalid_value("not a list of ratios")
    ratios = []
    for item in value:
        pair = as_resolution(item) if isinstance(item, list | tuple) else None
        if pair is not None:
            ratios.append(pair[0] / pair[1])
        elif isinstance(item, int | float) and not isinstance(item, bool) and 0 < item < float("inf"):
            ratios.append(float(item))
        else:
            raise invalid_value("not a list of ratios above 0 or [width, height] pairs")
    return tuple(ratios)


def check_condition(value: Any) -> Any:
    """Return ``value`` if it is an expression that `where` supports."""
    if isinstance(value, str):
        try:
            parse_condition(value)
        except ConditionError as error:
            raise invalid_value(str(error)) from error
    return value


Where = Annotated[
    str, Strict(), BeforeValidator(check_condition), Allowed('a condition, such as "aesthetic > 5.5 and width >= 512"')
]


def parse_columns(value: Any) -> str | tuple[str, ...]:
    """Return the name of one column, or the names of several different ones."""
    if isinstance(value, str):
        return value
    names = value if isinstance(value, list | tuple) else []
    if len(names) < 2 or not all(isinstance(name, str) and name for name in names):
        raise invalid_value("not a column or a list of two or more")
    if len({name.lower() for name in names}) < len(names):
        raise invalid_value("contains a column twice")
    return tuple(names)


ColumnNames = Annotated[
    str | tuple[str, ...], BeforeValidator(parse_columns), Allowed("a string, or a list of two or more strings")
]
Resolutions = Annotated[
    tuple[Resolution, ...],
    BeforeValidator(parse_resolutions),
    Allowed(f"a list of sides or [width, height]; {SIDE_RULE}"),
]
SizeBuckets = Annotated[
    tuple[Resolution, ...], BeforeValidator(parse_size_buckets), Allowed(f"a list of [width, height]; {SIDE_RULE}")
]
Frames = Annotated[
    int | tuple[int, ...],
    BeforeValidator(parse_frames),
    Allowed(f"an integer from 1 to {MOST_FRAMES}, or a list of them"),
]
Ratios = Annotated[
    tuple[float, ...], BeforeValidator(parse_ratios), Allowed("a list of ratios or [width, height] pairs")
]


class DatasetDefaults(Table):
    """Keys for the top level of a dataset TOML or for a directory, which takes precedence."""

    resolutions: Resolutions = ()
    """Training sizes in pixels; a number r means [r, r]. Required unless `size_buckets` is set."""
    enable_ar_bucket: Flag = False
    """Sort images into buckets by aspect ratio. false: one shape per resolution."""
    ar_buckets: Ratios | None = None
    """Aspect ratios (width / height) of the buckets; replaces the next three keys."""
    min_ar: Positive = 0.5
    """Smallest aspect ratio (width / height) of a bucket."""
    max_ar: Positive = 2.0
    """Largest aspect ratio (width / height) of a bucket."""
    num_ar_buckets: Annotated[int, Strict(), Ge(1), Le(1000)] = 7
    """Number of aspect ratios, evenly spaced on a log scale."""
    side_step: Annotated[Literal[16, 32, 64], Allowed("16, 32 or 64")] = 16
    """Sides of buckets of an aspect ratio are multiples of this; some models need 32."""
    size_buckets: SizeBuckets | None = None
    """Exact sizes of the buckets in pixels; replaces `resolutions` and aspect ratios."""
    frames: Frames | None = None
    """Read videos too: the number of frames of the longest clip, from the start of a video. A shorter video gives the
    longest clip that the model allows. A list names the lengths instead, and shorter videos are rejected. Images are
    clips of one frame. Absent: videos are not read."""
    fps: Annotated[float, Strict(), Ge(0.01), Le(1000)] | None = None
    """Frames per second of clips: a video of another rate is resampled. Absent: every frame of a video is used."""
    caption_prefix: TomlString = ""
    """Text to prepend to every caption."""
    num_repeats: Annotated[float, Strict(), Gt(0), Le(10_000)] = 1.0
    """How often a sample appears per epoch; may be fractional."""
    flip: Flag = False
    """Also cache the mirrored image, and pick one of the two at random each time."""
    shuffle_tags: Flag = False
    """Shuffle the parts of a caption that the delimiter separates."""
    cache_shuffle_num: CountOrZero = 0
    """Number of shuffled variants to cache per caption; at least 1 with `shuffle_tags`."""
    cache_shuffle_delimiter: Annotated[str, Strict(), MinLen(1), Allowed("a non-empty string")] = ", "
    """Separator of the parts of a caption."""
    keep_tokens: CountOrZero = 0
    """Number of leading parts of a caption that are neither shuffled nor dropped."""
    tag_dropout: Decay = 0.0
    """Probability of leaving out each part of a shuffled variant; at least one part remains."""
    subsample_ratio: Annotated[float, Strict(), Gt(0), Le(1)] = 1.0
    """Fraction of the samples to use, selected by sample id."""
    where: Where = ""
    """Condition over a sample's columns and its `width`, `height` and `caption_length`; the others are left out."""
    exclude: TomlPath | None = None
    """Text file with the keys of samples to leave out, one per line, such as `images#0/cats/1.jpg`; lines that start
    with `#` are comments. Lists of rejects and the pages of `inspect` and `ui` show keys; `ui` edits the list."""
    duplicates: Literal["keep", "drop", "drop_similar"] = "keep"
    """What to do with an image whose bytes (and mask) equal those of an earlier one. They are counted in all cases.
    `"drop_similar"` also leaves out copies that were resized or compressed again; to find them, every new image is
    decoded once more."""
    validation: Flag = False
    """Hold out a part of the images for the validation loss: 2%, at most 512, at least two. Images with the same bytes
    and similar ones are held out together, and an image never changes sides. To find them, every new image is decoded
    once more."""
    image_column: TomlString = ""
    """Column of a table or Parquet file with the image or its path. Empty: detected by name."""
    caption_column: ColumnNames = ""
    """Column (or JSON key) with the captions. Empty: detected by name. Several columns: one caption each, of which one
    is picked at random each time; a row without a value in one of them uses its first value there."""
    caption_weights: tuple[Positive, ...] = ()
    """How often each column of `caption_column` is picked, relative to the others. Empty: equally often. A change needs
    no new cache."""
    min_side: CountOrZero = 0
    """Smallest width and height of an image in pixels; smaller images are rejected."""
    max_crop: Fraction = 1.0
    """Largest fraction of an image that may be cropped off to fit a bucket. An image that loses more at every
    resolution is rejected."""
    no_upscale: Flag = False
    """Leave out resolutions at which an image would be enlarged; reject it if none is left."""
    max_image_mb: Positive = 512.0
    """Largest image or mask in MB: a file, a tar member or a Parquet cell. Larger ones are rejected; only a cell is
    read to know its size."""
    skip_empty_caption: Flag = False
    """Skip samples with an empty or missing caption."""


class DirectoryConfig(DatasetDefaults):
    """[[directory]]: one source of samples, with the dataset's defaults merged in."""

    @property
    def name(self) -> str:
        """The last name of `path`, which is part of the identity of its samples; of a dataset on the hub, its own."""
        return repo_or_name(self.path).rpartition("/")[2]

    @property
    def clip_lengths(self) -> tuple[int, ...]:
        """The frames of clips, in rising order; none if videos are not read."""
        if self.frames is None:
            return ()
        return self.frames if isinstance(self.frames, tuple) else (self.frames,)

    @property
    def caption_columns(self) -> tuple[str, ...]:
        """The configured columns of captions; none if they are detected by name."""
        if isinstance(self.caption_column, tuple):
            return self.caption_column
        return (self.caption_column,) if self.caption_column else ()

    path: DataPath
    """Folder with images, tables, tars or Parquet files, or a single tar or Parquet file. Or a dataset on the Hugging
    Face hub: `hf://datasets/OWNER/NAME`, also with `@REVISION` and a `/FOLDER` in it. Or a URL that fsspec supports,
    such as `s3://bucket/folder` or `https://host/file.tar`; its credentials come from the environment."""
    mask_path: TomlLocation | None = None
    """Folder of masks; a mask has the name of its image."""
    default_mask_file: TomlLocation | None = None
    """Mask for images without one."""
    rejected: TomlLocation | None = None
    """Folder of worse images of the same captions, for `[objective.dpo]`; each has the name of its image. An image
    without one is left out. All directories have them, or none."""
    references: tuple[TomlLocation, ...] = ()
    """Folders of images that the model sees beside the caption, such as the image that an edit starts from, in the
    order in which the model gets them; each has the name of its image. An image without one is left out."""


class DatasetFile(DatasetDefaults):
    """The dataset TOML as written."""

    directory: tuple[DirectoryConfig, ...]
    """One table per source; at least one."""


@dataclass(frozen=True)
class DatasetConfig:
    """A dataset TOML with its defaults merged into each directory.

    ``compared``: its images are compared with each other or with those of other sets, so that none leaks.
    """

    path: Path
    cache_dir: CacheLocation
    directories: tuple[DirectoryConfig, ...]
    compared: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether a part of its images is held out."""
        return any(directory.validation for directory in self.directories)
