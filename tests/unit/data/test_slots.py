"""Slots: packed values come back unchanged and without needless copies; no slot is reused while it is read."""

import gc
import math
import multiprocessing
import os
from typing import Any

import torch

from sd3_light.data.slots import Packed, Packer, SlotPool
from tests.waiting import HANG_SECONDS


def packed_into(pool: SlotPool, value: Any) -> Packed:
    slot = pool.acquire()
    assert slot is not None
    return Packer(pool, slot).pack(value)


def test_a_nested_value_round_trips_and_other_tensors_are_left_to_pickle() -> None:
    pool = SlotPool(1)
    value = {
        "a": [torch.arange(5), (torch.ones(2, 3, dtype=torch.bfloat16), None, "text")],
        "odd": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7, dtype=torch.uint8),
        "number": 3,
    }
    unpacked = pool.unpack(packed_into(pool, value))
    assert torch.equal(unpacked["a"][0], torch.arange(5))
    assert unpacked["a"][1][0].dtype == torch.bfloat16
    assert torch.equal(unpacked["a"][1][0].float(), torch.ones(2, 3))
    assert unpacked["a"][1][1:] == (None, "text")
    assert torch.equal(unpacked["odd"], value["odd"])
    assert unpacked["empty"].shape == (0, 4)
    assert int(unpacked["scalar"]) == 7
    assert unpacked["number"] == 3
    learned = torch.ones(2, requires_grad=True)
    packed = packed_into(SlotPool(1), {"learned": learned, "sparse": torch.eye(2).to_sparse()})
    assert packed.value["learned"] is learned
    assert packed.value["sparse"].is_sparse


def test_a_slot_is_released_with_its_last_tensor() -> None:
    pool = SlotPool(1)
    unpacked = pool.unpack(packed_into(pool, {"a": torch.ones(4), "b": torch.zeros(4)}))
    assert pool.acquire() is None
    part = unpacked["a"][1:3].view(2, 1)
    del unpacked
    assert pool.acquire() is None, "a view of a view still reads it"
    as_array = part.numpy()
    del part
    assert pool.acquire() is None, "and so does an array"
    assert as_array.tolist() == [[1.0], [1.0]]
    del as_array
    assert pool.acquire() == 0


def test_the_most_recently_released_slot_is_acquired_first() -> None:
    """Its pages are mapped, and spare slots stay untouched."""
    pool = SlotPool(3)
    held = [pool.unpack(packed_into(pool, torch.ones(8))) for _ in range(2)]
    held.pop(0)
    again = pool.acquire()
    assert again == 2
    assert os.fstat(pool._files[0]).st_size == 0


def test_tensors_allocated_one_by_one_are_not_copied() -> None:
    pool = SlotPool(1)
    slot = pool.acquire()
    assert slot is not None
    packer = Packer(pool, slot)
    read = packer.allocate(100)
    read[:] = 7
    left_out = packer.empty((3, 5), torch.float64)
    left_out[:] = float("nan")
    del left_out
    large = packer.empty((1 << 10, 1 << 9), torch.float32)  # the slot grows, and its pages are mapped again
    large[:] = torch.arange(1 << 9)
    small = packer.empty((3,), torch.bfloat16)
    small[:] = 2
    packed = packer.pack([large, read[10:20], small, torch.arange(4), large[1:]])
    offsets = [ref.offset for ref in packed.value]
    assert offsets[4] == offsets[0] + (4 << 9), "a view of a tensor in the slot"
    assert packed.nbytes == max(ref.offset + ref.dtype.itemsize * math.prod(ref.shape) for ref in packed.value)
    assert offsets[1] == 10, "nothing moved"
    assert packed.nbytes < (4 << 19) + 1000, "nothing is stored twice"
    unpacked = pool.unpack(packed)
    assert torch.equal(unpacked[0], torch.arange(1 << 9).expand(1 << 10, -1).float())
    assert unpacked[1].tolist() == [7] * 10
    assert unpacked[2].tolist() == [2.0] * 3
    assert torch.equal(unpacked[3], torch.arange(4))


def test_a_forked_process_fills_a_slot_of_its_parent() -> None:
    pool, context = SlotPool(2), multiprocessing.get_context("fork")
    queue = context.Queue()
    slots = [pool.acquire(), pool.acquire()]

    def work() -> None:
        for slot in slots:
            assert slot is not None
            queue.put(Packer(pool, slot).pack({"x": torch.full((500_000,), float(slot))}))

    process = context.Process(target=work)
    process.start()
    for slot in slots:
        unpacked = pool.unpack(queue.get(timeout=HANG_SECONDS))
        assert (unpacked["x"] == float(slot or 0)).all()
    process.join()
    assert process.exitcode == 0


def test_files_are_closed_with_the_pool() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = SlotPool(5)
    assert len(os.listdir("/proc/self/fd")) == before + 5
    unpacked = pool.unpack(packed_into(pool, torch.ones(3)))
    del pool
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert unpacked.tolist() == [1.0, 1.0, 1.0], "unpacked tensors stay valid"


def test_a_view_is_pinned_once_and_unpinned_before_its_memory_is_freed() -> None:
    pinned: dict[int, int] = {}
    asked: list[int] = []

    def pin(address: int, nbytes: int) -> Any:
        pinned[address] = nbytes
        asked.append(nbytes)
        return lambda: pinned.pop(address)

    pool = SlotPool(1, pin)
    slot = pool.acquire()
    assert slot is not None
    small = pool.lease(slot, 100)
    assert pinned[small.data_ptr()] >= 100
    assert len(asked) == 1
    del small
    assert len(pinned) == 1, "the slot is still mapped"
    slot = pool.acquire()
    assert slot is not None
    large = pool.lease(slot, 5 << 20)
    assert list(pinned) == [large.data_ptr()], "the smaller view is unpinned"
    del large
    again = pool.lease(0, 50)
    assert len(asked) == 2, "an existing view is reused"
    del again, pool
    gc.collect()
    assert not pinned


def test_workers_do_not_pin() -> None:
    pool = SlotPool(1, lambda address, nbytes: os._exit(3))
    child = os.fork()
    if child == 0:
        pool.memory(0, 10)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_slots_of_known_capacity_are_pinned_once() -> None:
    pins: list[int] = []

    def pin(address: int, nbytes: int) -> Any:
        pins.append(nbytes)
        return lambda: pins.append(-nbytes)

    pool = SlotPool(3, pin, capacity=(5 << 20) - 7)
    assert [os.fstat(file).st_blocks for file in pool._files] == [0, 0, 0], "no memory is used before it is written"
    pool.reserve()
    assert pins == [5 << 20] * 3
    for megabytes in (1, 4, 2, 5):
        assert pool.unpack(packed_into(pool, torch.ones((megabytes << 20) - 64, dtype=torch.uint8))).all()
    assert pins == [5 << 20] * 3
    assert pool.unpack(packed_into(pool, torch.ones(6 << 20, dtype=torch.uint8))).all(), "more than expected"
    gc.collect()
    assert len(pins) == 5, "the slot grew"
