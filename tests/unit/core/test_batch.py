"""Named batches: pieces, lengths, what travels and what stays."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sd3_light.core.batch import Batch, BatchRecord
from sd3_light.data.slots import Packer, SlotPool


def batch(size: int = 6) -> Batch:
    noisy = torch.arange(size * 4.0).view(size, 1, 2, 2)
    prompt = torch.arange(size * 5 * 3.0).view(size, 5, 3)
    return Batch(size, {"noisy": noisy, "prompt": prompt}, {"prompt.length": torch.arange(size) % 5 + 1})


@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
def test_pieces_hold_the_samples_in_order_and_no_padding_of_others(pieces: int) -> None:
    parts = batch().split(pieces)
    assert [part.size for part in parts] == [6 // pieces] * pieces
    assert torch.equal(torch.cat([part["noisy"] for part in parts]), batch()["noisy"])
    for number, part in enumerate(parts):
        lengths = part.lengths("prompt")
        assert lengths is not None
        rows = slice(number * part.size, (number + 1) * part.size)
        assert torch.equal(part["prompt"], batch()["prompt"][rows, : int(lengths.max())])


def test_placeholders_have_a_size_only_and_padding_adds_rows_of_zeros() -> None:
    assert Batch(6).split(2) == [Batch(3), Batch(3)]
    assert Batch(6).tensors() == []
    with pytest.raises(AssertionError):
        batch().split(4)
    padded = batch().padded_to("prompt", 7)
    assert torch.equal(padded["prompt"][:, :5], batch()["prompt"])
    assert not padded["prompt"][:, 5:].any()
    plain = batch()
    assert plain.padded_to("prompt", 5) is plain


def test_values_have_the_order_of_their_insertion() -> None:
    """Recorded work copies them by position."""
    changed = batch().with_values({"t": torch.zeros(6), "mask": None, "noisy": torch.ones(6, 1)})
    assert list(changed.values) == ["noisy", "prompt", "t"]
    assert [tuple(tensor.shape) for tensor in changed.tensors()] == [(6, 1), (6, 5, 3), (6,)]
    assert list(changed.select(("t", "target", "noisy")).values) == ["t", "noisy"]
    assert list(changed.with_values({}, without=["prompt"]).values) == ["noisy", "t"]
    assert changed.get("mask") is None


def test_shapes_tell_batches_apart() -> None:
    plain = batch()
    shapes = {
        plain.shapes(),
        plain.with_values({"mask": torch.ones(6)}).shapes(),
        plain.with_values({"noisy": plain["noisy"].double()}).shapes(),
        plain.padded_to("prompt", 7).shapes(),
        replace(plain, host={"rows": 32}).shapes(),
        replace(plain, host={"rows": 64}).shapes(),
    }
    assert len(shapes) == 6
    assert batch().shapes() == plain.shapes()


def test_a_batch_travels_through_slots_and_pickle() -> None:
    pool = SlotPool(1)
    slot = pool.acquire()
    assert slot is not None
    unpacked = pool.unpack(Packer(pool, slot).pack(batch()))
    for copy in (unpacked, pickle.loads(pickle.dumps(batch()))):
        assert isinstance(copy, Batch)
        assert all(torch.equal(copy[name], batch()[name]) for name in ("noisy", "prompt"))
        assert torch.equal(copy.host["prompt.length"], batch().host["prompt.length"])


def test_libraries_that_wrap_modules_do_not_look_inside() -> None:
    """Otherwise DDP and FSDP2 would copy and cast it."""
    from torch.utils._pytree import tree_leaves

    record = batch()
    assert isinstance(record, BatchRecord)
    assert not isinstance(record, tuple | list | dict | Tensor)
    assert tree_leaves(record) == [record]
