"""The batches of a step: prefetched ones, and placeholders of processes that read no data."""

import weakref
from collections.abc import Generator
from itertools import count

import pytest
import torch
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Tokens
from sd3_light.cost.training_flops import step_flops
from sd3_light.data.order import Segment, build_order
from sd3_light.engines.feed import flops_counter, placeholder_steps
from sd3_light.engines.prefetch import DeviceSender, equal_micro_batches, prefetch_steps
from sd3_light.families.sd3.cost import SD3Cost, image_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def batch(number: int, side: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(number)
    noisy, target = torch.randn(2, 3, side, side, generator=generator)
    prompt = torch.randn(3, 5, 7, generator=generator).bfloat16()
    values = {"noisy": noisy, "t": torch.rand(3, generator=generator), "prompt": prompt, "target": target}
    return Batch(3, values, {"prompt.length": torch.tensor([5, 1, number])})


def assert_same(actual: Batch, expected: Batch) -> None:
    assert list(actual.values) == list(expected.values)
    for sent, source in zip(actual.tensors(), expected.tensors(), strict=True):
        assert sent.dtype == source.dtype
        assert torch.equal(sent, source)


def test_a_sent_batch_is_intact_until_the_one_after_the_next() -> None:
    sender, batches = DeviceSender(CPU), [batch(number, side=4 + 2 * (number % 3)) for number in range(7)]
    sent: list[Batch] = []
    for number, micro_batch in enumerate(batches):
        sent.append(sender.send(micro_batch))
        assert_same(sent[number], micro_batch)
        if number:
            assert_same(sent[number - 1], batches[number - 1])
        assert sent[number].lengths("prompt") is micro_batch.lengths("prompt"), "counts stay on the host"
    sender = DeviceSender(CPU)
    addresses = [sender.send(batch(number))["noisy"].untyped_storage().data_ptr() for number in range(6)]
    assert addresses == [*addresses[:2]] * 3
    assert addresses[0] != addresses[1]


def test_host_memory_is_released_before_the_next_batch_is_requested() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def source() -> Generator[Batch, None, None]:
        for number in range(4):
            assert sum(ref() is not None for ref in alive) == 0
            micro_batch = batch(number)
            alive.append(weakref.ref(micro_batch["noisy"]))
            yield micro_batch
            del micro_batch

    for step in prefetch_steps(source(), 2, CPU):
        for _ in step:
            assert sum(ref() is not None for ref in alive) <= 1


def test_every_micro_batch_is_finished_once_on_the_device() -> None:
    """As it is sent; the metadata afterwards describe the finished one."""
    finished: list[int] = []

    def finish(arrived: Batch) -> Batch:
        finished.append(int(arrived.host["prompt.length"][2]))
        return arrived.with_values({"noisy": arrived["noisy"].repeat(2, 1, 1), "target": 2 * arrived["target"]})

    for at, step in enumerate(prefetch_steps((batch(number) for number in range(4)), 2, CPU, finish)):
        assert finished == list(range(2 * at + 1))
        for number, micro_batch in enumerate(step, start=2 * at):
            assert torch.equal(micro_batch["noisy"], batch(number)["noisy"].repeat(2, 1, 1))
            assert torch.equal(micro_batch["target"], 2 * batch(number)["target"])
        assert [tuple(micro_batch["noisy"].shape) for micro_batch in step] == [(6, 4, 4)] * 2
    assert finished == [0, 1, 2, 3]


def test_steps_yield_data_once_and_metadata_afterwards() -> None:
    steps = list[list[tuple[int, ...]]]()
    fetched: list[int] = []

    def source() -> Generator[Batch, None, None]:
        for number in range(6):
            fetched.append(number)
            yield batch(number)

    for at, step in enumerate(prefetch_steps(source(), 3, CPU)):
        assert len(step) == 3
        assert len(fetched) == 3 * at + 1, "only the first micro-batch is prefetched"
        for number, micro_batch in enumerate(step):
            assert_same(micro_batch, batch(3 * at + number))
        steps.append([tuple(micro_batch["noisy"].shape) for micro_batch in step])
        assert {micro_batch["noisy"].device.type for micro_batch in step} == {"meta"}
        counts = [micro_batch.host["prompt.length"].tolist()[2] for micro_batch in step]
        assert counts == [3 * at + number for number in range(3)]
    assert steps == [[(3, 4, 4)] * 3] * 2


def test_closing_closes_the_source_while_a_step_is_referenced() -> None:
    batches = (batch(number) for number in count())
    steps = prefetch_steps(batches, 2, CPU)
    step = next(steps)
    steps.close()
    assert next(batches, None) is None
    assert len(step) == 2
    steps = prefetch_steps((batch(number, side=4 + number) for number in count()), 2, CPU)
    step = next(steps)
    with pytest.raises(AssertionError, match="must be equal"):
        list(equal_micro_batches(step))


def test_a_process_without_data_opens_nothing_and_flops_are_those_of_all() -> None:
    """It needs neither dataset nor preparer; the batch sizes are those of its share of each step, in any bucket."""
    order = build_order(0, [([Segment(60, 1.0)], 12), ([Segment(60, 1.0)], 24)])
    steps = placeholder_steps(order.batch_size, 2, 3, 1)
    sizes = []
    for number, batches in zip(range(1, order.steps_per_epoch), steps, strict=False):
        assert len(batches) == 3
        sizes.append({batch.size for batch in batches})
        assert sizes[-1] == {order.batch_size(number) // 6}
        assert not any(batch.values for batch in batches)
    assert {2} in sizes
    assert {4} in sizes
    assert flops_counter(SD3Cost(SIZES["tiny2"]), 2)(next(steps)) == 0
    # the meter divides them by the number of processes: MFU is per GPU.
    cost, samples, tokens = SD3Cost(SIZES["tiny2"]), 3, 5
    values = {"noisy": torch.zeros(samples, 16, 4, 6), "prompt": torch.zeros(samples, tokens, 8)}
    batches = [Batch(samples, values)] * 2
    own = 2 * step_flops(cost, {Tokens(image_tokens(48, 32), tokens): samples})
    assert [flops_counter(cost, world)(batches) for world in (1, 4)] == [own, 4 * own]
