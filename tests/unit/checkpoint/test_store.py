"""Checkpoints on disk: whole or not there, checked when read, from any layout's ranges."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sd3_light.checkpoint import store
from sd3_light.checkpoint.store import (
    INDEX,
    checkpoint_name,
    keep_newest,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from sd3_light.config.faults import UserError

FACTS = {"progress": {"step": 3, "samples": 24, "skipped": 0}, "words": "größer"}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    awkward = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, float("inf"), float("-inf"), 1 / 3])
    return {
        "param/block.weight": torch.randn(5, 7, generator=generator),
        "exp_avg_sq/block.weight": torch.rand(5, 7, generator=generator) * 1e-20,
        "step/block.weight": torch.tensor(17.0),
        "ema/a@b": awkward,  # a name may hold the sign that ends it
        "param/transposed": torch.randn(4, 6, generator=generator).t(),
    }


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.int32).tolist()
    return found


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return set(one) == set(two) and all(one[k].shape == two[k].shape and bits(one[k]) == bits(two[k]) for k in one)


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return found


def write_pieces(folder: Path, files: list[dict[str, Tensor]], shapes: dict[str, list[int]]) -> Path:
    """A checkpoint as several ranks of some layout would write it."""
    folder.mkdir(parents=True)
    hashes = {}
    for rank, ranges in enumerate(files):
        path = folder / f"rank-{rank:05d}.safetensors"
        save_file(ranges, path)
        hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    index = {"format": 1, "facts": FACTS, "shapes": shapes, "files": hashes}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return folder


# --- there and back ----------------------------------------------------------------------------


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    given = tensors()
    folder = write_checkpoint(tmp_path / "checkpoints", 42, given, FACTS)
    assert folder == tmp_path / "checkpoints" / "step-00000042"
    found, facts = read_checkpoint(folder)
    assert same(found, given)
    assert facts == FACTS
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_live_weights_are_only_read(tmp_path: Path) -> None:
    given = {"param/a": torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float32))}
    before = given["param/a"].detach().clone()
    write_checkpoint(tmp_path, 1, given, {})
    assert torch.equal(given["param/a"].detach(), before)
    assert given["param/a"].requires_grad


def test_nothing_on_disk_is_code(tmp_path: Path) -> None:
    """Law 8: safetensors and JSON, no pickle."""
    folder = write_checkpoint(tmp_path, 1, tensors(), FACTS)
    assert sorted(path.name for path in folder.iterdir()) == [INDEX, "rank-00000.safetensors"]
    for path in folder.iterdir():
        start = path.read_bytes()[:4]
        assert not start.startswith((b"\x80", b"PK")), f"{path.name} is a pickle or a zip of pickles"
    length = int.from_bytes((folder / "rank-00000.safetensors").read_bytes()[:8], "little")
    json.loads((folder / "rank-00000.safetensors").read_bytes()[8 : 8 + length])


def test_the_module_knows_no_pickle() -> None:
    text = Path(store.__file__).read_text(encoding="utf-8")
    assert "pickle" not in text
    assert "torch.load" not in text


def test_names_sort_by_step() -> None:
    names = [checkpoint_name(step) for step in (1, 9, 10, 99, 100, 12_345, 10_000_000)]
    assert names == sorted(names)


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 9, -1])
def test_a_damaged_byte_is_found_and_the_file_named(tmp_path: Path, at: int) -> None:
    folder = write_checkpoint(tmp_path, 1, tensors(), FACTS)
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"step-00000001 is damaged \(rank-00000\.safetensors\).*earlier"):
        read_checkpoint(folder)


def test_a_cut_file_is_found(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1, tensors(), FACTS)
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="is damaged"):
        read_checkpoint(folder)


def test_a_missing_file_is_found_and_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1, tensors(), FACTS)
    (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"rank-00000\.safetensors"):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1, "facts": "\xff"}'], ids=["empty", "cut", "not-utf8"])
def test_a_damaged_index_is_a_users_fault(tmp_path: Path, content: bytes) -> None:
    folder = write_checkpoint(tmp_path, 1, tensors(), FACTS)
    (folder / INDEX).write_bytes(content)
    with pytest.raises(UserError, match="not a whole checkpoint"):
        read_checkpoint(folder)


def test_a_folder_that_is_none_and_another_format_are_users_faults(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a whole checkpoint"):
        read_checkpoint(tmp_path / "nowhere")
    folder = write_checkpoint(tmp_path, 1, tensors(), FACTS)
    (folder / INDEX).write_text(json.dumps({**index_of(folder), "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        read_checkpoint(folder)


def test_a_tensor_that_only_one_side_knows_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1, tensors(), FACTS)
    index = index_of(folder)
    index["shapes"]["param/lost"] = [3]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="param/lost"):
        read_checkpoint(folder)


# --- ranges ------------------------------------------------------------------------------------


def test_ranges_of_several_files_are_joined(tmp_path: Path) -> None:
    """Cut inside a row, as ZeRO does, and not in the order of the files."""
    whole = torch.arange(15.0)
    files = [{"param/w@9": whole[9:].clone(), "param/v@0": whole[:4].clone()}, {"param/w@0": whole[:4].clone()}]
    files.append({"param/w@4": whole[4:9].clone()})
    folder = write_pieces(tmp_path / "step-00000001", files, {"param/w": [3, 5], "param/v": [4]})
    found, facts = read_checkpoint(folder)
    assert torch.equal(found["param/w"], whole.view(3, 5))
    assert torch.equal(found["param/v"], whole[:4])
    assert facts == FACTS


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([(0, 4), (5, 15)], "a gap"),
        ([(0, 6), (4, 15)], "an overlap"),
        ([(1, 15)], "no beginning"),
        ([(0, 14)], "no end"),
        ([(0, 8), (8, 16)], "too much"),
        ([(0, 4), (5, 16)], "a gap that the length hides"),
        ([(1, 16)], "shifted as a whole"),
        ([(0, 15), (0, 15)], "everything twice"),
        ([(0, 8), (0, 8), (8, 15)], "a part twice"),
    ],
)
def test_gaps_and_overlaps_are_refused_by_name(tmp_path: Path, pieces: list[tuple[int, int]], why: str) -> None:
    whole = torch.arange(16.0)
    files = [{f"param/w@{start}": whole[start:stop].clone()} for start, stop in pieces]
    folder = write_pieces(tmp_path / "step-00000001", files, {"param/w": [3, 5]})
    with pytest.raises(UserError, match="param/w"):
        read_checkpoint(folder)


# --- whole or not there ------------------------------------------------------------------------


def failing_save(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def failing_replace(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", [1, 2], ids=["same-step", "next-step"])
@pytest.mark.parametrize(
    ("where", "what", "failure"),
    [(store, "save_file", failing_save), (os, "replace", failing_replace), (json, "dumps", failing_replace)],
    ids=["full-disk", "rename", "index"],
)
def test_a_failed_write_leaves_the_earlier_checkpoint_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, what: str, failure: Any, step: int
) -> None:
    earlier = write_checkpoint(tmp_path, 1, tensors(0), FACTS)
    with monkeypatch.context() as broken:
        broken.setattr(where, what, failure)
        with pytest.raises(UserError, match=r"No space left.*earlier checkpoints"):
            write_checkpoint(tmp_path, step, tensors(1), FACTS)
    assert [path.name for path in tmp_path.iterdir()] == [earlier.name]
    assert newest_checkpoint(tmp_path) == earlier
    assert same(read_checkpoint(earlier)[0], tensors(0))


def test_the_same_step_again_comes_back_if_the_last_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = write_checkpoint(tmp_path, 1, tensors(0), FACTS)
    rename = os.replace

    def fail_for_new(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail_for_new)
        with pytest.raises(UserError, match="Input/output error"):
            write_checkpoint(tmp_path, 1, tensors(1), FACTS)
    assert [path.name for path in tmp_path.iterdir()] == [earlier.name]
    assert same(read_checkpoint(earlier)[0], tensors(0))


def test_a_kill_at_any_moment_of_replacing_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old folder must not be taken apart under its own name: killed in between, it would pass for a whole one."""
    write_checkpoint(tmp_path, 1, tensors(0), FACTS)
    seen: list[str] = []
    remove = shutil.rmtree

    def watched(path: Path, *args: Any, **kwargs: Any) -> None:
        seen.append(Path(path).name)
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", watched)
    folder = write_checkpoint(tmp_path, 1, tensors(1), FACTS)
    assert all(name.startswith(".") for name in seen), seen
    assert same(read_checkpoint(folder)[0], tensors(1))
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_half_written_folder_is_ignored(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path, 5, tensors(), FACTS)
    hidden = tmp_path / ".step-00000009.77.tmp"
    shutil.copytree(whole, hidden)
    without_index = tmp_path / "step-00000008"
    shutil.copytree(whole, without_index)
    (without_index / INDEX).unlink()
    assert newest_checkpoint(tmp_path) == whole


def test_the_newest_is_by_step_and_none_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nothing") is None
    for step in (9, 100, 20):
        write_checkpoint(tmp_path, step, {"param/a": torch.zeros(1)}, {})
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000100"


@pytest.mark.parametrize(
    ("count", "left"), [(1, [30]), (2, [20, 30]), (3, [10, 20, 30]), (9, [10, 20, 30]), (0, [10, 20, 30])]
)
def test_keep_newest(tmp_path: Path, count: int, left: list[int]) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, {"param/a": torch.zeros(1)}, {})
    keep_newest(tmp_path, count)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(step) for step in left]


def test_keep_newest_counts_only_whole_ones(tmp_path: Path) -> None:
    """A folder without its index must not push the last good checkpoint out."""
    whole = write_checkpoint(tmp_path, 5, tensors(), FACTS)
    (tmp_path / "step-00000008").mkdir()
    keep_newest(tmp_path, 1)
    assert newest_checkpoint(tmp_path) == whole
