"""Columns: their bytes, their tensors, and how shards may differ."""

from dataclasses import replace

import pytest

from sd3_light.core.columns import SMALLEST, Bucket, Column, difference, named_bucket
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
    assert difference([LATENTS, replace(MASK, shape=(6, 4)), WORDS, SCORE], declared) == (
        "it has mask of the mask, uint8 [6, 4], expected mask of the mask, uint8 [4, 6]"
    )
    assert difference(declared[:-1], declared) == ("it has no other column, expected score of the caption, float32 []")
    assert difference([*declared, replace(SCORE, name="more")], declared) == (
        "it has more of the caption, float32 [], expected no other column"
    )
    assert difference([MASK, LATENTS, WORDS, SCORE], declared) is not None, "the order counts"
    wide, longer = replace(LATENTS, shape=(8, 3, 2, 12)), replace(WORDS, shape=(77, 6))
    assert difference([wide], [LATENTS]) is not None
    assert difference([wide], [LATENTS], same_bucket=False) is None
    assert difference([longer], [WORDS], same_bucket=False) is not None
    assert difference([replace(wide, dtype="float32")], [LATENTS], same_bucket=False) is not None


def test_buckets_have_names() -> None:
    assert named_bucket("64x48") == Bucket(64, 48)
    assert named_bucket("empty") == SMALLEST
