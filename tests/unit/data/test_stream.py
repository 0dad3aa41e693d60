"""Batches from shards: draws per sample, every sample once per epoch, a bounded number of open files."""

import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sd3_light.data import verify as verify_module
from sd3_light.data.order import Order, Picks
from sd3_light.data.stream import CachedDataset, MicroBatches, weighted_caption
from sd3_light.randomness import stream
from tests.refusals import refused

MakeCache = Callable[..., CachedDataset]
SEED = 5
ONCE = {"toy#0": 1.0}


def order_of(data: CachedDataset, batch: int = 4, repeats: Mapping[str, float] = ONCE, window: int = 16) -> Order:
    return data.order(SEED, repeats, lambda resolution: batch, window)


def steps_of(data: CachedDataset, order: Order, epoch: int = 0) -> list[dict[str, Any]]:
    batches = MicroBatches(data, order, rank=0, world_size=1, micro_batches=1)
    first = epoch * order.steps_per_epoch
    return [batches[step] for step in range(first, first + order.steps_per_epoch)]


def ids_of(batches: list[dict[str, Any]]) -> list[int]:
    return [number for batch in batches for number in batch["sample_id"].tolist()]


def test_columns_of_captions_are_chosen_by_their_weights() -> None:
    """Each column has as many variants, which are equally likely."""
    draws = Counter(weighted_caption(SEED, 0, 0, sample, 6, (6.0, 1.0, 3.0)) for sample in range(20_000))
    shares = [draws[number] / 20_000 for number in range(6)]
    assert shares == pytest.approx([0.3, 0.3, 0.05, 0.05, 0.15, 0.15], abs=0.012)
    refused("has 2 weights, and a sample in the cache has 3 captions", weighted_caption, SEED, 0, 0, 1, 3, (1.0, 2.0))


def test_weights_apply_to_the_directory_they_belong_to(make_cache: MakeCache) -> None:
    data = make_cache(captions=2, sizes=(40,))
    order = order_of(data, batch=8)

    def chosen(weights: Mapping[str, tuple[float, ...]]) -> list[float]:
        weighted = CachedDataset(data.store, caption_weights=weights)
        return [value for batch in steps_of(weighted, order) for value in batch["t5"][:, 0, 1].tolist()]

    never = chosen({"toy#0": (1e-9, 1.0)})
    assert len(set(never)) == 1
    assert chosen({"other#1": (1e-9, 1.0)}) == chosen({}) != never


