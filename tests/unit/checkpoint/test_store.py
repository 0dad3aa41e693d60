"""Checkpoints on disk are complete or absent, whenever the writer is killed."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sd3_light.checkpoint import host_buffers, index, reading, store
from sd3_light.checkpoint.index import INDEX
from sd3_light.checkpoint.store import (
    checkpoint_name,
    clean_leftovers,
    commit,
    incomplete_checkpoints,
    keep_newest,
    newest_checkpoint,
    reset_folder,
    restore_replaced,
    temporary_folder,
    write_part,
)
from sd3_light.engines.protocol import TensorPiece
from tests.checkpoints import read_checkpoint, write_checkpoint
from tests.faults import faulty_disk
from tests.refusals import refused

Writer = Callable[..., Path]
VALUES = torch.arange(16.0)


def tensors(value: float = 0) -> dict[str, Tensor]:
    return {"param/w": torch.full((5, 7), value), "step/w": torch.tensor(value)}


def value_of(folder: Path) -> float:
    """Return the value of a checkpoint of `tensors`, after checking every element."""
    stored, facts = read_checkpoint(folder)
    value = stored["step/w"].item()
    assert facts == {"value": value}
    assert torch.equal(stored["param/w"], torch.full((5, 7), value))
    return value


def save(folder: Path, step: int, value: float) -> Path:
    return write_checkpoint(folder, step, tensors(value), {"value": value})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_index_lists_all_ranges(tmp_path: Path, write_ranks: Writer) -> None:
    parts = [[TensorPiece("param/w", VALUES[:4], 0, (2, 8))], [TensorPiece("param/w", VALUES[4:], 4, (2, 8))]]
    content = json.loads((write_ranks(tmp_path, 1, parts, "größer") / INDEX).read_text(encoding="utf-8"))
    assert set(content) == {"format", "facts", "files", "tensors", "sha256"}
    assert (content["format"], content["facts"]) == (2, {"given": "größer"})
    assert set(content["files"]) == {"rank-00000.safetensors", "rank-00001.safetensors"}
    (entry,) = content["tensors"].values()
    assert (entry["shape"], entry["dtype"]) == ([2, 8], "F32")
    ranges = [[0, 4, "rank-00000.safetensors"], [4, 12, "rank-00001.safetensors"]]
    assert [part[:3] for part in entry["ranges"]] == ranges
    assert {len(part[3]) for part in entry["ranges"]} == {64}


def test_no_pickle_is_written_or_read(tmp_path: Path) -> None:
    """Law 8: safetensors and JSON only."""
    for path in save(tmp_path, 1, 0).iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK")), f"{path.name} is a pickle or a zip of pickles"
    for module in (store, reading, index, host_buffers):
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        assert "pickle" not in text
        assert "torch.load" not in text


def test_a_replica_is_written_by_one_rank(tmp_path: Path) -> None:
    pieces = [TensorPiece("param/w", VALUES, 0, (16,), writes=False), TensorPiece("param/v", VALUES, 0, (16,))]
    write_part(tmp_path, 3, pieces)
    note = json.loads((tmp_path / "rank-00003.json").read_text())
    assert list(note["tensors"]) == ["param/v"]
    assert note["bytes"] == (tmp_path / "rank-00003.safetensors").stat().st_size < 200


@pytest.mark.parametrize(
    ("cuts", "problem"),
    [
        ([(0, 4), (5, 15)], "elements 4 to 4 are missing"),
        ([(0, 6), (4, 15)], "element 4 is stored twice"),
        ([(1, 15)], "elements 0 to 0 are missing"),
        ([(0, 12)], "elements 12 to 14 are missing"),
        ([(0, 8), (8, 16)], "it has 15 elements but 16 are stored"),
        ([(0, 4), (5, 16)], "elements 4 to 4 are missing"),
        ([(0, 15), (0, 15)], "element 0 is stored twice"),
        ([(0, 8), (0, 8), (8, 15)], "element 0 is stored twice"),
    ],
)
def test_gaps_and_overlaps(tmp_path: Path, write_ranks: Writer, cuts: list[tuple[int, int]], problem: str) -> None:
    parts = [[TensorPiece("param/w", VALUES[start:stop], start, (3, 5))] for start, stop in cuts]
    refused(f"do not cover param/w exactly once: {problem}", write_ranks, tmp_path, 1, parts)
    assert newest_checkpoint(tmp_path) is None


def test_empty_tensors_are_stored_and_empty_pieces_ignored(tmp_path: Path, write_ranks: Writer) -> None:
    empty = TensorPiece("param/nothing", VALUES[:0], 0, (0, 3))
    first = [empty, TensorPiece("param/w", VALUES, 0, (16,))]
    stored, _ = read_checkpoint(write_ranks(tmp_path, 1, [first, [TensorPiece("param/w", VALUES[:0], 16, (16,))]]))
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {"param/nothing": [0, 3], "param/w": [16]}


def test_ranks_that_disagree_are_reported(tmp_path: Path, write_ranks: Writer) -> None:
    first = TensorPiece("param/w", VALUES[:8], 0, (4, 4))
    for other in (replace(first, shape=(16,)), replace(first, values=VALUES[8:].half())):
        refused(r"the ranks disagree on param/w: F32 \[4, 4\] and F", write_ranks, tmp_path, 1, [[first], [other]])


def test_a_missing_or_truncated_part_is_reported(tmp_path: Path) -> None:
    temporary = temporary_folder(tmp_path, 1)
    reset_folder(temporary)
    write_part(temporary, 0, [TensorPiece("param/w", VALUES, 0, (16,))])
    refused(r"the part of rank 1 is not in .* all machines share", commit, tmp_path, 1, range(2), {})
    with open(temporary / "rank-00000.safetensors", "ab") as file:
        file.truncate(80)
    refused(r"rank-00000\.safetensors has 80 of", commit, tmp_path, 1, [0], {})
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("step", [1, 2], ids=["same-step", "next-step"])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_failed_writes_keep_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, step: int) -> None:
    earlier = save(tmp_path, 1, 1)
    with monkeypatch.context() as broken:
        broken.setattr(os, function, Mock(side_effect=OSError(28, "No space left on device")))
        refused(r"No space left.*earlier checkpoints are intact", save, tmp_path, step, 2)
    assert names(tmp_path) == [earlier.name]
    assert value_of(earlier) == 1


def test_everything_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path: Path) -> None:
    """Otherwise a power cut leaves a checkpoint with a valid name and empty files, or none at all."""
    with faulty_disk(tmp_path) as disk:
        save(tmp_path / "checkpoints", 1, 1)
    calls = [(call.kind, call.path) for call in disk.calls if call.kind in ("fsync", "os.rename", "os.remove")]
    temporary = "checkpoints/.step-00000001.tmp"
    first = calls.index(("os.rename", temporary))
    flushed = {path for kind, path in calls[:first] if kind == "fsync"}
    assert {f"{temporary}/rank-00000.safetensors", f"{temporary}/index.json", temporary} <= flushed
    assert calls[first + 1] == ("fsync", "checkpoints")


def test_a_replaced_checkpoint_is_restored_if_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = save(tmp_path, 1, 1)
    rename = os.replace

    def fail_for_new(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail_for_new)
        refused("Input/output error", save, tmp_path, 1, 2)
    assert names(tmp_path) == [earlier.name]
    assert value_of(earlier) == 1
    shutil.copytree(earlier, tmp_path / ".step-00000001.old")
    assert value_of(save(tmp_path, 1, 2)) == 2
    assert names(tmp_path) == [earlier.name], "a leftover of an earlier replacement does not matter"


class Killed(BaseException):
    """Raised in place of a kill; a BaseException, so no handler catches it."""


def kills(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> Iterator[int]:
    """Repeat the work, killed before its 1st, 2nd, ... disk operation, until it completes; yield the number."""
    real = {"replace": os.replace, "fsync": os.fsync, "unlink": os.unlink, "rmdir": os.rmdir}
    number, count = 0, 0

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                raise Killed
            return real[name](*args, **kwargs)

        return call

    while True:
        count = 0
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, watched(name))
            try:
                work()
            except Killed:
                killed = True
            else:
                killed = False
        yield number
        if not killed:
            return
        number += 1


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it replaces one of the same step; and the cleanup leaves only checkpoints."""
    moments = []
    for number in kills(monkeypatch, lambda: save(tmp_path, 2, 9)):
        leftovers = [*restore_replaced(tmp_path), *clean_leftovers(tmp_path)]
        newest = newest_checkpoint(tmp_path)
        stored = None if newest is None else (newest.name, value_of(newest))
        moments.append((number, stored, bool(leftovers)))
        assert all(name.startswith("step-") for name in names(tmp_path))
        assert incomplete_checkpoints(tmp_path) == {}
        shutil.rmtree(tmp_path)
        save(tmp_path, 2, 1)
    # the first time there was no checkpoint before; later ones are the old or the new one
    assert moments[0][1] is None
    assert {stored for _, stored, _ in moments[1:]} == {("step-00000002", 1.0), ("step-00000002", 9.0)}
    assert moments[-1][1:] == (("step-00000002", 9.0), False)
    assert len(moments) > 8


