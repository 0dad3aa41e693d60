"""Buckets: the image sizes of a directory, the choice of a bucket per image, and the resize and crop to fit it.

Pure integer arithmetic: no image is opened, so the buckets of a dataset depend on the image sizes alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product

from sd3_light.config import DirectoryConfig
from sd3_light.core.columns import Bucket as Bucket

SIDE_STEP = 16
"""Sides are multiples of this: most VAEs downsample by 8, most denoisers have patches of 2 x 2."""

Size = tuple[int, int]


@dataclass(frozen=True)
class Resize:
    """How to fit an image of size ``source`` to a bucket: resize it to ``resized``, then cut out ``crop``.

    ``crop`` is (left, top, right, bottom) in resized pixels. ``cropped_fraction`` is the share of the image that is cut
    off; ``enlarged`` is true if the image is upscaled.
    """

    source: Size
    resized: Size
    crop: tuple[int, int, int, int]
    enlarged: bool
    cropped_fraction: float

    @property
    def scale(self) -> float:
        """By how much the image is enlarged in each direction; below 1 if it is shrunk."""
        return max(self.resized[0] / self.source[0], self.resized[1] / self.source[1])

    @property
    def size(self) -> Size:
        """Width and height of the result: the bucket's."""
        left, top, right, bottom = self.crop
        return right - left, bottom - top


def buckets_for(directory: DirectoryConfig) -> tuple[Bucket, ...]:
    """Return all buckets of a directory, sorted, without duplicates."""
    return tuple(sorted({bucket for group in buckets_by_resolution(directory) for bucket in group}))


@lru_cache(maxsize=64)
def buckets_by_resolution(directory: DirectoryConfig) -> tuple[tuple[Bucket, ...], ...]:
    """Return the buckets of each resolution in the order of ``resolutions``; a sample gets one from every group.

    ``size_buckets`` are one group, whatever the resolutions. Without aspect-ratio buckets each resolution has one
    bucket.
    """
    if directory.size_buckets:
        return (tuple(sorted({Bucket(*size) for size in directory.size_buckets})),)
    if not directory.enable_ar_bucket:
        return tuple((Bucket(*size),) for size in dict.fromkeys(directory.resolutions))
    ratios = aspect_ratios(directory)
    areas = [width * height for width, height in dict.fromkeys(directory.resolutions)]
    step = directory.side_step
    return tuple(tuple(sorted({_ratio_bucket(area, ratio, step) for ratio in ratios})) for area in areas)


def aspect_ratios(directory: DirectoryConfig) -> tuple[float, ...]:
    """Return the configured ratios width/height of a directory: ``ar_buckets``, or a geometric series."""
    if directory.ar_buckets:
        return directory.ar_buckets
    low = directory.min_ar
    high = directory.max_ar
    count = directory.num_ar_buckets
    if count == 1:
        return (math.sqrt(low * high),)
    return tuple(low * (high / low) ** (i / (count - 1)) for i in range(count))


def assign(width: int, height: int, buckets: Sequence[Bucket]) -> Bucket:
    """Return the bucket (of one resolution) with the aspect ratio nearest to that of an image.

    Ties go to less cropping, then to a bucket that needs no upscaling, then to the nearest area: the largest bucket
    that the image can fill, else the smallest.
    """
    assert buckets, "an image needs at least one bucket"

    def cost(bucket: Bucket) -> tuple[Fraction, float, bool, int, Bucket]:
        wide = width * bucket.height
        tall = height * bucket.width
        fit = resize_for(width, height, bucket)
        # a fraction, so that equal ratios tie exactly; it is monotonic in the distance of the logarithms
        stretch = Fraction(max(wide, tall), min(wide, tall))
        area = bucket.area if fit.enlarged else -bucket.area
        return stretch, fit.cropped_fraction, fit.enlarged, area, bucket

    return min(buckets, key=cost)


def assign_all(width: int, height: int, groups: Iterable[Sequence[Bucket]]) -> tuple[Bucket, ...]:
    """Return an image's bucket at every resolution, without duplicates."""
    return tuple(dict.fromkeys(assign(width, height, group) for group in groups))


@lru_cache(maxsize=1 << 16)
def fits(
    width: int, height: int, directory: DirectoryConfig, frames: int = 0
) -> tuple[tuple[Size, Bucket, Resize], ...]:
    """Return (resolution, bucket, resize) for each bucket of an image of this size that the directory's limits allow.

    ``frames`` are those of a video, 0 for an image.
    """
    length = clip_length(frames, directory)
    if min(width, height) < directory.min_side or length is None:
        return ()
    groups = buckets_by_resolution(directory)
    result = []
    for bucket in assign_all(width, height, groups):
        size = bucket.width, bucket.height
        number = next(number for number, group in enumerate(groups) if bucket in group)
        # it selects the batch size: the first one that has the bucket; for `size_buckets` the bucket itself
        resolution = size if directory.size_buckets else directory.resolutions[number]
        resize = resize_for(width, height, bucket)
        if resize.cropped_fraction <= directory.max_crop and not (directory.no_upscale and resize.enlarged):
            result.append((resolution, replace(bucket, frames=length), resize))
    return tuple(result)


