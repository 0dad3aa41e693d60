"""Micro-batches sent ahead: the right bytes, two buffers, host memory given back, steps that show what they were.

On a CPU there are no streams; order and lifetimes are the same. tests/gpu/test_fast.py looks at real ones.
"""

import weakref
from collections.abc import Generator
from itertools import count

import pytest
import torch
from torch import Tensor

from sd3_light.engines.prefetch import Sender, prefetch_steps
from sd3_light.engines.protocol import MicroBatch

CPU = torch.device("cpu")


def batch(number: int, side: int = 4) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    noisy, target = torch.randn(2, 3, side, side, generator=generator)
    prompt = torch.randn(3, 5, 7, generator=generator).bfloat16()
    return (noisy, torch.rand(3, generator=generator), prompt, torch.tensor([5, 1, number])), (target, None)


def same(found: MicroBatch, wanted: MicroBatch) -> None:
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


def test_what_is_sent_is_what_was_given_and_stays_for_one_more() -> None:
    sender, given = Sender(CPU), [batch(number, side=4 + 2 * (number % 3)) for number in range(7)]
    sent: list[MicroBatch] = []
    for number, prepared in enumerate(given):
        sent.append(sender.send(prepared))
        same(sent[number], prepared)
        if number:
            same(sent[number - 1], given[number - 1])
        assert sent[number][0][3] is prepared[0][3], "counts stay on the host"


def test_there_are_two_buffers() -> None:
    sender = Sender(CPU)
    places = [sender.send(batch(number))[0][0].untyped_storage().data_ptr() for number in range(6)]
    assert places == [*places[:2]] * 3
    assert places[0] != places[1]


def test_host_memory_is_given_back_before_the_next_is_waited_for() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def source() -> Generator[MicroBatch, None, None]:
        for number in range(4):
            assert sum(ref() is not None for ref in alive) == 0
            prepared = batch(number)
            alive.append(weakref.ref(prepared[0][0]))
            yield prepared
            del prepared

    for step in prefetch_steps(source(), 2, CPU):
        for _ in step:
            assert sum(ref() is not None for ref in alive) <= 1


def test_steps_are_walked_once_and_then_show_what_they_were() -> None:
    steps = list[list[tuple[int, ...]]]()
    fetched: list[int] = []

    def source() -> Generator[MicroBatch, None, None]:
        for number in range(6):
            fetched.append(number)
            yield batch(number)

    for at, step in enumerate(prefetch_steps(source(), 3, CPU)):
        assert len(step) == 3
        assert len(fetched) == 3 * at + 1, "the first is on its way, the others are not asked for yet"
        for number, prepared in enumerate(step):
            same(prepared, batch(3 * at + number))
        steps.append([tuple(features[0].shape) for features, _ in step])
        assert {features[0].device.type for features, _ in step} == {"meta"}
        assert [features[3].tolist()[2] for features, _ in step] == [3 * at + number for number in range(3)]
    assert steps == [[(3, 4, 4)] * 3] * 2


def test_unequal_micro_batches_are_a_fault_of_ours() -> None:
    steps = prefetch_steps((part for part in (batch(0), batch(1, side=6))), 2, CPU)
    step = next(steps)
    with pytest.raises(AssertionError, match="must be equal"):
        list(step)


def test_the_source_is_closed_with_it_though_a_step_is_held() -> None:
    given = source()
    steps = prefetch_steps(given, 2, CPU)
    held = next(steps)
    steps.close()
    assert next(given, None) is None
    assert len(held) == 2


def source() -> Generator[MicroBatch, None, None]:
    """Micro-batches without an end."""
    for number in count():
        yield batch(number)
