"""Checkpoints opened: any part of any tensor from any layout's ranges, and no damage unseen."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from sd3_light.checkpoint import reading, store
from sd3_light.checkpoint.index import Entry, Index, Range
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import INDEX, write_checkpoint
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece

Writer = Callable[..., Path]
PART = "rank-00000.safetensors"


def piece(name: str, whole: Tensor, start: int = 0, stop: int | None = None, *, writes: bool = True) -> TensorPiece:
    return TensorPiece(name, whole.reshape(-1)[start:stop], start, tuple(whole.shape), writes)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"param/w": torch.arange(15.0).view(3, 5), "exp_avg/w": torch.rand(3, 5), "step/w": torch.tensor(4.0)}
    return write_checkpoint(tmp_path, 1, tensors, {"words": "größer"})


# --- there and back ----------------------------------------------------------------------------


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    awkward = [0.0, -0.0, 1e-45, 3.4e38, float("inf"), float("-inf"), 1 / 3]
    tensors: dict[str, Tensor] = {
        "param/awkward": torch.tensor(awkward),
        "param/not-a-number": torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
        "ema/a@b": torch.randn(2, 3).bfloat16(),  # a name may hold the sign that ends it
        "state1/table": torch.arange(256).to(torch.uint8).view(16, 16),
        "step/w": torch.tensor(2**40),
        "mask/w": torch.tensor([True, False, True]),
        "wide/w": torch.randn(3, dtype=torch.float64),
        "narrow/w": torch.randn(5).half(),
        "param/transposed": torch.randn(4, 6).t(),
        "param/nothing": torch.empty(0, 4),
    }
    found = open_checkpoint(write_checkpoint(tmp_path, 1, tensors, {}))
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert found.dtypes == {name: tensor.dtype for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        back = found.tensor(name)
        assert back.shape == tensor.shape, name
        assert back.view(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def test_names_of_a_kind(saved: Path) -> None:
    found = open_checkpoint(saved)
    assert (found.names("param"), found.names("exp_avg"), found.names("exp")) == (["w"], ["w"], [])
    assert found.facts == {"words": "größer"}


def test_the_library_reads_the_files_too(tmp_path: Path, write_ranks: Writer) -> None:
    whole = torch.arange(15.0).view(3, 5)
    small = torch.tensor([1, 2, 3], dtype=torch.uint8)
    parts = [[piece("state/s", small), piece("param/w", whole, 4)], [piece("param/w", whole, 0, 4)]]
    folder = write_ranks(tmp_path, 1, parts)
    with safe_open(str(folder / PART), "pt") as file:
        assert set(file.keys()) == {"param/w@4", "state/s@0"}
        assert torch.equal(file.get_tensor("param/w@4"), torch.arange(4.0, 15.0))
        assert torch.equal(file.get_tensor("state/s@0"), small)
    data = (folder / PART).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {key: entry["data_offsets"][0] for key, entry in header.items()} == {"param/w@4": 0, "state/s@0": 44}, (
        "aligned"
    )


def test_any_part_of_any_cut(tmp_path: Path, write_ranks: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hold random ranges in random order, and long ranges that are cut again."""
    monkeypatch.setattr(store, "RANGE_ELEMENTS", 5)
    chance = random.Random(3)
    for step in range(20):
        whole = torch.randn(chance.randint(1, 40))
        cuts = sorted({0, len(whole), *(chance.randint(0, len(whole)) for _ in range(4))})
        ranks: list[list[TensorPiece]] = [[] for _ in range(3)]
        for start, stop in pairwise(cuts):
            chance.choice(ranks).append(piece("param/w", whole, start, stop))
        for pieces in ranks:
            chance.shuffle(pieces)
        found = open_checkpoint(write_ranks(tmp_path, step, ranks))
        assert torch.equal(found.tensor("param/w"), whole)
        for _ in range(20):
            start, stop = sorted(chance.randint(0, len(whole)) for _ in range(2))
            assert torch.equal(found.read("param/w", start, stop), whole[start:stop])


