"""Tensors on disk: rearranged and written files equal those of the safetensors library."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from sd3_light import tensor_file
from sd3_light.tensor_file import DTYPES, header_bytes, joined, read_tensor_file, same, stored, write_tensor_file, zeros

GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {
    **{f"a.{name}": torch.randn(3, 5, generator=GENERATOR).to(dtype.torch) for name, dtype in DTYPES.items()},
    'ä "b"': torch.randn(2, 2, 2, generator=GENERATOR),
    "one": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
}
METADATA = {"about": '{"a": "é"}'}


@pytest.fixture(params=[1 << 24, 7])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file written by the library, read in large chunks or in chunks of 7 bytes."""
    monkeypatch.setattr(tensor_file, "TENSOR_CHUNK_BYTES", request.param)
    save_file(TENSORS, tmp_path / "file.safetensors", METADATA)
    return tmp_path / "file.safetensors"


def test_files_of_the_library_are_read_and_written_ones_equal_them(file: Path) -> None:
    tensors, metadata = read_tensor_file(file)
    assert metadata == METADATA
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        loaded = tensors[name].load()
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert loaded.contiguous().view(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    shuffled = dict(reversed(tensors.items()))
    write_tensor_file(file.with_name("copy"), shuffled, METADATA)
    assert file.with_name("copy").read_bytes() == save(TENSORS, METADATA)


def test_tensors_differ_by_a_bit_a_shape_or_a_dtype(file: Path) -> None:
    ones = torch.ones(100)
    flipped = ones.clone()
    flipped.view(torch.int32)[99] ^= 1
    assert same(stored(ones), joined(stored(ones).split(4)))
    assert not same(stored(ones), stored(flipped))
    assert not same(stored(ones), stored(ones.reshape(10, 10)))
    assert not same(stored(ones), stored(ones.view(torch.int32)))
    eye = torch.eye(3, dtype=torch.bfloat16)
    write_tensor_file(file, {"zeros": zeros("F16", (2, 3)), "eye": stored(eye)}, METADATA)
    tensors = load_file(file)
    assert tensors["zeros"].equal(torch.zeros(2, 3, dtype=torch.float16))
    assert tensors["eye"].equal(eye)


def with_header(data: bytes, change) -> bytes:  # type: ignore[no-untyped-def]
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    change(entries)
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


def shift(entries, by: int) -> None:  # type: ignore[no-untyped-def]
    """Move the start of the first tensor: into the next one, or before all values."""
    first = min((entry for name, entry in entries.items() if name[:2] != "__"), key=lambda entry: entry["data_offsets"])
    first["data_offsets"] = [offset + by for offset in first["data_offsets"]]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:5], "its header is longer than the file"),
        (lambda data: data[:40], "its header is longer than the file"),
        (lambda data: data[:-1], "it is truncated"),
        (lambda data: data + b"\0", "extra bytes after its last tensor"),
        (lambda data: data[:8] + b"x" + data[9:], "Expecting value"),
        (lambda data: (2).to_bytes(8, "little") + b"[]", "not a safetensors header"),
        (lambda data: data.replace(b"data_offsets", b"data_0ffsets", 1), "not a safetensors header"),
        (lambda data: data.replace(b'"shape":[3,5]', b'"shape":[3,6]', 1), r"has \d+ bytes, but its shape needs \d+"),
        (lambda data: data.replace(b'"dtype":"F64"', b'"dtype":"F63"', 1), "tensors of type F63"),
        (lambda data: with_header(data, lambda entries: entries.update(__metadata__=5)), "not a table of strings"),
        (lambda data: with_header(data, lambda entries: shift(entries, 8)), "does not start where the previous"),
        (lambda data: with_header(data, lambda entries: shift(entries, -8)), "does not start where the previous"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(file: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=reason):
        read_tensor_file(file)


def test_a_file_that_shrinks_after_opening_is_detected(file: Path) -> None:
    tensors, _ = read_tensor_file(file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="it is truncated"):
        tensors["a.F64"].load()
    table = torch.arange(24.0).reshape(6, 4)
    save_file({"top": table[:4].contiguous(), "bottom": table[4:].contiguous()}, file)
    tensors, _ = read_tensor_file(file)
    full = joined([tensors["top"], tensors["bottom"]])
    assert full.load().equal(table)
    assert [part.load().tolist() for part in full.split(3)] == [part.tolist() for part in table.chunk(3)]
    assert full.rows(3, 5).load().equal(table[3:5]), "across the seam"
    halves = joined(full.split(2)[::-1])
    assert halves.load().equal(torch.cat([table[3:], table[:3]]))
    assert joined(halves.split(2)[::-1]).reshaped((3, 8)).load().equal(table.reshape(3, 8))


def test_values_start_at_a_multiple_of_eight() -> None:
    for length in range(8):
        header = header_bytes([("x" * length, "F32", (1,))])
        assert len(header) % 8 == 0
        assert json.loads(header[8:])["x" * length]["data_offsets"] == [0, 4]
    with pytest.raises(AssertionError, match="x is written twice"):
        header_bytes([("x", "F32", (1,)), ("x", "F32", (1,))])


def test_a_file_is_rearranged_with_a_few_chunks_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "TENSOR_CHUNK_BYTES", 1 << 20)
    save_file({"a": torch.ones(6 << 20), "b": torch.zeros(6 << 20)}, tmp_path / "in")
    tensors, _ = read_tensor_file(tmp_path / "in")
    tracemalloc.start()
    write_tensor_file(tmp_path / "out", {"ba": joined([tensors["b"], tensors["a"]]), "z": zeros("F32", (6 << 20,))}, {})
    assert same(read_tensor_file(tmp_path / "out")[0]["ba"], joined([tensors["b"], tensors["a"]]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "out").stat().st_size > 72 << 20
    assert peak < 6 << 20
