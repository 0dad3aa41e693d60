"""The cache stage: the same bytes each time, only what is missing or stale encoded, and nothing lost to a bad input."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd3_light.config import ConfigFaults
from sd3_light.config.faults import UserError
from sd3_light.data.shards import MANIFEST, Manifest, read_origins
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.encoders.vae import encode_moments, load_vae
from sd3_light.engines import Launch
from sd3_light.journeys import only_cache
from sd3_light.stages import cache as stage
from sd3_light.stages.train import global_batch, open_cache, repeats
from sd3_light.training.light_sd3 import LightSD3Pipeline
from sd3_light.world import write_dataset

Project = Any  # the class is in tests/conftest.py
SHARDS = 7  # 40 pictures in shards of 8: 20 square (8 + 8 + 4), 10 wide (8 + 2), 10 tall (8 + 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shard_files(project: Project) -> list[str]:
    return [shard.file for shard in Manifest.load(project.cache).shards]


def rejects(project: Project) -> dict[str, str]:
    lines = (project.cache / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return {entry["key"].rsplit("/", 1)[1]: entry["reason"] for entry in found}


def captions_of(project: Project) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((project.pictures / "captions.json").read_text(encoding="utf-8"))
    return found


def epoch_of(project: Project, *overrides: str, epoch: int = 0) -> list[dict[str, Any]]:
    """The global batches that training would see in an epoch."""
    loaded = project.load(*overrides)
    data: CachedDataset = open_cache(loaded.dataset)
    order = data.order(
        loaded.train.seed, repeats(loaded.dataset), lambda resolution: global_batch(loaded.train, resolution, 1)
    )
    batches = MicroBatches(data, order, 0, 1, 1)
    first = epoch * order.steps_per_epoch
    return [batches[step] for step in range(first, first + order.steps_per_epoch)]


@pytest.fixture
def untouchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding anything is an error."""

    def never(*_: object) -> None:
        raise AssertionError("nothing should be encoded")

    monkeypatch.setattr(stage, "_encode_unit", never)
    monkeypatch.setattr(stage.Encoders, "encode_captions", never)


# --- the same bytes ----------------------------------------------------------------------------


def test_a_cache_built_again_elsewhere_is_the_same_bytes(fresh_project: Project, cached_project: Project) -> None:
    (report,) = fresh_project.build_cache()
    assert (report.encoded, report.already) == (SHARDS, 0)
    assert contents(fresh_project.cache) == contents(cached_project.cache)


def test_a_whole_cache_is_left_alone(project: Project, untouchable: None) -> None:
    before = contents(project.cache)
    (report,) = project.build_cache()
    assert (report.encoded, report.already) == (0, SHARDS)
    assert contents(project.cache) == before


def test_regenerate_encodes_all_again_to_the_same_bytes(project: Project) -> None:
    before = contents(project.cache)
    shard = project.cache / "shards" / shard_files(project)[2]
    shard.write_bytes(b"damaged")
    (report,) = project.build_cache(regenerate=True)
    assert (report.encoded, report.already) == (SHARDS, 0)
    assert contents(project.cache) == before


def test_the_manifest_counts_every_sample(cached_project: Project) -> None:
    manifest = Manifest.load(cached_project.cache)
    assert manifest.counts["used"] == 40 == sum(shard.count for shard in manifest.shards)
    assert Counter(shard.bucket for shard in manifest.shards) == {"64x64": 3, "80x48": 2, "48x80": 2}
    assert manifest.recipe["t5_max_length"] == 16
    captions = captions_of(cached_project)
    for shard in manifest.shards:
        for origin in read_origins(cached_project.cache / "shards" / shard.file):
            assert list(origin.captions) == captions[origin.key.rsplit("/", 1)[1]]


# --- what is missing or stale ------------------------------------------------------------------


def test_a_killed_run_is_completed_by_the_missing_part_alone(project: Project) -> None:
    before = contents(project.cache)
    files = shard_files(project)
    for lost in (files[1], files[5]):
        (project.cache / "shards" / lost).unlink()
    (project.cache / MANIFEST).unlink()
    with pytest.raises(UserError, match="no cache at"):
        open_cache(project.load().dataset)
    (report,) = project.build_cache()
    assert (report.encoded, report.already) == (2, SHARDS - 2)
    assert contents(project.cache) == before