def test_pieces_that_follow_each_other_read_a_range_once(
    tmp_path: Path, write_ranks: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is more read than the ranges that a piece touches."""
    whole = torch.arange(30.0)
    folder = write_ranks(tmp_path, 1, [[piece("param/w", whole, 0, 10)], [piece("param/w", whole, 10, 30)]])
    reads: list[str] = []
    real = reading.read_range
    monkeypatch.setattr(reading, "read_range", lambda path, *given: reads.append(path.name) or real(path, *given))
    target = torch.zeros(30)
    found = open_checkpoint(folder)
    assert reads == []
    found.load_into([piece("param/w", target, 10, 14), piece("param/w", target, 14, 29), piece("param/w", target, 29)])
    assert reads == ["rank-00001.safetensors"]
    assert torch.equal(target, torch.cat([torch.zeros(10), whole[10:]]))
    found.load_into([piece("param/w", target, 0, 11)])
    assert reads == ["rank-00001.safetensors", PART, "rank-00001.safetensors"]
    assert torch.equal(target, whole)


# --- into live memory --------------------------------------------------------------------------


def test_pieces_are_filled_in_their_own_dtype_replicas_too(saved: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 5))
    half = torch.zeros(3, 5, dtype=torch.bfloat16)
    count = torch.zeros(())
    open_checkpoint(saved).load_into(
        [
            TensorPiece("param/w", weight.view(-1)[5:], 5, (3, 5)),
            TensorPiece("param/w", half.view(-1), 0, (3, 5), writes=False),
            TensorPiece("step/w", count.view(-1), 0, ()),
        ]
    )
    assert torch.equal(weight[1:], torch.arange(5.0, 15.0).view(2, 5))
    assert not weight[0].any()
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.equal(half, torch.arange(15.0).view(3, 5).bfloat16())
    assert count == 4


def test_a_missing_name_and_another_shape_name_checkpoint_and_tensor(saved: Path) -> None:
    found, target = open_checkpoint(saved), torch.zeros(15)
    good = TensorPiece("param/w", target, 0, (3, 5))
    with pytest.raises(UserError, match=rf"checkpoint {saved} has no tensor param/v; "):
        found.load_into([replace(good, name="param/v")])
    with pytest.raises(UserError, match=rf"{saved} holds param/w of shape \[3, 5\], this run has \[5, 3\]; "):
        found.load_into([replace(good, shape=(5, 3))])
    with pytest.raises(UserError, match="no tensor ema/w"):
        found.tensor("ema/w")
    assert not target.any()


# --- damage ------------------------------------------------------------------------------------


def fault_of(folder: Path) -> str | None:
    """What reading all of it says; None where all is as `saved` wrote it."""
    try:
        found = open_checkpoint(folder)
        tensors = {name: found.tensor(name) for name in found.shapes}
    except UserError as fault:
        return str(fault)
    assert torch.equal(tensors["param/w"], torch.arange(15.0).view(3, 5))
    return None


def test_a_damaged_byte_anywhere_in_a_file_is_found_or_means_nothing(saved: Path) -> None:
    """The header's words on dtype and shape are not used, the index has them. Every other byte counts."""
    path = saved / PART
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    unseen = []
    for at in range(len(before)):
        flip(path, at)
        if (fault := fault_of(saved)) is None:
            unseen.append(at)
        else:
            assert fault.startswith(f"checkpoint {saved} is damaged ({PART}: ")
            assert fault.endswith("resume from an earlier one")
            assert "\n" not in fault
        path.write_bytes(before)
    assert all(8 <= at < 8 + length for at in unseen)
    assert len(unseen) < length // 2


def test_a_damaged_byte_anywhere_in_the_index_is_found(saved: Path) -> None:
    path = saved / INDEX
    before = path.read_bytes()
    for at in range(len(before)):
        flip(path, at)
        with pytest.raises(UserError) as fault:
            open_checkpoint(saved)
        assert str(saved) in str(fault.value)
        assert "\n" not in str(fault.value)
        path.write_bytes(before)
    assert open_checkpoint(saved).facts == {"words": "größer"}


def test_a_cut_file_a_missing_one_and_one_that_is_cut_while_open(saved: Path) -> None:
    path = saved / PART
    whole = path.read_bytes()
    found = open_checkpoint(saved)
    path.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=rf"is damaged \({PART}: has {len(whole) - 4} bytes of {len(whole)}\)"):
        open_checkpoint(saved)
    with pytest.raises(UserError, match=rf"is damaged \({PART}: it ends too early\)"):
        [found.tensor(name) for name in found.shapes]
    path.unlink()
    with pytest.raises(UserError, match=rf"{PART}: is missing\); resume from an earlier one"):
        open_checkpoint(saved)
    with pytest.raises(UserError, match=rf"{PART}: No such file"):
        found.tensor("exp_avg/w")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'{"format": "\xff"}', b"\x00\x00"])
def test_an_index_that_is_none_is_a_users_fault(saved: Path, content: bytes) -> None:
    (saved / INDEX).write_bytes(content)
    with pytest.raises(UserError, match=rf"{saved} (is not a whole checkpoint|has format None)"):
        open_checkpoint(saved)


def test_other_formats_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not a whole checkpoint \(index.json: No such file"):
        open_checkpoint(tmp_path / "nowhere")
    (saved / INDEX).write_text(json.dumps({"format": 1, "facts": {}, "shapes": {}, "files": {}}))
    with pytest.raises(UserError, match="is of an older version"):
        open_checkpoint(saved)
    (saved / INDEX).write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads 2"):
        open_checkpoint(saved)


def test_an_index_that_does_not_cover_a_tensor_is_refused(saved: Path) -> None:
    """Whoever wrote it: the digest says only that it is as it was written."""
    ranges = (Range(0, 4, PART, ""), Range(5, 10, PART, ""))
    size = (saved / PART).stat().st_size
    index = Index({}, {"param/w": Entry((3, 5), "F32", ranges)}, {PART: size})
    (saved / INDEX).write_text(index.to_json())
    with pytest.raises(UserError, match=r"does not hold param/w exactly once \(elements 4 to 4 are missing\)"):
        open_checkpoint(saved)
