"""Reading checkpoints: any part of any tensor, from any layout; damage is always detected."""

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
from sd3_light.checkpoint.index import INDEX, Index, IndexEntry, Range
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece
from tests.checkpoints import write_checkpoint
from tests.refusals import refused
from tests.shards import header_of

Writer = Callable[..., Path]
PART = "rank-00000.safetensors"


def piece(name: str, full: Tensor, start: int = 0, stop: int | None = None, *, writes: bool = True) -> TensorPiece:
    return TensorPiece(name, full.reshape(-1)[start:stop], start, tuple(full.shape), writes)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"param/w": torch.arange(15.0).view(3, 5), "exp_avg/w": torch.rand(3, 5), "step/w": torch.tensor(4.0)}
    return write_checkpoint(tmp_path, 1, tensors, {"words": "größer"})


def test_every_dtype_round_trips_bit_for_bit(tmp_path: Path) -> None:
    awkward = [0.0, -0.0, 1e-45, 3.4e38, float("inf"), float("-inf"), 1 / 3]
    tensors: dict[str, Tensor] = {
        "param/awkward": torch.tensor(awkward),
        "param/not-a-number": torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
        "ema/a@b": torch.randn(2, 3).bfloat16(),  # a name may contain the separator
        "state1/table": torch.arange(256).to(torch.uint8).view(16, 16),
        "step/w": torch.tensor(2**40),
        "mask/w": torch.tensor([True, False, True]),
        "wide/w": torch.randn(3, dtype=torch.float64),
        "narrow/w": torch.randn(5).half(),
        "param/transposed": torch.randn(4, 6).t(),
        "param/nothing": torch.empty(0, 4),
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, 1, tensors, {}))
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert checkpoint.dtypes == {name: tensor.dtype for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        loaded = checkpoint.tensor(name)
        assert loaded.shape == tensor.shape, name
        assert loaded.view(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def test_the_safetensors_library_reads_the_files(tmp_path: Path, write_ranks: Writer) -> None:
    full = torch.arange(15.0).view(3, 5)
    small = torch.tensor([1, 2, 3], dtype=torch.uint8)
    parts = [[piece("state/s", small), piece("param/w", full, 4)], [piece("param/w", full, 0, 4)]]
    folder = write_ranks(tmp_path, 1, parts)
    with safe_open(str(folder / PART), "pt") as file:
        assert set(file.keys()) == {"param/w@4", "state/s@0"}
        assert torch.equal(file.get_tensor("param/w@4"), torch.arange(4.0, 15.0))
        assert torch.equal(file.get_tensor("state/s@0"), small)
    header, _ = header_of((folder / PART).read_bytes())
    starts = {key: entry["data_offsets"][0] for key, entry in header.items()}
    assert starts == {"param/w@4": 0, "state/s@0": 44}, "aligned"


def test_any_part_of_any_split(tmp_path: Path, write_ranks: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hold random ranges in random order; long ranges are split further."""
    monkeypatch.setattr(store, "RANGE_ELEMENTS", 5)
    rng = random.Random(3)
    for step in range(20):
        full = torch.randn(rng.randint(1, 40))
        cuts = sorted({0, len(full), *(rng.randint(0, len(full)) for _ in range(4))})
        ranks: list[list[TensorPiece]] = [[] for _ in range(3)]
        for start, stop in pairwise(cuts):
            rng.choice(ranks).append(piece("param/w", full, start, stop))
        for pieces in ranks:
            rng.shuffle(pieces)
        checkpoint = open_checkpoint(write_ranks(tmp_path, step, ranks))
        assert torch.equal(checkpoint.tensor("param/w"), full)
        for _ in range(20):
            start, stop = sorted(rng.randint(0, len(full)) for _ in range(2))
            assert torch.equal(checkpoint.read("param/w", start, stop), full[start:stop])


def test_consecutive_pieces_read_once(tmp_path: Path, write_ranks: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the ranges that a piece needs are read."""
    full = torch.arange(30.0)
    folder = write_ranks(tmp_path, 1, [[piece("param/w", full, 0, 10)], [piece("param/w", full, 10, 30)]])
    reads: list[str] = []
    real = reading.read_range
    monkeypatch.setattr(reading, "read_range", lambda path, *args: reads.append(path.name) or real(path, *args))
    target = torch.zeros(30)
    checkpoint = open_checkpoint(folder)
    assert reads == []
    checkpoint.load_into([piece("param/w", target, *ends) for ends in ((10, 14), (14, 29), (29,))])
    assert reads == ["rank-00001.safetensors"]
    assert torch.equal(target, torch.cat([torch.zeros(10), full[10:]]))
    checkpoint.load_into([piece("param/w", target, 0, 11)])
    assert reads == ["rank-00001.safetensors", PART, "rank-00001.safetensors"]
    assert torch.equal(target, full)


def test_pieces_and_replicas_are_filled_in_their_own_dtype(saved: Path) -> None:
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


def test_a_missing_tensor_and_a_wrong_shape_are_reported(saved: Path) -> None:
    checkpoint, target = open_checkpoint(saved), torch.zeros(15)
    assert (checkpoint.names("param"), checkpoint.names("exp_avg"), checkpoint.names("exp")) == (["w"], ["w"], [])
    good = TensorPiece("param/w", target, 0, (3, 5))
    refused(rf"checkpoint {saved} has no tensor param/v; ", checkpoint.load_into, [replace(good, name="param/v")])
    with pytest.raises(UserError, match=rf"{saved} has param/w of shape \[3, 5\], this run has \[5, 3\]; "):
        checkpoint.load_into([replace(good, shape=(5, 3))])
    refused("no tensor ema/w", checkpoint.tensor, "ema/w")
    assert not target.any()


def read_error(folder: Path) -> str | None:
    """Return the error of reading all of it, or None if it is as `saved` wrote it."""
    try:
        checkpoint = open_checkpoint(folder)
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
    except UserError as error:
        return str(error)
    assert torch.equal(tensors["param/w"], torch.arange(15.0).view(3, 5))
    return None


def test_a_damaged_byte_in_a_file_is_detected_or_unused(saved: Path) -> None:
    """The header's dtypes and shapes are unused, because the index has them. Every other byte matters."""
    path = saved / PART
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    undetected = []
    for at in range(len(before)):
        flip(path, at)
        if (error := read_error(saved)) is None:
            undetected.append(at)
        else:
            assert error.startswith(f"checkpoint {saved} is damaged ({PART}: ")
            assert error.endswith("resume from an earlier one")
            assert "\n" not in error
        path.write_bytes(before)
    assert all(8 <= at < 8 + length for at in undetected)
    assert len(undetected) < length // 2


def test_a_damaged_byte_in_the_index_is_detected(saved: Path) -> None:
    path = saved / INDEX
    before = path.read_bytes()
    for at in range(len(before)):
        flip(path, at)
        raised = refused("", open_checkpoint, saved)
        assert str(saved) in raised
        path.write_bytes(before)
    assert open_checkpoint(saved).facts == {"words": "größer"}


def test_truncated_and_missing_files_are_reported(saved: Path) -> None:
    path = saved / PART
    full = path.read_bytes()
    checkpoint = open_checkpoint(saved)
    path.write_bytes(full[:-4])
    refused(rf"is damaged \({PART}: has {len(full) - 4} of {len(full)} bytes\)", open_checkpoint, saved)
    with pytest.raises(UserError, match=rf"is damaged \({PART}: it is truncated\)"):
        [checkpoint.tensor(name) for name in checkpoint.shapes]
    path.unlink()
    refused(rf"{PART}: is missing\); resume from an earlier one", open_checkpoint, saved)
    refused(rf"{PART}: No such file", checkpoint.tensor, "exp_avg/w")


def test_other_formats_and_invalid_indices_are_reported(saved: Path, tmp_path: Path) -> None:
    refused(r"nowhere is not a complete checkpoint \(index.json: No such file", open_checkpoint, tmp_path / "nowhere")
    for content in (b"", b"{", b"[]", b"7", b'{"format": "\xff"}', b"\x00\x00"):
        (saved / INDEX).write_bytes(content)
        refused(rf"{saved} (is not a complete checkpoint|has format None)", open_checkpoint, saved)
    (saved / INDEX).write_text(json.dumps({"format": 99}))
    refused("has format 99, this version reads 2", open_checkpoint, saved)


def test_an_index_with_gaps_is_rejected(saved: Path) -> None:
    """The digest only shows that it is unchanged since it was written."""
    ranges = (Range(0, 4, PART, ""), Range(5, 10, PART, ""))
    size = (saved / PART).stat().st_size
    index = Index({}, {"param/w": IndexEntry((3, 5), "F32", ranges)}, {PART: size})
    (saved / INDEX).write_text(index.to_json())
    refused(r"does not contain param/w exactly once \(elements 4 to 4 are missing\)", open_checkpoint, saved)