def test_a_cache_without_its_manifest_is_not_complete(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle, a first run leaves whole shards and no manifest, so nothing takes it for a cache."""
    for path in project.cache.rglob("*.*"):
        path.unlink()
    done, real = 0, stage._write_unit

    def killed(*given: Any) -> None:
        nonlocal done
        done += 1
        if done > 3:
            raise KeyboardInterrupt
        real(*given)

    monkeypatch.setattr(stage, "_write_unit", killed)
    with pytest.raises(KeyboardInterrupt):
        project.build_cache()
    assert not (project.cache / MANIFEST).exists()
    monkeypatch.undo()
    (report,) = project.build_cache()
    assert (report.encoded, report.already) == (SHARDS - 3, 3)


def test_a_changed_caption_re_encodes_its_shard_alone(project: Project) -> None:
    before = set(shard_files(project))
    captions = captions_of(project)
    captions["000007.png"] = ["a blue star", "一个蓝色的星星"]
    (project.pictures / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    (report,) = project.build_cache()
    assert (report.encoded, report.already) == (1, SHARDS - 1)
    after = set(shard_files(project))
    assert len(before - after) == len(after - before) == 1
    (new,) = after - before
    origins = read_origins(project.cache / "shards" / new)
    assert ("a blue star", "一个蓝色的星星") in [origin.captions for origin in origins]


def test_a_changed_picture_re_encodes_its_shard_alone(project: Project) -> None:
    Image.new("RGB", (64, 64), "white").save(project.pictures / "000000.png")
    (report,) = project.build_cache()
    assert (report.encoded, report.already) == (1, SHARDS - 1)


def test_a_changed_text_length_is_noticed(project: Project) -> None:
    (report,) = project.build_cache("model.t5_max_length=12")
    assert (report.encoded, report.already) == (SHARDS, 0)
    assert Manifest.load(project.cache).recipe["t5_max_length"] == 12
    assert epoch_of(project)[0]["t5"].shape[1] == 12
    (back,) = project.build_cache()
    assert (back.encoded, back.already) == (0, SHARDS), "the old shards were still there"


# --- trust -------------------------------------------------------------------------------------


def test_trust_does_not_look_at_the_sources(project: Project, untouchable: None) -> None:
    (project.pictures / "000003.png").unlink()
    before = contents(project.cache)
    assert project.build_cache(trust=True) == []
    assert contents(project.cache) == before


def test_without_trust_a_deleted_picture_is_noticed(project: Project) -> None:
    (project.pictures / "000003.png").unlink()
    (report,) = project.build_cache()
    assert report.counts["used"] == 39
    assert rejects(project) == {"000003.png": "missing_file"}


def test_trust_refuses_a_cache_of_another_text_length(project: Project, untouchable: None) -> None:
    with pytest.raises(UserError, match=r"built with t5_max_length = 16, the config says 12; run without --trust"):
        project.build_cache("model.t5_max_length=12", trust=True)


def test_trust_builds_a_cache_that_is_not_there(fresh_project: Project) -> None:
    (report,) = fresh_project.build_cache(trust=True)
    assert report.encoded == SHARDS


def test_a_damaged_shard_is_found_even_in_a_trusted_cache_and_its_remedy_works(project: Project) -> None:
    before = contents(project.cache)
    path = project.cache / "shards" / shard_files(project)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    project.build_cache(trust=True)
    with pytest.raises(UserError, match=rf"shard {path} is damaged .*; delete it, then run `sd3-light cache"):
        epoch_of(project)
    path.unlink()
    project.build_cache()
    assert contents(project.cache) == before
    epoch_of(project)


# --- rejects -----------------------------------------------------------------------------------


def test_bad_inputs_are_named_and_the_rest_goes_on(fresh_project: Project) -> None:
    pictures = fresh_project.pictures
    (pictures / "000001.png").write_bytes(b"not a picture at all")
    whole = (pictures / "000002.png").read_bytes()
    (pictures / "000002.png").write_bytes(whole[: len(whole) // 2])  # its header is sound: found when it is decoded
    captions = captions_of(fresh_project)
    del captions["000003.png"]
    (pictures / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    (report,) = fresh_project.build_cache()
    found = rejects(fresh_project)
    assert found["000001.png"] == "not_an_image"
    assert found["000002.png"] in ("truncated", "broken_image")
    assert found["000003.png"] == "no_caption"
    assert len(found) == 3
    assert report.counts["used"] == 37
    assert sum(count for name, count in report.counts.items() if name.startswith("rejected")) == 3
    ids = {number for batch in epoch_of(fresh_project) for number in batch["sample_id"].tolist()}
    assert len(ids) == 37


def test_rejects_are_told_again_by_a_run_that_encodes_nothing(fresh_project: Project) -> None:
    whole = (fresh_project.pictures / "000002.png").read_bytes()
    (fresh_project.pictures / "000002.png").write_bytes(whole[:-40])
    fresh_project.build_cache()
    first = rejects(fresh_project)
    assert list(first) == ["000002.png"]
    (report,) = fresh_project.build_cache()
    assert report.encoded == 0
    assert rejects(fresh_project) == first


def test_a_unit_of_rejects_alone_is_done_and_has_no_shard(fresh_project: Project) -> None:
    for path in sorted(fresh_project.pictures.glob("*.png"))[:-1]:
        path.unlink()
    (only,) = fresh_project.pictures.glob("*.png")
    only.write_bytes(only.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"every sample was rejected; see the reasons in (.*rejects\.jsonl)"):
        fresh_project.build_cache()
    assert rejects(fresh_project)[only.name] in ("truncated", "broken_image")


def test_an_empty_data_set_is_a_fault(fresh_project: Project) -> None:
    for path in fresh_project.pictures.iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"no usable sample found"):
        fresh_project.build_cache()


# --- several processes -------------------------------------------------------------------------


def test_a_process_takes_its_share(fresh_project: Project, cached_project: Project) -> None:
    """Rank 1 of 2 encodes every other unit, then waits for the main process's manifest and says for what."""
    loaded = fresh_project.load("sd3_manifest_timeout_sec=0.3")
    with pytest.raises(UserError, match=r"gave up waiting for the main process to write .*manifest\.json"):
        stage.run(loaded, Launch(rank=1, local_rank=1, world=2))
    written = {path.name for path in (fresh_project.cache / "shards").glob("0*.safetensors")}
    assert written == set(shard_files(cached_project)[1::2])
    (report,) = stage.run(loaded, Launch(rank=0, local_rank=0, world=2))
    assert (report.encoded, report.already) == (4, 0)
    assert contents(fresh_project.cache) == contents(cached_project.cache)


def test_the_main_process_says_what_it_waits_for(fresh_project: Project) -> None:
    loaded = fresh_project.load("sd3_manifest_timeout_sec=0.3")
    with pytest.raises(UserError, match=r"gave up waiting for 3 shards of other processes, such as 000-"):
        stage.run(loaded, Launch(rank=0, local_rank=0, world=2))
    assert not (fresh_project.cache / MANIFEST).exists()


def test_an_older_manifest_is_not_taken_for_that_of_a_larger_plan(project: Project, raw_project: Project) -> None:
    """Every shard of the old manifest is in the new plan too, but a rank that went on with it would train on less."""
    more = project.folder / "more"
    more.mkdir()
    Image.new("RGB", (64, 64), "red").save(more / "a.png")
    (more / "a.txt").write_text("a red picture")
    project.data(project.data_toml.read_text() + '\n[[directory]]\npath = "more"\n')
    loaded = project.load("sd3_manifest_timeout_sec=0.3")
    with pytest.raises(UserError, match="gave up waiting for the main process"):
        stage.run(loaded, Launch(rank=1, local_rank=1, world=2))
    stage.run(loaded, Launch(rank=0, local_rank=0, world=2))
    (report,) = stage.run(loaded, Launch(rank=1, local_rank=1, world=2))
    assert report.counts["used"] == 41


# --- every key works through to the batches ----------------------------------------------------


def test_both_captions_are_used(cached_project: Project) -> None:
    """Each picture has an English and a Chinese caption; over some epochs both are drawn."""
    seen: dict[int, set[bytes]] = {}
    for epoch in range(6):
        for batch in epoch_of(cached_project, epoch=epoch):
            for number, t5 in zip(batch["sample_id"].tolist(), batch["t5"], strict=True):
                seen.setdefault(number, set()).add(t5.view(torch.uint8).numpy().tobytes())
    assert len(seen) == 40
    assert max(map(len, seen.values())) == 2
    assert sum(len(texts) == 2 for texts in seen.values()) > 30


DIRECTORY = 'resolutions = [64]\n[[directory]]\npath = "pictures"\n'


def test_masks_reach_the_loss(fresh_project: Project) -> None:
    """Masks of their own, a default for the others; an empty one is a reject."""
    masks = fresh_project.folder / "masks"
    masks.mkdir()
    left = Image.new("L", (64, 64), 0)
    left.paste(255, (0, 0, 32, 64))
    for number in range(20):
        left.save(masks / f"{number:06d}.png")
    Image.new("L", (64, 64), 0).save(masks / "000000.png")
    Image.new("L", (8, 8), 128).save(fresh_project.folder / "default.png")
    fresh_project.data(DIRECTORY + 'mask_path = "masks"\ndefault_mask_file = "default.png"\nflip = true\n')
    (report,) = fresh_project.build_cache()
    assert rejects(fresh_project) == {"000000.png": "empty_mask"}
    assert report.counts["used"] == 39
    sides = Counter()
    loaded = fresh_project.load()
    pipeline = LightSD3Pipeline(loaded.train.model, 0, open_cache(loaded.dataset).empty_text())
    for batch in epoch_of(fresh_project):
        _, (_, mask) = pipeline.prepare_inputs(batch)
        assert mask is not None
        for one in mask:
            halves = (round(float(one[:, :4].mean()), 2), round(float(one[:, 4:].mean()), 2))
            sides[halves] += 1
    assert set(sides) == {(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)}, "own mask, its mirror image, the default"


def test_flipped_pictures_are_those_of_the_mirrored_image(fresh_project: Project) -> None:
    fresh_project.data(DIRECTORY + "flip = true\n")
    fresh_project.build_cache()
    data = open_cache(fresh_project.load().dataset)
    entry = data.manifest.shards[0]
    reader = data._reader(entry)
    assert reader.num_variants == 2
    vae = load_vae(fresh_project.model, torch.device("cpu"), torch.float32)
    origin = read_origins(fresh_project.cache / "shards" / entry.file)[0]
    pixels = np.array(Image.open(fresh_project.pictures / origin.key.rsplit("/", 1)[1]))[None]
    plain, mirrored = encode_moments(vae, pixels)[0], encode_moments(vae, pixels[:, :, ::-1].copy())[0]
    for variant, (same, other) in enumerate(((plain, mirrored), (mirrored, plain))):
        moments = reader.picture(0, variant)[0]
        # in other batches convolutions round differently, and fp16 shows it
        assert (moments - same).abs().max() < 0.05 < (moments - other).abs().max(), variant
    drawn = {
        torch.equal(moments, reader.picture(0, 1)[0])
        for epoch in range(8)
        for batch in epoch_of(fresh_project, epoch=epoch)
        for number, moments in zip(batch["sample_id"].tolist(), batch["moments"], strict=True)
        if number == int(reader.sample_id[0])
    }
    assert drawn == {True, False}


def test_repeats_tags_and_prefix_work(fresh_project: Project) -> None:
    tags = fresh_project.folder / "tags"
    tags.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (40 * number, 0, 0)).save(tags / f"{number}.png")
        (tags / f"{number}.txt").write_text("red; circle; small; left")
    fresh_project.data(
        'resolutions = [64]\n[[directory]]\npath = "tags"\nnum_repeats = 2.5\nshuffle_tags = true\n'
        'cache_shuffle_num = 3\ncache_shuffle_delimiter = "; "\ncaption_prefix = "a picture of "\n'
    )
    fresh_project.build_cache()
    data = open_cache(fresh_project.load().dataset)
    (shard,) = data.manifest.shards
    captions = {c for origin in read_origins(data.folder / "shards" / shard.file) for c in origin.captions}
    assert len(captions) > 3, "each sample has three shuffles of its own"
    for caption in captions:
        assert caption.startswith("a picture of ")
        assert sorted(caption.removeprefix("a picture of ").split("; ")) == ["circle", "left", "red", "small"]
    batches = epoch_of(fresh_project)
    occurrences = Counter(number for batch in batches for number in batch["sample_id"].tolist())
    # 10 occurrences of 4 samples fill 3 batches of 4 with 2 of them once more
    assert len(batches) == 3
    assert len(occurrences) == 4
    assert sum(occurrences.values()) == 12
    assert min(occurrences.values()) >= 2
    texts = {t5.view(torch.uint8).numpy().tobytes() for batch in batches for t5 in batch["t5"]}
    assert len(texts) > 4, "one sample is shown with several of its shuffles"


def test_evaluation_sets_have_caches_of_their_own(fresh_project: Project) -> None:
    write_dataset(fresh_project.folder / "held_out", 4, seed=2, held_out=True)
    (fresh_project.folder / "eval.toml").write_text('resolutions = [64]\n[[directory]]\npath = "held_out"\n')
    reports = fresh_project.build_cache('eval_datasets=["eval.toml"]')
    assert [report.folder.name for report in reports] == ["cache", "cache-eval-eval"]
    assert [report.counts["used"] for report in reports] == [40, 4]


def test_a_folder_that_is_not_there_is_found_before_anything_is_encoded(fresh_project: Project) -> None:
    fresh_project.data('resolutions = [64]\n[[directory]]\npath = "nowhere"\n')
    with pytest.raises(ConfigFaults, match="nowhere"):
        only_cache(fresh_project.load(), Launch())
    assert not fresh_project.cache.exists()
