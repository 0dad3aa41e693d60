"""Law 1: streams are pure functions of what names them, and differ in each part of the name."""

import math

import numpy as np
import pytest

from sd3_light.randomness import sample_id, stream

NAME = (7, "noise", 3, 1, 12345)
GOLDEN_INTEGERS = [4642017870147223370, 4589275147464842887]
GOLDEN_NORMALS = [-2.503597939082792, -0.14199741802962204, -0.7125326265969637]
GOLDEN_UNIFORMS = [0.7927498613523176, 0.8864934026734551]
GOLDEN_ID = 3372245375051623783


def draws(name: tuple[int, str, int, int, int], count: int = 64) -> list[float]:
    return stream(*name).standard_normal(count).tolist()


def test_golden_values() -> None:
    """Written down once: a change of generator, key or counter changes everybody's training, and must be noticed."""
    assert stream(0, "noise", 0, 0, 0).integers(2**63, size=2).tolist() == GOLDEN_INTEGERS
    assert stream(*NAME).standard_normal(3).tolist() == pytest.approx(GOLDEN_NORMALS, abs=0, rel=1e-15)
    assert stream(7, "timestep", 3, 1, 12345).random(2).tolist() == GOLDEN_UNIFORMS


def test_a_sample_id_is_stable_and_fits_a_signed_tensor() -> None:
    assert sample_id("a/b.jpg") == GOLDEN_ID
    ids = {sample_id(f"folder/{number}.jpg") for number in range(20_000)}
    assert len(ids) == 20_000
    assert min(ids) >= 0
    assert max(ids) < 2**63
    assert max(ids) > 2**62  # all 63 bits are used


def test_a_stream_is_reproducible_and_has_no_memory() -> None:
    first = draws(NAME)
    draws((7, "other", 0, 0, 0))
    np.random.seed(1)
    assert draws(NAME) == first


@pytest.mark.parametrize(
    "other",
    [
        (8, "noise", 3, 1, 12345),
        (7, "posterior", 3, 1, 12345),
        (7, "noise", 4, 1, 12345),
        (7, "noise", 3, 2, 12345),
        (7, "noise", 1, 3, 12345),  # epoch and repeat do not change places
        (7, "noise", 3, 1, 12346),
    ],
)
def test_streams_of_another_name_are_independent(other: tuple[int, str, int, int, int]) -> None:
    one, two = draws(NAME, 5000), draws(other, 5000)
    assert not set(one) & set(two), "the streams overlap"
    assert abs(float(np.corrcoef(one, two)[0, 1])) < 0.06


def test_neighbouring_streams_never_overlap() -> None:
    """Counter words are the name: the draws of a whole picture must not run into the next sample's."""
    seen: set[int] = set()
    for sample in range(50):
        values = stream(0, "noise", 0, 0, sample).integers(2**63, size=400).tolist()
        assert not seen & set(values)
        seen |= set(values)


def test_largest_names_are_taken_and_too_large_ones_are_not() -> None:
    largest = (2**63 - 1, "noise", 2**32 - 1, 2**32 - 1, 2**63 - 1)
    assert draws(largest) != draws((2**63 - 1, "noise", 2**32 - 1, 2**32 - 1, 2**63 - 2))
    with pytest.raises(AssertionError):
        stream(0, "noise", 2**32, 0, 0)
    with pytest.raises(AssertionError):
        stream(0, "noise", 0, -1, 0)


def test_first_draws_over_many_samples_are_uniform() -> None:
    """One draw from each of many streams, as timesteps are drawn."""
    values = np.sort([stream(0, "timestep", 0, 0, sample).random() for sample in range(4000)])
    distance = np.abs(values - (np.arange(4000) + 0.5) / 4000).max()
    assert distance < 1.63 / math.sqrt(4000)  # Kolmogorov-Smirnov at 1%


def test_normals_have_mean_0_and_deviation_1() -> None:
    values = np.concatenate([stream(0, "noise", 0, 0, sample).standard_normal(500) for sample in range(200)])
    assert abs(values.mean()) < 0.015
    assert abs(values.std() - 1) < 0.015
