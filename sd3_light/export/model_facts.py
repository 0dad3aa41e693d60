"""What a run stores about its model beside the weights: the position table's step, the size of its images, its shift
and its unconditional text."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sd3_light.checkpoint.index import INDEX, damaged
from sd3_light.checkpoint.reading import Checkpoint
from sd3_light.config import ModelConfig
from sd3_light.config.faults import UserError
from sd3_light.config.sizes import MAX_POSITION_STEP, ModelSize
from sd3_light.core.columns import named_bucket
from sd3_light.core.start import WeightsStart
from sd3_light.data.order import Order
from sd3_light.data.shard_table import BucketShards
from sd3_light.formats import listed
from sd3_light.sources.buckets import SIDE_STEP

TRAINED_AT = "trained_at"
"""The entry of an export's facts with the size of the commonest bucket, in families whose denoisers have no size."""


@dataclass(frozen=True)
class ModelFacts:
    """The entry `model` of a checkpoint.

    ``position_step`` is None if the table is that of the weights that the run started from. ``trained_at`` is the
    width and height of the commonest bucket, in pixels. The others are those of the config.
    """

    position_step: float | None = None
    trained_at: tuple[int, int] | None = None
    shift: float | None = None
    flux_shift: bool = False
    sqrt_shift: bool = False
    uncond_text: str = "zero"

    @staticmethod
    def of(saved: Checkpoint) -> "ModelFacts":
        """Return the facts of a checkpoint or snapshot; those that it does not name have their defaults."""
        table = ModelFacts().as_dict() | saved.table("model")
        if unknown := sorted(table.keys() - {field.name for field in fields(ModelFacts)}):
            raise UserError(
                f"{saved.path} was written by a later version, with a model whose {listed(unknown)} this one does not "
                "know; use the version that wrote it, or start again with --restart"
            )
        for name, is_valid in _VALID.items():
            if not is_valid(table[name]):
                raise damaged(saved.path, INDEX, f"{name} of its model is not a valid value: {table[name]!r:.80}")
        size = table["trained_at"]
        return ModelFacts(**{**table, "trained_at": None if size is None else tuple(size)})

    def as_dict(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        return asdict(self)

    def keep_table(self, start: WeightsStart) -> WeightsStart:
        """Return the start of a resumed run, with the position table that the run began with."""
        if start.source is not None or self.position_step is None:
            return start
        return replace(start, size=replace(start.size, position_step=self.position_step))

    def keep_values(self, model: ModelConfig) -> ModelConfig:
        """Return the [model] table of a resumed run: what it does not set is as the run began with."""
        update: dict[str, Any] = {}
        if model.uncond_text is None:
            update["uncond_text"] = self.uncond_text
        if model.shift is None and not (model.flux_shift or model.sqrt_shift):
            update |= {"shift": self.shift, "flux_shift": self.flux_shift, "sqrt_shift": self.sqrt_shift}
        return model.model_copy(update=update)

    def export_config(self, transformer_config: dict[str, Any]) -> dict[str, Any]:
        """Return the denoiser's config with the default size of images that it was trained at.

        A config has one `sample_size`: a bucket that is not square becomes the square of about the same area. The
        configs of some families have none.
        """
        if self.trained_at is None or "pos_embed_max_size" not in transformer_config:
            return transformer_config
        tokens = round(math.sqrt(math.prod(self.trained_at)) / SIDE_STEP)
        return {**transformer_config, "sample_size": ModelSize.patch_size * max(1, tokens)}


def commonest_bucket(buckets: tuple[BucketShards, ...], order: Order) -> BucketShards:
    """Return the bucket with most samples per epoch; the largest of several."""

    def key(number: int) -> tuple[int, int, str]:
        bucket = named_bucket(buckets[number].bucket)
        part = order.buckets[number]
        return 0 if part.dropped else part.length, bucket.area * bucket.frames, buckets[number].bucket

    return buckets[max(range(len(buckets)), key=key)]


def bucket_size(bucket: BucketShards) -> tuple[int, int]:
    """Return width and height in pixels."""
    size = named_bucket(bucket.bucket)
    return size.width, size.height


def _is_step(value: Any) -> bool:
    return value is None or (type(value) is float and 0 < value <= MAX_POSITION_STEP)


def _is_shift(value: Any) -> bool:
    return value is None or (type(value) is float and 0 < value < math.inf)


def trained_size(facts: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the width and height of `TRAINED_AT` in the facts of an export; None if they do not say."""
    size = facts.get(TRAINED_AT)
    return None if size is None or not _is_size(size) else (size[0], size[1])


def _is_size(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return value is None or (is_pair and all(type(side) is int and side > 0 for side in value))


_VALID: dict[str, Callable[[Any], bool]] = {
    "position_step": _is_step,
    "trained_at": _is_size,
    "shift": _is_shift,
    "flux_shift": lambda value: type(value) is bool,
    "sqrt_shift": lambda value: type(value) is bool,
    "uncond_text": lambda value: value in ("zero", "empty"),
}