def clip_length(frames: int, directory: DirectoryConfig) -> int | None:
    """Return the frames of the clip that a directory takes of a video: the most that it has; None if it is too short.

    An image, and a video of one frame, have one.
    """
    fitting = [length for length in directory.clip_lengths if length <= frames]
    return max(fitting) if fitting else 1 if frames <= 1 else None


def misfit(width: int, height: int, directory: DirectoryConfig, frames: int = 0) -> str:
    """Return the reason why an image or video fits no bucket of a directory; "" if it fits one."""
    if fits(width, height, directory, frames):
        return ""
    if clip_length(frames, directory) is None:
        return "too_short"
    if min(width, height) < directory.min_side:
        return "too_small"
    unlimited = directory.model_copy(update={"max_crop": 1.0})
    return "crop_too_large" if fits(width, height, unlimited, frames) else "would_be_enlarged"


def limits_sizes(directory: DirectoryConfig) -> bool:
    """Return whether some images or videos fit no bucket of a directory."""
    return bool(directory.min_side or directory.max_crop < 1 or directory.no_upscale or directory.clip_lengths)


def resize_for(width: int, height: int, bucket: Bucket) -> Resize:
    """Plan the smallest resize of an image that covers the bucket, and the centre crop."""
    assert min(width, height) > 0, (width, height)
    # scale by the side that needs more; integers, so that every machine computes the same size
    if bucket.width * height >= bucket.height * width:
        resized = bucket.width, max(bucket.height, _round_div(height * bucket.width, width))
        enlarged = bucket.width > width
    else:
        resized = max(bucket.width, _round_div(width * bucket.height, height)), bucket.height
        enlarged = bucket.height > height
    left = (resized[0] - bucket.width) // 2
    top = (resized[1] - bucket.height) // 2
    return Resize(
        source=(width, height),
        resized=resized,
        crop=(left, top, left + bucket.width, top + bucket.height),
        enlarged=enlarged,
        cropped_fraction=1 - bucket.area / (resized[0] * resized[1]),
    )


def _round_div(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _ratio_bucket(area: int, ratio: float, step: int) -> Bucket:
    """Return the nearest of the four sizes around the ideal one, by the logarithms of area and ratio together."""

    # by area alone, ratio 1.25 at 256 px would give 272x240, although the shape of 288x224 is much nearer
    def error(bucket: Bucket) -> tuple[float, float, Bucket]:
        shape = abs(math.log(bucket.width / bucket.height / ratio))
        return round(math.hypot(math.log(bucket.area / area), shape), 9), round(shape, 9), bucket

    sides = product(_steps_around(math.sqrt(area * ratio), step), _steps_around(math.sqrt(area / ratio), step))
    return min((Bucket(width, height) for width, height in sides), key=error)


def _steps_around(side: float, step: int) -> tuple[int, int]:
    # the tiny term rounds 255.99999999, the root of an exact square, to 256
    below = max(step, math.floor(side / step + 1e-9) * step)
    return below, below + step


MUCH_CROPPED = 0.5
"""Fraction of an image whose loss is reported."""
MUCH_ENLARGED = 2.0
"""Enlargement in each direction that is reported."""
ENLARGED = 1.1
"""Enlargement in each direction that `check` counts: less is not seen."""


@dataclass
class ExtremeFits:
    """Counts extreme fits, and keeps the worst of each kind."""

    cropped: int = 0
    enlarged: int = 0
    worst_crop: tuple[float, str] = (0.0, "")
    worst_scale: tuple[float, str] = (0.0, "")

    def add(self, key: str, resize: Resize) -> None:
        """Count one sample in one bucket."""
        self.cropped += resize.cropped_fraction > MUCH_CROPPED
        self.enlarged += resize.scale > MUCH_ENLARGED
        self.worst_crop = max(self.worst_crop, (resize.cropped_fraction, key))
        self.worst_scale = max(self.worst_scale, (resize.scale, key))

    def sentence(self) -> str:
        """Return one line about them; "" if there are none."""
        parts = []
        if self.cropped:
            share, key = self.worst_crop
            verb = "loses" if self.cropped == 1 else "lose"
            text = f"{self.cropped:,} {verb} more than half by cropping, {key} {share:.0%}"
            parts.append(f"{text} (max_crop excludes such images)")
        if self.enlarged:
            scale, key = self.worst_scale
            verb = "is" if self.enlarged == 1 else "are"
            text = f"{self.enlarged:,} {verb} enlarged more than twice, {key} {scale:.1f} times"
            parts.append(f"{text} (min_side or no_upscale exclude such images)")
        return "; ".join(parts)
