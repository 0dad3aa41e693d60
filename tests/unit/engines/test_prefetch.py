"""Prefetched micro-batches: content, two buffers, release of host memory, metadata of finished steps.

A CPU has no streams, but order and lifetimes are the same. tests/gpu/test_fast.py tests real streams.
"""

import weakref
from collections.abc import Generator
from itertools import count

import pytest
import torch
from torch import Tensor

from sd3_light.engines.prefetch import DeviceSender, equal_micro_batches, prefetch_steps
from sd3_light.engines.protocol import MicroBatch

CPU = torch.device("cpu")


def batch(number: int, side: int = 4) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    noisy, target = torch.randn(2, 3, side, side, generator=generator)
    prompt = torch.randn(3, 5, 7, generator=generator).bfloat16()
    return (noisy, torch.rand(3, generator=generator), prompt, torch.tensor([5, 1, number])), (target, None)


def assert_same(actual: MicroBatch, expected: MicroBatch) -> None:
    for sent, source in zip((*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True):
        assert (sent is None) == (source is None)
        assert sent is None or (sent.dtype == source.dtype and torch.equal(sent, source))


def test_a_sent_batch_is_intact_until_the_one_after_the_next() -> None:
    sender, batches = DeviceSender(CPU), [batch(number, side=4 + 2 * (number % 3)) for number in range(7)]
    sent: list[MicroBatch] = []
    for number, micro_batch in enumerate(batches):
        sent.append(sender.send(micro_batch))
        assert_same(sent[number], micro_batch)
        if number:
            assert_same(sent[number - 1], batches[number - 1])
        assert sent[number][0][3] is micro_batch[0][3], "counts stay on the host"


def test_there_are_two_buffers() -> None:
    sender = DeviceSender(CPU)
    addresses = [sender.send(batch(number))[0][0].untyped_storage().data_ptr() for number in range(6)]
    assert addresses == [*addresses[:2]] * 3
    assert addresses[0] != addresses[1]


def test_host_memory_is_released_before_the_next_batch_is_requested() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def source() -> Generator[MicroBatch, None, None]:
        for number in range(4):
            assert sum(ref() is not None for ref in alive) == 0
            micro_batch = batch(number)
            alive.append(weakref.ref(micro_batch[0][0]))
            yield micro_batch
            del micro_batch

    for step in prefetch_steps(source(), 2, CPU):
        for _ in step:
            assert sum(ref() is not None for ref in alive) <= 1


def test_every_micro_batch_is_finished_once_on_the_device() -> None:
    """As it is sent; the metadata afterwards describe the finished one."""
    finished: list[int] = []

    def finish(arrived: MicroBatch) -> MicroBatch:
        features, (target, _) = arrived
        finished.append(int(features[3][2]))
        return (features[0].repeat(2, 1, 1), *features[1:]), (2 * target, None)

    for at, step in enumerate(prefetch_steps((batch(number) for number in range(4)), 2, CPU, finish)):
        assert finished == list(range(2 * at + 1))
        for number, (features, label) in enumerate(step, start=2 * at):
            assert torch.equal(features[0], batch(number)[0][0].repeat(2, 1, 1))
            assert torch.equal(label[0], 2 * batch(number)[1][0])
        assert [tuple(features[0].shape) for features, _ in step] == [(6, 4, 4)] * 2
    assert finished == [0, 1, 2, 3]


def test_steps_yield_data_once_and_metadata_afterwards() -> None:
    steps = list[list[tuple[int, ...]]]()
    fetched: list[int] = []

    def source() -> Generator[MicroBatch, None, None]:
        for number in range(6):
            fetched.append(number)
            yield batch(number)

    for at, step in enumerate(prefetch_steps(source(), 3, CPU)):
        assert len(step) == 3
        assert len(fetched) == 3 * at + 1, "only the first micro-batch is prefetched"
        for number, micro_batch in enumerate(step):
            assert_same(micro_batch, batch(3 * at + number))
        steps.append([tuple(features[0].shape) for features, _ in step])
        assert {features[0].device.type for features, _ in step} == {"meta"}
        assert [features[3].tolist()[2] for features, _ in step] == [3 * at + number for number in range(3)]
    assert steps == [[(3, 4, 4)] * 3] * 2


def test_unequal_micro_batches_fail_an_assertion() -> None:
    steps = prefetch_steps((part for part in (batch(0), batch(1, side=6))), 2, CPU)
    step = next(steps)
    with pytest.raises(AssertionError, match="must be equal"):
        list(equal_micro_batches(step))


def test_closing_closes_the_source_while_a_step_is_referenced() -> None:
    batches = source()
    steps = prefetch_steps(batches, 2, CPU)
    step = next(steps)
    steps.close()
    assert next(batches, None) is None
    assert len(step) == 2


def source() -> Generator[MicroBatch, None, None]:
    """Yield micro-batches forever."""
    for number in count():
        yield batch(number)
