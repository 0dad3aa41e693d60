"""Law 1: a stream is a pure function of its arguments, and depends on each of them."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from sd3_light import randomness
from sd3_light.randomness import choices, normal_table, occurrence_words, philox, round_keys, sample_id, stream

ARGUMENTS = (7, "noise", 3, 1, 12345)
GOLDEN_INTEGERS = [4642017870147223370, 4589275147464842887]
GOLDEN_NORMALS = [-2.503597939082792, -0.14199741802962204, -0.7125326265969637]
GOLDEN_UNIFORMS = [0.7927498613523176, 0.8864934026734551]
GOLDEN_TABLE_NORMALS = [-0.34540197253227234, -0.12145340442657471, -0.12805317342281342]
GOLDEN_ID = 3372245375051623783


def draws(arguments: tuple[int, str, int, int, int], count: int = 64) -> list[float]:
    return stream(*arguments).standard_normal(count).tolist()


def drawn_normals(arguments: tuple[int, str, int, int, int], count: int) -> np.ndarray:
    values = np.empty(count, dtype=np.float32)
    randomness.fill_normals(stream(*arguments), values)
    return values


def test_golden_values() -> None:
    """A change of generator, key or counter changes every training run, so it must be noticed."""
    assert stream(0, "noise", 0, 0, 0).integers(2**63, size=2).tolist() == GOLDEN_INTEGERS
    assert stream(*ARGUMENTS).standard_normal(3).tolist() == pytest.approx(GOLDEN_NORMALS, abs=0, rel=1e-15)
    assert stream(7, "timestep", 3, 1, 12345).random(2).tolist() == GOLDEN_UNIFORMS
    assert drawn_normals(ARGUMENTS, 3).tolist() == GOLDEN_TABLE_NORMALS
    assert sample_id("a/b.jpg") == GOLDEN_ID
    ids = {sample_id(f"folder/{number}.jpg") for number in range(20_000)}
    assert len(ids) == 20_000
    assert min(ids) >= 0
    assert max(ids) < 2**63
    assert max(ids) > 2**62  # all 63 bits are used


@pytest.mark.parametrize(
    "other",
    [
        (8, "noise", 3, 1, 12345),
        (7, "posterior", 3, 1, 12345),
        (7, "noise", 4, 1, 12345),
        (7, "noise", 3, 2, 12345),
        (7, "noise", 1, 3, 12345),  # epoch and repeat are not interchangeable
        (7, "noise", 3, 1, 12346),
    ],
)
def test_streams_with_other_arguments_are_independent(other: tuple[int, str, int, int, int]) -> None:
    first, second = draws(ARGUMENTS, 5000), draws(other, 5000)
    assert not set(first) & set(second), "the streams overlap"
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 0.06


def test_neighbouring_streams_never_overlap() -> None:
    """The draws of a whole image must not reach the counter of the next sample."""
    seen: set[int] = set()
    for sample in range(50):
        values = stream(0, "noise", 0, 0, sample).integers(2**63, size=400).tolist()
        assert not seen & set(values)
        seen |= set(values)
    largest = (2**63 - 1, "noise", 2**32 - 1, 2**32 - 1, 2**63 - 1)
    assert draws(largest) != draws((2**63 - 1, "noise", 2**32 - 1, 2**32 - 1, 2**63 - 2))
    with pytest.raises(AssertionError):
        stream(0, "noise", 2**32, 0, 0)
    with pytest.raises(AssertionError):
        stream(0, "noise", 0, -1, 0)


LIMITS = [(0, 0, 0), (3, 1, 12345), (2**31 - 1, 2**32 - 1, 2**63 - 1), (0, 2**32 - 1, 1), (1, 0, 2**62)]


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 - 5])
def test_philox_continues_every_stream_bit_for_bit(kind: str, seed: int) -> None:
    """numpy's implementation is the reference, at the limits of seed, epoch, repeat and sample id too."""
    occurrence, identity = occurrence_words(*zip(*LIMITS, strict=True)).T[..., None]
    block = np.arange(1, 6)[None]
    counter = (block, np.zeros_like(block), occurrence, identity)
    if kind == "tensor":
        words = philox([torch.from_numpy(word) for word in counter], torch.tensor(round_keys(seed, "noise")))
        drawn = torch.stack(words, dim=-1).numpy().view(np.uint64)
    else:
        drawn = np.stack(philox(counter, round_keys(seed, "noise")), axis=-1).view(np.uint64)
    for arguments, row in zip(LIMITS, drawn, strict=True):
        assert np.array_equal(row.ravel(), stream(seed, "noise", *arguments).bit_generator.random_raw(20))


@pytest.mark.parametrize("count", [1, 63, 64, 200])
def test_first_words_and_uniforms_are_those_of_each_stream(count: int) -> None:
    epochs, repeats = np.arange(count) % 3, np.arange(count) % 5
    ids = [sample_id(f"{number}") for number in range(count)]
    words = randomness.first_words(5, "timestep", occurrence_words(epochs, repeats, ids))
    streams = [stream(5, "timestep", int(epochs[at]), int(repeats[at]), ids[at]) for at in range(count)]
    assert np.array_equal(randomness.uniforms(words).T, [each.random(4) for each in streams])


@pytest.mark.parametrize("count", [20, 300])
@pytest.mark.parametrize("below", [1, 2, 7, 2**30 + 1])
def test_choices_are_those_of_each_stream(count: int, below: int) -> None:
    """Also where the generator rejects its first number: a quarter of the time below 2**30 + 1."""
    counts = np.where(np.arange(count) % 4 == 0, 1, below)
    occurrences = occurrence_words(2, 1, range(count))
    expected = [stream(9, "caption", 2, 1, at).integers(int(counts[at])) for at in range(count)]
    assert choices(9, "caption", occurrences, counts).tolist() == expected


def test_the_sum_of_two_entries_is_normal() -> None:
    """The exact distribution of all 2**32 sums, without drawing any."""
    table, normal = normal_table().astype(np.float64), NormalDist()

    def tail(x: float) -> float:
        return 1 - float(np.searchsorted(table, x - table, side="right").mean()) / len(table)

    for x in np.linspace(-4.4, 4.4, 45):
        assert abs(tail(x) - normal.cdf(-x)) < 8e-6
    for x, tolerance in ((3, 2e-4), (4, 6e-3), (5, 0.1)):
        assert tail(x) == pytest.approx(normal.cdf(-x), rel=tolerance)
    second, fourth, sixth = ((table**power).mean() for power in (2, 4, 6))
    assert 2 * fourth + 6 * second**2 == pytest.approx(3, abs=2e-4)
    assert 2 * sixth + 30 * fourth * second == pytest.approx(15, abs=4e-3)
    table = normal_table().astype(np.float64)
    assert np.array_equal(table, -table[::-1])
    assert (np.diff(table) > 0).all()
    assert 2 * (table**2).mean() == pytest.approx(1, abs=2e-9)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_shorter_draws_are_the_beginning_of_longer_ones(count: int) -> None:
    assert np.array_equal(drawn_normals(ARGUMENTS, count), drawn_normals(ARGUMENTS, 64)[:count])
