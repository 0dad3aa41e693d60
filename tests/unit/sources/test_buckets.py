import math
import random
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import DirectoryConfig
from sd3_light.core.columns import named_bucket
from sd3_light.sources.buckets import (
    SIDE_STEP,
    Bucket,
    aspect_ratios,
    assign,
    assign_all,
    buckets_by_resolution,
    buckets_for,
    resize_for,
)


def directory(**keys: Any) -> DirectoryConfig:
    return DirectoryConfig(path=Path("images"), **keys)


def ratio_buckets(resolution: int | list[int], **keys: Any) -> tuple[Bucket, ...]:
    return buckets_for(directory(resolutions=[resolution], enable_ar_bucket=True, **keys))


def test_a_bucket_is_named_by_its_sides_and_sorts() -> None:
    for bucket, name in ((Bucket(64, 48), "64x48"), (Bucket(64, 48, 17), "64x48x17")):
        assert str(bucket) == name
        assert named_bucket(name) == bucket
    assert sorted([Bucket(64, 64), Bucket(48, 64), Bucket(64, 48)]) == [Bucket(48, 64), Bucket(64, 48), Bucket(64, 64)]


def test_buckets_without_ratios() -> None:
    here = directory(resolutions=[512, 256, [64, 48]])
    assert buckets_by_resolution(here) == ((Bucket(512, 512),), (Bucket(256, 256),), (Bucket(64, 48),))
    assert buckets_for(here) == (Bucket(64, 48), Bucket(256, 256), Bucket(512, 512))
    here = directory(resolutions=[512, 256], size_buckets=[[96, 64], [64, 96]], enable_ar_bucket=True)
    assert buckets_by_resolution(here) == ((Bucket(64, 96), Bucket(96, 64)),)


def test_ratios_are_a_geometric_series_or_configured() -> None:
    assert aspect_ratios(directory(min_ar=0.5, max_ar=2.0, num_ar_buckets=3)) == pytest.approx((0.5, 1.0, 2.0))
    assert aspect_ratios(directory(min_ar=0.5, max_ar=2.0, num_ar_buckets=1)) == pytest.approx((1.0,))
    assert aspect_ratios(directory(ar_buckets=[1.5, [448, 576]])) == pytest.approx((1.5, 448 / 576))
    buckets = ratio_buckets(256, ar_buckets=[1.0, 1.25, 0.8, 1.0])
    assert [str(bucket) for bucket in buckets] == ["224x288", "256x256", "288x224"]
    assert ratio_buckets(16, ar_buckets=[100.0, 0.01]) == (Bucket(16, 160), Bucket(160, 16))


@pytest.mark.parametrize("side", [64, 128, 256, 512, 1024])
@pytest.mark.parametrize("count", [1, 2, 7, 25])
def test_ratio_buckets_keep_area_and_ratio(side: int, count: int) -> None:
    here = directory(resolutions=[side], enable_ar_bucket=True, min_ar=0.4, max_ar=2.5, num_ar_buckets=count)
    buckets = buckets_for(here)
    assert buckets == tuple(sorted(set(buckets)))
    assert {Bucket(bucket.height, bucket.width) for bucket in buckets} == set(buckets)
    for bucket in buckets:
        assert bucket.width % SIDE_STEP == bucket.height % SIDE_STEP == 0
        # at most one step on the shorter side away
        assert abs(math.log(bucket.area / side**2)) <= 1.01 * SIDE_STEP / min(bucket.width, bucket.height)
    for ratio in aspect_ratios(here):
        nearest = min(abs(math.log(bucket.width / bucket.height / ratio)) for bucket in buckets)
        assert nearest <= SIDE_STEP / (side / math.sqrt(2.5) - SIDE_STEP)


def test_assign_prefers_the_largest_bucket_without_upscaling() -> None:
    buckets = (Bucket(32, 32), Bucket(64, 64), Bucket(128, 128))
    assert assign(100, 100, buckets) == Bucket(64, 64)
    assert assign(9, 9, buckets) == Bucket(32, 32)
    assert assign(4000, 4000, buckets) == Bucket(128, 128)


def test_assign_is_nearest_in_log_ratio_and_does_not_depend_on_order() -> None:
    rng = random.Random(0)
    for _ in range(300):
        buckets = [Bucket(16 * rng.randint(1, 40), 16 * rng.randint(1, 40)) for _ in range(rng.randint(1, 9))]
        width, height = rng.randint(1, 3000), rng.randint(1, 3000)
        chosen = assign(width, height, buckets)

        def distance(bucket: Bucket, ratio: float = width / height) -> float:
            return abs(math.log(bucket.width / bucket.height / ratio))

        assert distance(chosen) <= min(map(distance, buckets)) + 1e-12
        assert assign(width, height, rng.sample(buckets, len(buckets))) == chosen


def test_a_sample_has_one_bucket_per_resolution_without_duplicates() -> None:
    groups = buckets_by_resolution(directory(resolutions=[64, 256], enable_ar_bucket=True, ar_buckets=[0.5, 1.0, 2.0]))
    assert assign_all(300, 300, groups) == (Bucket(64, 64), Bucket(256, 256))
    assert assign_all(300, 300, (*groups, *groups)) == (Bucket(64, 64), Bucket(256, 256))


def test_plan_of_known_sizes() -> None:
    wide = resize_for(200, 100, Bucket(64, 64))
    assert (wide.resized, wide.crop, wide.enlarged, wide.cropped_fraction) == ((128, 64), (32, 0, 96, 64), False, 0.5)
    assert wide.source == (200, 100)
    assert wide.size == (64, 64)
    exact = resize_for(64, 48, Bucket(64, 48))
    assert (exact.resized, exact.crop, exact.enlarged, exact.cropped_fraction) == ((64, 48), (0, 0, 64, 48), False, 0.0)
    assert resize_for(63, 64, Bucket(64, 64)).enlarged
    assert resize_for(1, 1, Bucket(64, 64)).enlarged


def test_plan_covers_the_bucket_and_crops_the_centre_of_one_side() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        width, height = (round(math.exp(rng.uniform(0, 10))) for _ in range(2))
        bucket = Bucket(16 * rng.randint(1, 64), 16 * rng.randint(1, 64))
        how = resize_for(width, height, bucket)
        left, top, right, bottom = how.crop
        assert how.size == (bucket.width, bucket.height)
        assert left >= 0
        assert top >= 0
        assert right <= how.resized[0]
        assert bottom <= how.resized[1]
        assert bucket.width == how.resized[0] or bucket.height == how.resized[1]
        assert 0 <= (how.resized[0] - right) - left <= 1
        assert 0 <= (how.resized[1] - bottom) - top <= 1
        assert 0 <= how.cropped_fraction < 1
        scale = max(bucket.width / width, bucket.height / height)
        assert how.enlarged == (scale > 1)
        assert abs(how.resized[0] - width * scale) <= 0.51
        assert abs(how.resized[1] - height * scale) <= 0.51
