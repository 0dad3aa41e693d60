"""Batches from shards: each sample's own draws, every sample once an epoch, a bounded number of open files."""

import pickle
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.data import stream as stream_module
from sd3_light.data.order import Order
from sd3_light.data.shards import Manifest
from sd3_light.data.stream import CachedDataset, MicroBatches, group_shards
from sd3_light.randomness import stream

MakeCache = Callable[..., CachedDataset]
SEED = 5


def order_of(data: CachedDataset, batch: int = 4, repeats: tuple[float, ...] = (1.0,)) -> Order:
    return data.order(SEED, repeats, lambda resolution: batch)


def steps_of(data: CachedDataset, order: Order, epoch: int = 0) -> list[dict[str, Any]]:
    """The global batches of one epoch."""
    batches = MicroBatches(data, order, rank=0, world=1, micro_batches=1)
    first = epoch * order.steps_per_epoch
    return [batches[step] for step in range(first, first + order.steps_per_epoch)]


def ids_of(batches: list[dict[str, Any]]) -> list[int]:
    return [number for batch in batches for number in batch["sample_id"].tolist()]


def number_in(moments: torch.Tensor) -> tuple[int, int]:
    """(sample, variant) that a toy picture says it is."""
    assert (moments == moments.flatten()[0]).all()
    return divmod(int(moments.flatten()[0]), 10)


def test_every_tensor_of_a_row_is_of_one_sample(make_cache: MakeCache) -> None:
    data = make_cache(captions=2, variants=2)
    for batch in steps_of(data, order_of(data)):
        assert batch["moments"].dtype == torch.float16
        for row, number in enumerate(batch["sample_id"].tolist()):
            assert number_in(batch["moments"][row])[0] == number
            captions = set()
            for name in ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"):
                values = batch[name][row]
                assert (values[..., 0] == number).all(), name
                captions.update(values[..., 1].flatten().tolist())
            assert len(captions) == 1, "tokens and pooled are of one caption"