@pytest.mark.parametrize(("world", "micro"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_ranks_and_micro_batches_are_slices_of_the_global_batch(make_cache: MakeCache, world: int, micro: int) -> None:
    data = make_cache(captions=3, variants=2)
    order = order_of(data)
    for step, whole in enumerate(steps_of(data, order)):
        places = [(rank, number) for rank in range(world) for number in range(micro)]
        parts = [MicroBatches(data, order, rank, world, micro)[step * micro + number] for rank, number in places]
        for name in ("sample_id", "epoch", "repeat", "moments", "t5", "clip_g.pooled"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name


def test_caption_and_flip_are_drawn_per_sample(make_cache: MakeCache) -> None:
    data = make_cache(captions=3, variants=2)
    order = order_of(data)
    seen: Counter[tuple[str, int]] = Counter()
    for epoch in range(4):
        for batch in steps_of(data, order, epoch):
            assert batch["mask"] is None
            assert not [name for name in batch if name.endswith(".length")]
            for row, number in enumerate(batch["sample_id"].tolist()):
                occurrence = (epoch, int(batch["repeat"][row]), number)
                caption = int(stream(SEED, "caption", *occurrence).integers(3))
                flip = int(stream(SEED, "flip", *occurrence).integers(2))
                for name in ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"):
                    assert (batch[name][row, ..., 0] == number).all(), name
                    assert (batch[name][row, ..., 1] == caption).all(), name
                assert (batch["moments"][row] == 10 * number + flip).all(), "as a toy image encodes both"
                seen.update([("caption", caption), ("flip", flip)])
    assert {key for key, _ in seen.items()} == {("caption", at) for at in range(3)} | {("flip", at) for at in range(2)}


def test_repeats_are_set_per_directory(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(4, 4, 4), directories=("a#0", "b#0", "a#1"))
    order = order_of(data, batch=2, repeats={"a#0": 1.0, "a#1": 0.5, "b#0": 3.0, "empty#0": 7.0})
    for epoch in (0, 1):
        counts = Counter(ids_of(steps_of(data, order, epoch)))
        assert all(counts[number] == 1 for number in range(1, 5))
        assert all(counts[number] == 3 for number in range(5, 9))
        assert sum(counts[number] for number in range(9, 13)) == 2
    repeats = {
        (number, repeat)
        for batch in steps_of(data, order)
        for number, repeat in zip(batch["sample_id"].tolist(), batch["repeat"].tolist(), strict=True)
    }
    assert {(5, 0), (5, 1), (5, 2)} <= repeats, "each occurrence has its own number"


def test_a_directory_missing_in_the_config_is_an_error(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(4, 4), directories=("a#0", "b#0"))
    refused(r"samples of 'b#0'.*run without --trust-cache", order_of, data, repeats={"a#0": 1.0})


def test_small_buckets_are_dropped_on_request(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(3, 9), buckets=("32x16", "16x32"))
    order = data.order(SEED, ONCE, lambda resolution: 4, 16, "drop")
    assert [data.buckets[number].bucket for number in order.dropped] == ["32x16"]
    assert set(ids_of(steps_of(data, order))) == set(range(4, 13))
    refused("every bucket is smaller", data.order, SEED, ONCE, lambda resolution: 10, 16, "drop")


def test_padding_is_zero_in_reused_memory(make_cache: MakeCache) -> None:
    data = make_cache(real=True, mask=True, variants=2)
    picks = order_of(data).picks(0)

    def dirty(nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    clean, other = data.read(picks, SEED), data.read(picks, SEED, dirty)
    assert all(torch.equal(clean[name], other[name]) for name in clean)


def open_files(data: CachedDataset) -> int:
    names = {entry.file for entry in data.manifest.shards}
    links = os.listdir("/proc/self/fd")
    return sum(os.path.basename(os.path.realpath(f"/proc/self/fd/{link}")) in names for link in links)


def test_the_window_bounds_the_open_shards(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(2,) * 12)
    order = order_of(data, batch=4, window=1)
    assert data.max_open == 2
    most = 0
    for step in range(2 * order.steps_per_epoch):
        data.read(order.picks(step), SEED)
        most = max(most, open_files(data))
    assert most == 2
    order_of(data, window=3)
    assert data.max_open == 6


def test_open_shards_are_reused(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_cache(sizes=(8, 8))
    opener = Mock(wraps=data.new_reader)
    monkeypatch.setattr(data, "new_reader", opener)
    for epoch in range(3):
        steps_of(data, order_of(data), epoch)
    opened = sorted(call.args[0].file for call in opener.call_args_list)
    assert opened == sorted(entry.file for entry in data.manifest.shards)


def test_the_least_recently_used_shard_is_closed_first(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(2, 2, 2))
    data.max_open = 2
    files = [entry.file for entry in data.buckets[0].shards]
    for segment in (0, 1, 0, 2):
        data.read(Picks(0, 0, np.array([segment]), np.array([0]), np.array([0])), SEED)
    assert list(data._open) == [files[0], files[2]]


def test_the_next_window_is_hashed_in_the_background(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_cache(sizes=(4,) * 6)
    order = order_of(data, window=2)
    hashed: dict[str, bool] = {}
    real = verify_module.file_sha256

    def note(path: Path) -> str:
        hashed[path.name] = threading.current_thread() in data._prefetcher.threads
        return real(path)

    monkeypatch.setattr(verify_module, "file_sha256", note)
    batches = MicroBatches(data, order, 0, 1, 1)
    for step in range(6):
        batches[step]
        assert data._prefetcher.threads
        for thread in data._prefetcher.threads:
            thread.join()
    assert Counter(hashed.values())[True] >= 3, "all shards except those of the first window"


def test_windows_are_prefetched_once_in_reading_order(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_cache(sizes=(4,) * 6)
    order = order_of(data, window=2)
    batches = MicroBatches(data, order, 0, 1, 1)
    calls: list[list[int]] = []
    monkeypatch.setattr(data, "prefetch", lambda bucket, segments: calls.append(segments))
    for _ in range(4):
        batches[0]
    windows = order.next_windows(0)
    each = [replace(windows, first=number, last=number) for number in range(windows.first, windows.last + 1)]
    assert len(each) == 2
    assert calls == [order.segments_in(window).tolist() for window in each]


def test_open_files_are_not_pickled(make_cache: MakeCache) -> None:
    data = make_cache()
    before = steps_of(data, order_of(data))
    assert data._open
    copy = pickle.loads(pickle.dumps(data))
    assert not copy._open
    after = steps_of(copy, order_of(copy))
    assert all(torch.equal(a["moments"], b["moments"]) for a, b in zip(before, after, strict=True))


def test_the_tensors_of_a_batch_share_one_allocation(make_cache: MakeCache) -> None:
    data = make_cache(real=True, mask=True)
    blocks: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        blocks.append(torch.zeros(nbytes, dtype=torch.uint8))
        return blocks[-1]

    batch = MicroBatches(data, order_of(data), 0, 1, 1).fetch(0, allocate)
    (memory,) = blocks
    tensors = {name: tensor for name, tensor in batch.items() if name not in ("epoch", "repeat")}
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors.values()} == {memory.data_ptr()}
    assert all((tensor.data_ptr() - memory.data_ptr()) % 64 == 0 for tensor in tensors.values())


def change_all(data: CachedDataset, change: Callable[[Path], object]) -> None:
    for entry in data.buckets[0].shards:
        change(data.store.path(entry))


def replace_with(path: Path, data: bytes) -> None:
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)


def other_bytes(path: Path) -> bytes:
    """The same size and header, other values."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    return bytes(data)


def same_batches(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    return all(torch.equal(a["moments"], b["moments"]) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    "change",
    [Path.unlink, lambda path: replace_with(path, other_bytes(path)), lambda path: replace_with(path, b"")],
    ids=["deleted", "replaced", "replaced by nothing"],
)
def test_a_deleted_or_replaced_open_shard_is_read_on(make_cache: MakeCache, change: Callable[[Path], object]) -> None:
    """Its file remains until it is closed, with the bytes that were verified. Opened again, it is another file."""
    data = make_cache()
    order = order_of(data)
    before = steps_of(data, order)
    change_all(data, change)
    assert same_batches(steps_of(data, order), before)
    data._open.clear()
    refused(r"is missing|is damaged", steps_of, data, order)


def test_a_shard_that_is_written_to_stops_the_run(make_cache: MakeCache) -> None:
    data = make_cache()
    order = order_of(data)
    steps_of(data, order)
    change_all(data, lambda path: path.write_bytes(other_bytes(path)))
    refused("is damaged: its bytes differ", steps_of, data, order)


def test_a_shard_replaced_by_itself_is_verified_again(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_cache()
    order = order_of(data)
    before = steps_of(data, order)
    hashed = Mock(wraps=verify_module.file_sha256)
    monkeypatch.setattr(verify_module, "file_sha256", hashed)
    change_all(data, lambda path: replace_with(path, path.read_bytes()))
    for _ in range(2):
        data._open.clear()
        assert same_batches(steps_of(data, order), before)
    assert hashed.call_count == len(data.buckets[0].shards), "once"
