"""Columns and named batches: bytes, names and pieces; what travels and what stays."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sd3_light.core.batch import Batch, BatchRecord
from sd3_light.core.columns import SMALLEST, Bucket, Column, difference, named_bucket
from sd3_light.data.slots import Packer, SlotPool
from sd3_light.tensor_file import DTYPES

LATENTS = Column("latents", "video", "float16", (8, 3, 4, 6), ("vae",))
MASK = Column("mask", "mask", "uint8", (4, 6), ())
WORDS = Column("words", "caption", "bfloat16", (77, 5), ("encoder",), ragged=True, settings={"length": 77})
SCORE = Column("score", "caption", "float32", (), ("judge",))


def test_bytes_are_those_of_one_value() -> None:
    assert LATENTS.nbytes == 8 * 3 * 4 * 6 * 2
    assert MASK.nbytes == 24
    assert WORDS.nbytes == 77 * 5 * 2, "of the longest"
    assert SCORE.nbytes == 4
    for dtype in DTYPES.values():
        assert Column("any", "image", dtype.torch_name, (3,), ()).nbytes == 3 * dtype.itemsize
    assert (LATENTS.row_shape, WORDS.row_shape, SCORE.row_shape) == ((8, 3, 4, 6), (5,), ())


def test_a_ragged_column_has_two_tensors() -> None:
    assert LATENTS.tensors == ("latents",)
    assert WORDS.tensors == ("words.tokens", "words.start")
    assert WORDS.described() == {"reads": "caption", "ragged": True}
    assert SCORE.described() == {"reads": "caption"}


@pytest.mark.parametrize(
    "change",
    [{"name": "caption"}, {"reads": "image"}, {"dtype": "complex32"}, {"name": "mask"}, {"reads": "mask"}],
)
def test_impossible_columns_are_rejected(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a column that a shard can have"):
        replace(WORDS, **change)  # type: ignore[arg-type]


def test_columns_are_compared_by_what_is_stored() -> None:
    declared = [LATENTS, MASK, WORDS, SCORE]
    stored = [replace(LATENTS, parts=()), replace(WORDS, shape=(3, 5), parts=(), settings={}), SCORE]
    assert difference(stored, declared) is None, "masks may be absent, and captions shorter"
    line = "it has mask of the mask, uint8 [6, 4], expected mask of the mask, uint8 [4, 6]"
    assert difference([LATENTS, replace(MASK, shape=(6, 4)), WORDS, SCORE], declared) == line
    assert difference(declared[:-1], declared) == ("it has no other column, expected score of the caption, float32 []")
    line = "it has more of the caption, float32 [], expected no other column"
    assert difference([*declared, replace(SCORE, name="more")], declared) == line
    assert difference([MASK, LATENTS, WORDS, SCORE], declared) is not None, "the order counts"
    wide, longer = replace(LATENTS, shape=(8, 3, 2, 12)), replace(WORDS, shape=(77, 6))
    assert difference([wide], [LATENTS]) is not None
    assert difference([wide], [LATENTS], same_bucket=False) is None
    assert difference([longer], [WORDS], same_bucket=False) is not None
    assert difference([replace(wide, dtype="float32")], [LATENTS], same_bucket=False) is not None


def test_buckets_have_names() -> None:
    assert named_bucket("64x48") == Bucket(64, 48)
    assert named_bucket("empty") == SMALLEST


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
    others = [plain.with_values(values) for values in ({"mask": torch.ones(6)}, {"noisy": plain["noisy"].double()})]
    others += [plain.padded_to("prompt", 7), *(replace(plain, host={"rows": rows}) for rows in (32, 64))]
    assert len({each.shapes() for each in (plain, *others)}) == 6
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