def test_a_kill_while_old_checkpoints_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partly deleted checkpoint never has a valid name, before and after the cleanup."""
    for step in (1, 2, 3):
        save(tmp_path, step, step)
    for _ in kills(monkeypatch, lambda: keep_newest(tmp_path, 1)):
        assert incomplete_checkpoints(tmp_path) == {}
        for name in names(tmp_path):
            assert name.startswith(".") or value_of(tmp_path / name) == int(name[-1])
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000003"]


def test_incomplete_checkpoints_are_ignored_and_listed(tmp_path: Path) -> None:
    complete = save(tmp_path, 5, 5)
    places = [tmp_path / checkpoint_name(step) for step in (6, 7, 8, 9)]
    without_index, without_file, short, torn = (Path(shutil.copytree(complete, place)) for place in places)
    (without_index / INDEX).unlink()
    (without_file / "rank-00000.safetensors").unlink()
    with open(short / "rank-00000.safetensors", "ab") as file:
        file.truncate(100)
    (torn / INDEX).write_bytes((torn / INDEX).read_bytes()[:-9])
    shutil.copytree(complete, tmp_path / ".step-00000010.tmp")
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "step-00000011").write_text("a file")
    assert newest_checkpoint(tmp_path) == complete
    incomplete = incomplete_checkpoints(tmp_path)
    assert list(incomplete) == [without_index, without_file, short, torn, tmp_path / "step-00000011"]
    assert incomplete[without_file] == "rank-00000.safetensors is missing"
    # starting over, or from an earlier one, would be a surprise; opening it reports the format
    (without_index / INDEX).write_text(json.dumps({"format": 1, "files": {"rank-00000.safetensors": "0" * 64}}))
    assert newest_checkpoint(tmp_path) == without_index


def test_the_newest_checkpoint_is_chosen_by_step(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nothing") is None
    assert not incomplete_checkpoints(tmp_path / "nothing")
    assert restore_replaced(tmp_path / "nothing") == clean_leftovers(tmp_path / "nothing") == []
    for step in (9, 100_000_000, 20, 99_999_999):
        save(tmp_path, step, 0)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-100000000"


def test_keep_newest_counts_complete_checkpoints_and_never_deletes_the_one_just_written(tmp_path: Path) -> None:
    """A run that resumes from an earlier step writes beside later ones."""
    (tmp_path / "step-00000040").mkdir()  # without an index
    for step in (10, 20, 30):
        save(tmp_path, step, step)
    assert keep_newest(tmp_path, 0) == keep_newest(tmp_path, 9) == keep_newest(tmp_path, 3) == []
    written = save(tmp_path, 11, 11)
    assert keep_newest(tmp_path, 2, written) == [tmp_path / checkpoint_name(10)]
    assert names(tmp_path) == [checkpoint_name(step) for step in (11, 20, 30, 40)]
    assert len(keep_newest(tmp_path, 1)) == 2
    assert names(tmp_path) == [checkpoint_name(step) for step in (30, 40)]


def test_checkpoints_that_were_renamed_aside_are_restored_and_leftovers_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    os.replace(save(tmp_path, 2, 2), tmp_path / ".step-00000002.old")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000001.old")
    leftovers = [".step-00000001.old.gone", ".step-00000002.tmp", ".step-00000003.123.tmp", ".step-00000004.gone"]
    for name in (*leftovers, ".other"):
        (tmp_path / name).mkdir()
    assert restore_replaced(tmp_path) == [".step-00000002.old"]
    assert sorted(clean_leftovers(tmp_path)) == [".step-00000001.old", *leftovers]
    assert names(tmp_path) == [".other", "step-00000001", "step-00000002"]
    assert value_of(tmp_path / "step-00000002") == 2
