"""Folders of vision models: how their images are scaled, and the column of a cache that holds their features."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sd3_light.config import ModelConfig, UserError
from sd3_light.config.schema_objective import LARGEST_WIDTH
from sd3_light.core.columns import TEACHER, Bucket, Column
from sd3_light.core.family import Family
from sd3_light.core.registry import family_of
from sd3_light.model.folder import JUDGE
from sd3_light.model.part_configs import read_json

PREPROCESSOR = "preprocessor_config.json"
_MAX_SIDE = 4096
_MAX_FEATURES = 1 << 16


@dataclass(frozen=True)
class VisionSettings:
    """A vision model's folder, the side of its square images, and the mean and deviation that normalise them."""

    folder: Path
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def vision_settings(folder: Path) -> VisionSettings:
    """Return the settings of a vision model; ``folder`` may also be one of `sd3-light parts`, with a judge inside."""
    folder = folder / JUDGE if (folder / JUDGE).is_dir() else folder
    if not (folder / PREPROCESSOR).is_file():
        kinds = "a folder of `sd3-light parts`, or of a CLIP or vision model"
        raise UserError(f"{folder} has no judge and no {PREPROCESSOR}; give {kinds}")
    settings = read_json(folder / PREPROCESSOR)
    side = _side(settings)
    mean = settings.get("image_mean")
    std = settings.get("image_std")
    if side is None or not _is_colour(mean) or not _is_colour(std):
        raise UserError(f"{folder / PREPROCESSOR} has no size, image_mean and image_std; give a judge or a CLIP folder")
    return VisionSettings(folder, side, tuple(mean), tuple(std))


def _side(settings: dict[str, Any]) -> int | None:
    """Return the side of the square images: of the crop if there is one."""
    size = (settings.get("crop_size") if settings.get("do_center_crop") else None) or settings.get("size")
    side = size.get("height", size.get("shortest_edge")) if isinstance(size, dict) else size
    return side if isinstance(side, int) and 0 < side <= _MAX_SIDE else None


def _is_colour(value: Any) -> TypeGuard[list[float]]:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(item, int | float) for item in value)


# --- the teacher of [objective.alignment] ------------------------------------------------------


def feature_width(folder: Path) -> int:
    """Return the features of a vision model's tokens, by its config.

    Of a network of several stages they are those of the last but one, whose cells are 16 pixels wide as a rule, like
    the patches of transformers.
    """
    config = read_json(folder / "config.json")
    config = config.get("vision_config", config)
    stages = config.get("hidden_sizes")
    width = stages[-2] if isinstance(stages, list) and len(stages) > 1 else config.get("hidden_size")
    if not isinstance(width, int) or not 0 < width <= _MAX_FEATURES:
        raise UserError(f"{folder / 'config.json'} states no hidden_size; give a ViT, DINOv2, CLIP or judge")
    return width


def teacher_width(path: Path) -> int:
    """Return the features of a teacher per token, as a cache stores them."""
    return min(feature_width(vision_settings(path).folder), LARGEST_WIDTH)


def require_images(family: Family) -> None:
    """Raise a UserError for a family of clips."""
    if family.media == "video":
        raise UserError(f"model.teacher_path: {family.title} trains on clips, and a teacher sees images; remove it")


def teacher_column(model: ModelConfig, columns: Sequence[Column]) -> Column | None:
    """Return the column of the teacher's features on the denoiser's tokens [D, h, w], beside those of a family.

    None if the config has no teacher.
    """
    if model.teacher_path is None:
        return None
    family = family_of(model)
    require_images(family)
    moments = next(column for column in columns if column.name == "moments")
    grid = (max(1, side // family.patch) for side in moments.shape[-2:])
    return Column(TEACHER, TEACHER, "int8", (teacher_width(model.teacher_path), *grid), (TEACHER,))


def cached_columns(model: ModelConfig, bucket: Bucket) -> tuple[Column, ...]:
    """Return what a cache stores of a bucket: the columns of the family, and that of a teacher."""
    columns = family_of(model).columns(model, model.diffusers_path, bucket)
    teacher = teacher_column(model, columns)
    return columns if teacher is None else (*columns, teacher)