def test_an_epoch_shows_each_sample_once_and_another_order_follows(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(5, 3, 4))
    order = order_of(data)
    assert order.steps_per_epoch == 3
    epochs = [ids_of(steps_of(data, order, epoch)) for epoch in range(3)]
    assert all(sorted(ids) == list(range(1, 13)) for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 3, "reshuffled"
    assert epochs[0] != sorted(epochs[0]), "shuffled at all"


def test_consecutive_steps_see_different_samples(make_cache: MakeCache) -> None:
    """An earlier loader began anew each step and trained on one batch for ever."""
    data = make_cache()
    batches = steps_of(data, order_of(data))
    for one, two in pairwise(batches):
        assert not set(one["sample_id"].tolist()) & set(two["sample_id"].tolist())


def test_a_batch_is_of_one_bucket(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(4, 6), buckets=("32x16", "16x32"))
    order = order_of(data, batch=2)
    first = set(range(1, 5))
    for batch in steps_of(data, order):
        ids = set(batch["sample_id"].tolist())
        assert ids <= first or not ids & first
    assert sorted(ids_of(steps_of(data, order))) == list(range(1, 11))


@pytest.mark.parametrize(("world", "micro"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_ranks_and_micro_batches_are_slices_of_the_global_batch(make_cache: MakeCache, world: int, micro: int) -> None:
    data = make_cache(captions=3, variants=2)
    order = order_of(data)
    for step, whole in enumerate(steps_of(data, order)):
        parts = [
            MicroBatches(data, order, rank, world, micro)[step * micro + number]
            for rank in range(world)
            for number in range(micro)
        ]
        for name in ("sample_id", "epoch", "repeat", "moments", "t5", "clip_g.pooled"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name


# --- law 1 -------------------------------------------------------------------------------------


def test_caption_and_flip_are_the_samples_own_draws(make_cache: MakeCache) -> None:
    data = make_cache(captions=3, variants=2)
    order = order_of(data)
    seen: Counter[tuple[str, int]] = Counter()
    for epoch in range(4):
        for batch in steps_of(data, order, epoch):
            for row, number in enumerate(batch["sample_id"].tolist()):
                occurrence = (epoch, int(batch["repeat"][row]), number)
                caption = int(stream(SEED, "caption", *occurrence).integers(3))
                flip = int(stream(SEED, "flip", *occurrence).integers(2))
                assert int(batch["t5"][row, 0, 1]) == caption
                assert number_in(batch["moments"][row]) == (number, flip)
                seen.update([("caption", caption), ("flip", flip)])
    assert {key for key, _ in seen.items()} == {("caption", at) for at in range(3)} | {("flip", at) for at in range(2)}


def test_a_samples_draws_do_not_depend_on_its_batch(make_cache: MakeCache) -> None:
    data = make_cache(captions=3, variants=2)

    def chosen(batch: int) -> dict[int, tuple[int, int]]:
        found = {}
        for read in steps_of(data, order_of(data, batch)):
            for row, number in enumerate(read["sample_id"].tolist()):
                found[number] = (int(read["t5"][row, 0, 1]), number_in(read["moments"][row])[1])
        return found

    assert chosen(2) == chosen(4) == chosen(12)


def test_the_draws_follow_the_seed(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(12,), captions=3)
    picks = order_of(data, 12).picks(0)
    assert not torch.equal(data.read(picks, 1)["t5"], data.read(picks, 2)["t5"])
    assert torch.equal(data.read(picks, 1)["t5"], data.read(picks, 1)["t5"])


# --- masks and repeats -------------------------------------------------------------------------


def test_without_any_mask_there_is_none(make_cache: MakeCache) -> None:
    data = make_cache()
    assert all(batch["mask"] is None for batch in steps_of(data, order_of(data)))


def test_the_mask_is_flipped_with_the_picture(make_cache: MakeCache) -> None:
    data = make_cache(variants=2, mask=True)
    left = torch.tensor([[255, 255, 0, 0]] * 2, dtype=torch.uint8)
    variants = set()
    for batch in steps_of(data, order_of(data)):
        for row in range(4):
            variant = number_in(batch["moments"][row])[1]
            variants.add(variant)
            assert torch.equal(batch["mask"][row], left.flip(-1) if variant else left)
    assert variants == {0, 1}


def test_samples_with_and_without_masks_share_a_batch(
    tmp_path: Path, make_sample: Callable[..., Any], make_shard: Callable[..., Any]
) -> None:
    masked = make_shard(tmp_path, "a", [make_sample(1, mask=True), make_sample(2, mask=True)])
    plain = make_shard(tmp_path, "b", [make_sample(3), make_sample(4)])
    data = CachedDataset(tmp_path, Manifest({}, (masked, plain), plain))
    (batch,) = steps_of(data, order_of(data))
    for row, number in enumerate(batch["sample_id"].tolist()):
        assert int(batch["mask"][row].float().mean()) == (127 if number <= 2 else 255)


def test_repeats_are_by_directory(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(4, 4, 4), directories=(0, 1, 2))
    order = order_of(data, batch=2, repeats=(1.0, 3.0, 0.5))
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
    assert {(5, 0), (5, 1), (5, 2)} <= repeats, "each occurrence is one of its own"


# --- files -------------------------------------------------------------------------------------


def test_no_more_shards_are_open_than_allowed(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_OPEN_SHARDS", 2)
    data = make_cache(sizes=(2,) * 6)
    most = 0
    for batch in steps_of(data, order_of(data, batch=6)):
        assert len(batch["sample_id"]) == 6
        most = max(most, len(data._open))
    assert most == 2


def test_a_shard_is_hashed_once_a_process(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.data import shards

    hashed: list[str] = []
    real = shards.file_sha256
    monkeypatch.setattr(shards, "file_sha256", lambda path: hashed.append(path.name) or real(path))
    monkeypatch.setattr(stream_module, "MAX_OPEN_SHARDS", 1)  # every shard is opened many times
    data = make_cache(sizes=(4, 4, 4))
    for epoch in range(3):
        steps_of(data, order_of(data), epoch)
    assert len(hashed) == 3
    assert len(set(hashed)) == 3


def test_a_damaged_shard_is_named_when_it_is_read(make_cache: MakeCache) -> None:
    data = make_cache()
    path = data.folder / "shards" / data.manifest.shards[1].file
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match=rf"shard {path} is damaged"):
        steps_of(data, order_of(data))


def test_open_files_stay_behind_when_a_worker_takes_the_data(make_cache: MakeCache) -> None:
    data = make_cache()
    before = steps_of(data, order_of(data))
    assert data._open
    taken = pickle.loads(pickle.dumps(data))
    assert not taken._open
    after = steps_of(taken, order_of(taken))
    assert all(torch.equal(a["moments"], b["moments"]) for a, b in zip(before, after, strict=True))


def test_the_empty_caption_is_kept_apart(make_cache: MakeCache) -> None:
    data = make_cache()
    empty = data.empty_text()
    assert all((values == 0).all() for values in empty.values())
    assert empty["t5"].shape == (2, 12)
    assert 0 not in ids_of(steps_of(data, order_of(data)))


def test_the_order_of_the_manifests_lines_means_nothing(make_cache: MakeCache) -> None:
    data = make_cache(sizes=(3, 4, 5), buckets=("32x16", "16x32", "32x16"), directories=(1, 0, 0))
    shards = data.manifest.shards
    assert group_shards(shards) == group_shards(shards[::-1])
    assert [bucket.sizes for bucket in group_shards(shards)] == [(4,), (5, 3)]
