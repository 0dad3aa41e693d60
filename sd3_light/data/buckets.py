"""Which sizes a directory trains at, which of them a picture takes, and how it is resized and cropped to fit.

Pure arithmetic on whole numbers: no picture is opened here, so a data set's buckets can be told from sizes alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product

from sd3_light.config import DirectoryConfig

SIDE_STEP = 16
"""Sides are multiples of this: the VAE shrinks 8 times, the denoiser's patches take 2 x 2 of what is left."""

Size = tuple[int, int]


@dataclass(frozen=True, order=True)
class Bucket:
    """One size, in pixels, that pictures are brought to; its text is ``64x48`` (width x height)."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def area(self) -> int:
        """Number of pixels."""
        return self.width * self.height


@dataclass(frozen=True)
class ResizePlan:
    """How a picture of size ``source`` becomes a bucket: resize all of it to ``resized``, keep ``crop`` of that.

    ``crop`` is (left, top, right, bottom) in resized pixels. ``cropped_fraction`` is the share of the picture that is
    lost, ``enlarged`` says that pixels had to be invented.
    """

    source: Size
    resized: Size
    crop: tuple[int, int, int, int]
    enlarged: bool
    cropped_fraction: float

    @property
    def size(self) -> Size:
        """Width and height of what comes out: the bucket's."""
        left, top, right, bottom = self.crop
        return right - left, bottom - top


def buckets_for(directory: DirectoryConfig) -> tuple[Bucket, ...]:
    """All buckets of a directory, each once, sorted."""
    return tuple(sorted({bucket for group in buckets_by_resolution(directory) for bucket in group}))


def buckets_by_resolution(directory: DirectoryConfig) -> tuple[tuple[Bucket, ...], ...]:
    """The buckets of each resolution, in the order of ``resolutions``; a sample takes one from every group.

    ``size_buckets`` are one group, whatever the resolutions. Without aspect-ratio buckets a resolution is its own only
    bucket.
    """
    if directory.size_buckets:
        return (_exact_buckets(directory.size_buckets),)
    if not directory.enable_ar_bucket:
        return tuple(_exact_buckets([size]) for size in dict.fromkeys(directory.resolutions))
    ratios = aspect_ratios(directory)
    return tuple(_ratio_buckets(width * height, ratios) for width, height in dict.fromkeys(directory.resolutions))


def aspect_ratios(directory: DirectoryConfig) -> tuple[float, ...]:
    """The ratios width/height that a directory asks for: ``ar_buckets``, or a geometric row."""
    if directory.ar_buckets:
        return directory.ar_buckets
    low, high, count = directory.min_ar, directory.max_ar, directory.num_ar_buckets
    if count == 1:
        return (math.sqrt(low * high),)
    return tuple(low * (high / low) ** (i / (count - 1)) for i in range(count))


def assign(width: int, height: int, buckets: Sequence[Bucket]) -> Bucket:
    """The one of ``buckets`` (of one resolution) nearest in aspect ratio to a picture.

    Ties go to less cropping, then to a bucket that need not be enlarged into, then to the one nearest in area: the
    largest of those that the picture can fill, else the smallest.
    """
    assert buckets, "a picture needs at least one bucket"

    def cost(bucket: Bucket) -> tuple[Fraction, float, bool, int, Bucket]:
        wide, tall = width * bucket.height, height * bucket.width
        fit = plan(width, height, bucket)
        # as a fraction, so that equal ratios tie exactly; it grows as the distance of the logarithms does
        stretch = Fraction(max(wide, tall), min(wide, tall))
        area = bucket.area if fit.enlarged else -bucket.area
        return stretch, fit.cropped_fraction, fit.enlarged, area, bucket

    return min(buckets, key=cost)


def assign_all(width: int, height: int, groups: Iterable[Sequence[Bucket]]) -> tuple[Bucket, ...]:
    """A picture's bucket at every resolution; once where two resolutions share it."""
    return tuple(dict.fromkeys(assign(width, height, group) for group in groups))


@lru_cache(maxsize=1 << 16)
def fits(width: int, height: int, directory: DirectoryConfig) -> tuple[tuple[Size, Bucket, ResizePlan], ...]:
    """For a picture of this size: (resolution, bucket, plan), one for each bucket that it takes.

    The resolution is that which a bucket belongs to, by which batch sizes are named: the first that has it; of
    ``size_buckets`` each is its own.
    """
    groups = _groups(directory)
    found = []
    for bucket in assign_all(width, height, groups):
        own = bucket.width, bucket.height
        at = next(at for at, group in enumerate(groups) if bucket in group)
        resolution = own if directory.size_buckets else directory.resolutions[at]
        found.append((resolution, bucket, plan(width, height, bucket)))
    return tuple(found)


@lru_cache(maxsize=64)
def _groups(directory: DirectoryConfig) -> tuple[tuple[Bucket, ...], ...]:
    return buckets_by_resolution(directory)


def plan(width: int, height: int, bucket: Bucket) -> ResizePlan:
    """The smallest resize of a picture that covers the bucket, and the centre crop that cuts the rest away."""
    assert width > 0, width
    assert height > 0, height
    # scale by the side that needs more; whole numbers, so that every machine plans the same
    if bucket.width * height >= bucket.height * width:
        resized = bucket.width, max(bucket.height, _round_div(height * bucket.width, width))
        enlarged = bucket.width > width
    else:
        resized = max(bucket.width, _round_div(width * bucket.height, height)), bucket.height
        enlarged = bucket.height > height
    left, top = (resized[0] - bucket.width) // 2, (resized[1] - bucket.height) // 2
    return ResizePlan(
        source=(width, height),
        resized=resized,
        crop=(left, top, left + bucket.width, top + bucket.height),
        enlarged=enlarged,
        cropped_fraction=1 - bucket.area / (resized[0] * resized[1]),
    )


def _round_div(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _exact_buckets(sizes: Iterable[Size]) -> tuple[Bucket, ...]:
    buckets = tuple(sorted({Bucket(*size) for size in sizes}))
    for bucket in buckets:
        assert bucket.width % SIDE_STEP == bucket.height % SIDE_STEP == 0, f"{bucket} should be a fault of the config"
    return buckets


def _ratio_buckets(area: int, ratios: Iterable[float]) -> tuple[Bucket, ...]:
    return tuple(sorted({_ratio_bucket(area, ratio) for ratio in ratios}))


def _ratio_bucket(area: int, ratio: float) -> Bucket:
    """Of the four sizes around the ideal one, the nearest in area and ratio together, both as logarithms.

    Area alone would answer 272x240 when 1.25 at 256 px is asked for, where 288x224 is far nearer in shape.
    """

    def error(bucket: Bucket) -> tuple[float, float, Bucket]:
        shape = abs(math.log(bucket.width / bucket.height / ratio))
        return round(math.hypot(math.log(bucket.area / area), shape), 9), round(shape, 9), bucket

    sides = product(_steps_around(math.sqrt(area * ratio)), _steps_around(math.sqrt(area / ratio)))
    return min((Bucket(width, height) for width, height in sides), key=error)


def _steps_around(side: float) -> tuple[int, int]:
    # the tiny term keeps 255.99999999, the root of an exact square, at 256
    below = max(SIDE_STEP, math.floor(side / SIDE_STEP + 1e-9) * SIDE_STEP)
    return below, below + SIDE_STEP
