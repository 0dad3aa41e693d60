"""The cache stage: the same bytes each time, only what is missing or stale encoded, and nothing lost to a bad input."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from sd3_light.config import ConfigFaults
from sd3_light.config.faults import UserError
from sd3_light.data.building import cache_plan, catalogue
from sd3_light.data.building.cache_plan import make_cache_plan
from sd3_light.data.building.claims import Claims
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.data.shards import read_origins
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.encoders.frozen_parts import FrozenParts
from sd3_light.encoders.vae import load_vae, raw_moments
from sd3_light.engines import Launch
from sd3_light.journeys import build_caches
from sd3_light.stages.cache import make_recipe
from sd3_light.stages.cache.freshness import CacheState, compare, render
from sd3_light.stages.cache.shard_builder import ShardBuilder
from sd3_light.stages.check import disk_faults
from sd3_light.training.data import make_order, open_cache
from sd3_light.training.sd3 import LightSD3Pipeline
from sd3_light.world import write_dataset
from tests.project import Project

PICTURES = 40


def contents(project: Project) -> dict[str, bytes]:
    """The cache as training sees it: shards with what lies beside them, rejects, and the manifest but for places."""
    manifest = json.loads((project.cache / MANIFEST).read_text(encoding="utf-8"))
    shards = {path.name: path.read_bytes() for path in (project.cache / "shards").iterdir()}
    facts = {key: value for key, value in manifest.items() if key != "places"}
    return {**shards, "manifest": repr(facts).encode(), "rejects": (project.cache / "rejects.jsonl").read_bytes()}


def moved(project: Project) -> set[str]:
    """The shards in which the standing manifest and a new build differ; builds."""
    before = set(shard_files(project))
    project.build_cache()
    return before ^ set(shard_files(project))


def shard_of(project: Project, name: str) -> str:
    """The shard that holds the picture ``name``."""
    (found,) = (
        shard.file
        for shard in Manifest.load(project.cache).shards
        if any(origin.key.endswith(f"/{name}") for origin in read_origins(project.cache / "shards" / shard.file))
    )
    return found


def shard_files(project: Project) -> list[str]:
    return [shard.file for shard in Manifest.load(project.cache).shards]


def rejects(project: Project) -> dict[str, str]:
    lines = (project.cache / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return {entry["key"].rsplit("/", 1)[1]: entry["reason"] for entry in found}


def captions_of(project: Project) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((project.images / "captions.json").read_text(encoding="utf-8"))
    return found


def opened(project: Project, *overrides: str) -> CachedDataset:
    """The cache as training opens it."""
    loaded = project.load(*overrides)
    return open_cache(loaded.dataset, loaded.train, Launch())


def epoch_of(project: Project, *overrides: str, epoch: int = 0) -> list[dict[str, Any]]:
    """The global batches that training would see in an epoch."""
    loaded = project.load(*overrides)
    data = opened(project, *overrides)
    order = make_order(data, loaded, Launch())
    batches = MicroBatches(data, order, 0, 1, 1)
    first = epoch * order.steps_per_epoch
    return [batches[step] for step in range(first, first + order.steps_per_epoch)]


def compare_now(project: Project, *overrides: str) -> CacheState:
    """The cache against its sources as they are."""
    loaded = project.load(*overrides)
    with Claims(project.cache / "claims") as claims:
        found = catalogue.Catalogue(project.cache, claims)
        listings = found.refresh(catalogue.make_sources(loaded.dataset.directories), lambda _: None)
        found.probe_images(listings, 0, lambda _: None)
        recipe = make_recipe(loaded.train)
        return compare(project.cache, make_cache_plan(found, listings, recipe, loaded.train.sd3_shard_size), recipe)


def add_picture(project: Project, name: str) -> None:
    """A folder with one captioned picture."""
    folder = project.folder / name
    folder.mkdir()
    Image.new("RGB", (64, 64), "red").save(folder / "a.png")
    (folder / "a.txt").write_text("a red picture")


@pytest.fixture
def untouchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding anything is an error."""

    def never(*_: object) -> None:
        raise AssertionError("nothing should be encoded")

    monkeypatch.setattr(FrozenParts, "encode_images", never)
    monkeypatch.setattr(FrozenParts, "encode_captions", never)


# --- the same bytes ----------------------------------------------------------------------------


def test_a_cache_built_again_elsewhere_is_the_same_bytes(fresh_project: Project, cached_project: Project) -> None:
    (report,) = fresh_project.build_cache()
    assert (report.encoded, report.already) == (PICTURES, 0)
    assert contents(fresh_project) == contents(cached_project)


def test_a_whole_cache_is_left_alone(project: Project, untouchable: None) -> None:
    before = contents(project)
    (report,) = project.build_cache()
    assert (report.encoded, report.already) == (0, PICTURES)
    assert contents(project) == before


def test_regenerate_encodes_all_again_to_the_same_bytes(project: Project) -> None:
    before = contents(project)
    shard = project.cache / "shards" / shard_files(project)[2]
    shard.write_bytes(b"damaged")
    (report,) = project.build_cache(regenerate=True)
    assert (report.encoded, report.already) == (PICTURES, 0)
    assert contents(project) == before


def test_the_manifest_counts_every_sample(cached_project: Project) -> None:
    manifest = Manifest.load(cached_project.cache)
    assert manifest.counts["used"] == 40 == sum(shard.count for shard in manifest.shards)
    sizes = Counter()
    for shard in manifest.shards:
        assert shard.count <= 8
        sizes[shard.bucket] += shard.count
    assert sizes == {"64x64": 20, "80x48": 10, "48x80": 10}
    assert manifest.recipe["t5_max_length"] == 16
    captions = captions_of(cached_project)
    for shard in manifest.shards:
        for origin in read_origins(cached_project.cache / "shards" / shard.file):
            assert list(origin.captions) == captions[origin.key.rsplit("/", 1)[1]]


# --- what is missing or stale ------------------------------------------------------------------


def test_a_killed_run_is_completed_by_the_missing_part_alone(project: Project) -> None:
    before = contents(project)
    files = shard_files(project)
    lost = [shard for shard in Manifest.load(project.cache).shards if shard.file in (files[1], files[5])]
    for shard in lost:
        (project.cache / "shards" / shard.file).unlink()
    (project.cache / MANIFEST).unlink()
    with pytest.raises(UserError, match="no cache at"):
        opened(project)
    (report,) = project.build_cache()
    count = sum(shard.count for shard in lost)
    assert (report.encoded, report.already) == (count, PICTURES - count)
    assert contents(project) == before


# --- the stale matrix: each kind of change, and what is encoded again -----------------------------


def change_caption(project: Project) -> None:
    captions = captions_of(project)
    captions["000007.png"] = ["a blue star", "一个蓝色的星星"]
    (project.images / "captions.json").write_text(json.dumps(captions), encoding="utf-8")


def change_picture(project: Project) -> None:
    picture = Image.open(project.images / "000007.png")
    Image.new("RGB", picture.size, "white").save(project.images / "000007.png")


def change_nothing_but_times(project: Project) -> None:
    for path in project.images.iterdir():
        os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "cause"),
    [(change_caption, "the caption changed"), (change_picture, "the picture or its mask changed")],
)
def test_a_changed_sample_re_encodes_its_shard_alone(project: Project, change: Any, cause: str) -> None:
    old = shard_of(project, "000007.png")
    change(project)
    state = compare_now(project)
    assert state.causes[cause] == 1
    assert (state.missing, state.fresh + state.stale) == (0, PICTURES)
    assert {old, shard_of_new := (moved(project) - {old}).pop()} == {old, shard_of(project, "000007.png")}
    assert old != shard_of_new


def test_other_times_of_the_same_files_change_nothing(project: Project, untouchable: None) -> None:
    change_nothing_but_times(project)
    assert moved(project) == set()


def test_a_directory_elsewhere_in_the_list_changes_nothing_of_the_others(project: Project) -> None:
    add_picture(project, "more")
    before = set(shard_files(project))
    project.data(
        project.data_toml.read_text().replace("[[directory]]", '[[directory]]\npath = "more"\n\n[[directory]]', 1)
    )
    (report,) = project.build_cache()
    assert report.encoded == 1
    assert before < set(shard_files(project))


@pytest.mark.parametrize(("change", "most"), [("add", 3), ("remove", 3)])
def test_an_added_or_removed_picture_changes_its_neighbourhood_only(project: Project, change: str, most: int) -> None:
    captions = captions_of(project)
    if change == "add":
        shutil.copy(project.images / "000020.png", project.images / "000019x.png")
        captions["000019x.png"] = captions["000020.png"]
    else:
        (project.images / "000020.png").unlink()
        del captions["000020.png"]
    (project.images / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    before = len(shard_files(project))
    gone_or_new = moved(project)
    assert 1 <= len(gone_or_new) <= 2 * most < before


@pytest.mark.parametrize(
    ("override", "cause"),
    [("model.t5_max_length=12", "t5_max_length"), ('model.text_tokens="real"', "text_tokens")],
)
def test_a_change_of_text_is_noticed_everywhere(project: Project, override: str, cause: str) -> None:
    state = compare_now(project, override)
    assert (state.fresh, state.stale, state.missing) == (0, PICTURES, 0)
    assert any(cause in text for text in state.causes)
    (report,) = project.build_cache(override)
    assert (report.encoded, report.already) == (PICTURES, 0)
    (back,) = project.build_cache()
    assert (back.encoded, back.already) == (0, PICTURES), "the old shards were still there"


@pytest.mark.parametrize(
    ("part", "cause"), [("vae", "the VAE"), ("text_encoder_2", "CLIP-G"), ("text_encoder_3", "T5")]
)
def test_another_encoder_is_noticed(project: Project, tmp_path: Path, part: str, cause: str) -> None:
    model = Path(shutil.copytree(project.model, tmp_path / "other"))
    (weights,) = (model / part).glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    state = compare_now(project, f'model.diffusers_path="{model}"')
    assert (state.fresh, state.stale) == (0, PICTURES)
    assert any(cause in text for text in state.causes)


def test_another_size_or_flip_is_noticed(project: Project) -> None:
    project.data('resolutions = [64]\n[[directory]]\npath = "images"\n')
    state = compare_now(project)
    assert state.fresh + state.stale + state.missing == PICTURES
    square = sum(shard.count for shard in Manifest.load(project.cache).shards if shard.bucket == "64x64")
    assert state.fresh < square, "all are square now, so squares have other neighbours"
    project.data('resolutions = [64]\n[[directory]]\npath = "images"\nflip = true\n')
    assert compare_now(project).fresh == 0


def test_one_screen_says_what_is_what(project: Project) -> None:
    (project.images / "000007.png").unlink()
    add_picture(project, "images/new")
    console = Console(width=100)
    with console.capture() as screen:
        console.print(render(compare_now(project)))
    text = screen.get()
    for word in ("fresh", "stale", "missing", "orphaned", "--prune"):
        assert word in text, text


def test_orphans_are_named_and_go_when_asked(project: Project) -> None:
    gone = shard_of(project, "000007.png")
    change_caption(project)
    project.build_cache()
    assert (project.cache / "shards" / gone).is_file(), "a run may still read it"
    project.build_cache(prune=True)
    assert not (project.cache / "shards" / gone).exists()
    named = {Path(file).stem for file in shard_files(project)}
    assert {path.name.split(".")[0] for path in (project.cache / "shards").iterdir()} - named == {
        Path(Manifest.load(project.cache).empty.file).stem
    }


def test_a_dry_run_changes_nothing(project: Project, untouchable: None) -> None:
    change_caption(project)
    (project.cache / "shards" / shard_files(project)[3]).write_bytes(b"short")
    before = contents(project)
    project.build_cache(dry_run=True)
    assert contents(project) == before


def test_the_sources_are_listed_and_read_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changed: no caption, no picture and no header is read again."""
    read: list[str] = []
    for name in ("scan", "probe_images"):
        monkeypatch.setattr(catalogue, name, lambda *_, name=name: read.append(name) or [])
    (report,) = project.build_cache()
    assert read == []
    assert report.already == PICTURES


def test_a_new_picture_has_its_own_part_alone_read(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (catalogue, cache_plan):
        monkeypatch.setattr(module, "PART_ROWS", 4)
    fresh_project.build_cache()
    add_picture(fresh_project, "images/new")
    seen: list[str] = []
    real = catalogue.probe_images
    monkeypatch.setattr(
        catalogue, "probe_images", lambda places: seen.extend(p.image.path for p in places) or real(places)
    )
    fresh_project.build_cache()
    assert any("new/a.png" in path for path in seen)
    assert len(seen) <= 4, "a part of four, of forty-one pictures"


# --- damage --------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def test_verify_finds_damage_and_mends_it(project: Project) -> None:
    before = contents(project)
    damage(project.cache / "shards" / shard_files(project)[3])
    project.build_cache()
    assert contents(project) != before, "a shard of the right size is not hashed by a plain run"
    project.build_cache(verify=True)
    assert contents(project) == before


def test_a_damaged_empty_caption_is_encoded_again(project: Project) -> None:
    before = contents(project)
    path = project.cache / "shards" / Manifest.load(project.cache).empty.file
    damage(path)
    with pytest.raises(UserError, match="damaged"):
        opened(project).empty_text()
    project.build_cache()
    assert contents(project) == before
    damage(path)
    project.build_cache(verify=True)
    assert contents(project) == before


def test_a_damaged_manifest_is_made_anew(project: Project) -> None:
    before = contents(project)
    (project.cache / MANIFEST).write_text("{}")
    project.build_cache(regenerate=True)
    assert contents(project) == before


@pytest.mark.parametrize(
    "name",
    [
        "shards/images*.json",
        "shards/empty*.json",
        "catalogue/images*.json",
        "catalogue/plan*.json",
        "catalogue/plan*.arrow",
    ],
)
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff"])
def test_damaged_books_are_kept_anew(project: Project, name: str, content: bytes) -> None:
    before = contents(project)
    next(project.cache.glob(name)).write_bytes(content)
    project.build_cache()
    assert contents(project) == before


def test_a_damaged_table_beside_a_shard_is_mended_by_verify(project: Project) -> None:
    before = contents(project)
    for path in project.cache.glob("shards/images*.arrow"):
        path.write_bytes(b"")
    project.build_cache(verify=True)
    assert contents(project) == before


def test_a_damaged_table_of_a_shard_that_goes_stops_nothing(project: Project) -> None:
    for path in project.cache.glob("shards/images*.arrow"):
        path.write_bytes(b"")
    change_caption(project)
    (report,) = project.build_cache()
    assert report.counts["used"] == PICTURES


def test_a_source_that_goes_away_ends_the_run(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ShardBuilder.build

    def build(self: ShardBuilder, *given: Any) -> None:
        fresh_project.images.rename(fresh_project.folder / "away")
        real(self, *given)

    monkeypatch.setattr(ShardBuilder, "build", build)
    with pytest.raises(UserError, match="has gone while it was being cached"):
        fresh_project.build_cache("caching_num_workers=0")
    assert not (fresh_project.cache / MANIFEST).exists()


def test_a_prune_that_was_killed_is_no_end(project: Project) -> None:
    """What lies beside a shard may be gone before it."""
    before = contents(project)
    (project.cache / "shards" / shard_files(project)[3]).with_suffix(".json").unlink()
    project.build_cache()
    assert contents(project) == before


def test_a_shard_that_vanishes_is_not_left_out_in_silence(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ShardBuilder.build

    def build(self: ShardBuilder, *given: Any) -> None:
        real(self, *given)
        (project.cache / "shards" / shard_files(project)[3]).unlink()

    monkeypatch.setattr(ShardBuilder, "build", build)
    with pytest.raises(UserError, match="has vanished"):
        project.build_cache()


def test_a_picture_that_changed_meanwhile_is_tried_again(
    fresh_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fresh_project.images / "000007.png"
    whole, real = path.read_bytes(), ShardBuilder.build

    def build(self: ShardBuilder, *given: Any) -> None:
        path.write_bytes(b"something else for a moment")
        real(self, *given)
        path.write_bytes(whole)

    monkeypatch.setattr(ShardBuilder, "build", build)
    (first,) = fresh_project.build_cache("caching_num_workers=0")
    assert rejects(fresh_project) == {"000007.png": "changed_meanwhile"}
    monkeypatch.undo()
    (second,) = fresh_project.build_cache()
    assert (first.counts["used"], second.counts["used"]) == (39, 40)
    assert rejects(fresh_project) == {}


def test_small_buckets_are_told_by_their_occurrences(project: Project) -> None:
    (report,) = project.build_cache("micro_batch_size_per_gpu=16")
    assert report.small == {"48x80 of 48x80": 10, "80x48 of 80x48": 10}
    project.data(project.data_toml.read_text() + "num_repeats = 4\n")
    (report,) = project.build_cache("micro_batch_size_per_gpu=16")
    assert report.small == {}


def test_a_shard_of_another_size_is_encoded_again(project: Project) -> None:
    before = contents(project)
    (project.cache / "shards" / shard_files(project)[3]).write_bytes(b"short")
    project.build_cache()
    assert contents(project) == before


# --- trust -------------------------------------------------------------------------------------


def test_trust_does_not_look_at_the_sources(project: Project, untouchable: None) -> None:
    (project.images / "000003.png").unlink()
    before = contents(project)
    assert project.build_cache(trust=True) == []
    assert contents(project) == before


def test_without_trust_a_deleted_picture_is_noticed(project: Project) -> None:
    (project.images / "000003.png").unlink()
    (report,) = project.build_cache()
    assert report.counts["used"] == 39
    assert rejects(project) == {"000003.png": "missing_file"}


def test_trust_refuses_a_cache_of_another_text_length(project: Project, untouchable: None) -> None:
    with pytest.raises(UserError, match=r"built with t5_max_length = 16, the config says 12; run without --trust"):
        project.build_cache("model.t5_max_length=12", trust=True)


def test_trust_refuses_a_cache_of_another_encoder(project: Project, tmp_path: Path, untouchable: None) -> None:
    model = Path(shutil.copytree(project.model, tmp_path / "other"))
    (weights,) = (model / "vae").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match=r"built with another vae; run without --trust_cache"):
        project.build_cache(f'model.diffusers_path="{model}"', trust=True)


def test_trust_builds_a_cache_that_is_not_there(fresh_project: Project) -> None:
    (report,) = fresh_project.build_cache(trust=True)
    assert report.encoded == PICTURES


def test_a_damaged_shard_is_found_even_in_a_trusted_cache_and_its_remedy_works(project: Project) -> None:
    before = contents(project)
    path = project.cache / "shards" / shard_files(project)[0]
    damage(path)
    project.build_cache(trust=True)
    with pytest.raises(UserError, match=rf"shard {path} is damaged.*run `sd3-light cache CONFIG`"):
        epoch_of(project)
    project.build_cache()
    assert contents(project) == before
    epoch_of(project)


def test_a_cache_that_may_only_be_read_can_be_trained_from(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder refuses every write, as a read-only mount does (permissions do not bind root)."""
    real = Path.mkdir

    def refuse(self: Path, *given: Any, **keys: Any) -> None:
        if self.is_relative_to(project.cache):
            raise OSError(30, "Read-only file system")
        real(self, *given, **keys)

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("sd3_light.stages.check.disk._cannot_make", lambda place: "cannot be written to")
    faults = [fault.key for fault in disk_faults(project.load())]
    assert faults == ["output_dir"], "a finished cache need not be written to"
    with pytest.raises(UserError, match=r"cannot write to .*Read-only file system; .*--trust_cache"):
        project.build_cache()
    assert project.build_cache(trust=True) == []
    epoch_of(project)


# --- rejects -----------------------------------------------------------------------------------


def test_bad_inputs_are_named_and_the_rest_goes_on(fresh_project: Project) -> None:
    pictures = fresh_project.images
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
    whole = (fresh_project.images / "000002.png").read_bytes()
    (fresh_project.images / "000002.png").write_bytes(whole[:-40])
    fresh_project.build_cache()
    first = rejects(fresh_project)
    assert list(first) == ["000002.png"]
    (report,) = fresh_project.build_cache()
    assert report.encoded == 0
    assert rejects(fresh_project) == first


def test_a_unit_of_rejects_alone_is_done_and_has_no_shard(fresh_project: Project) -> None:
    for path in sorted(fresh_project.images.glob("*.png"))[:-1]:
        path.unlink()
    (only,) = fresh_project.images.glob("*.png")
    only.write_bytes(only.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"every sample was rejected; see the reasons in (.*rejects\.jsonl)"):
        fresh_project.build_cache()
    assert rejects(fresh_project)[only.name] in ("truncated", "broken_image")


def test_an_empty_data_set_is_a_fault(fresh_project: Project) -> None:
    for path in fresh_project.images.iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"no usable sample found"):
        fresh_project.build_cache()


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


DIRECTORY = 'resolutions = [64]\n[[directory]]\npath = "images"\n'


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
    pipeline = LightSD3Pipeline(loaded.train.model, 0, opened(fresh_project).empty_text())
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
    data = opened(fresh_project)
    entry = data.manifest.shards[0]
    reader = data._reader(entry)
    assert reader.num_variants == 2
    vae = load_vae(fresh_project.model, torch.device("cpu"), torch.float32)
    origin = read_origins(fresh_project.cache / "shards" / entry.file)[0]
    pixels = np.array(Image.open(fresh_project.images / origin.key.rsplit("/", 1)[1]))[None]
    plain = raw_moments(vae, torch.from_numpy(pixels))[0]
    mirrored = raw_moments(vae, torch.from_numpy(pixels[:, :, ::-1].copy()))[0]
    for variant, (same, other) in enumerate(((plain, mirrored), (mirrored, plain))):
        moments = reader.image(0, variant)[0]
        # in other batches convolutions round differently, and fp16 shows it
        assert (moments - same).abs().max() < 0.05 < (moments - other).abs().max(), variant
    drawn = {
        torch.equal(moments, reader.image(0, 1)[0])
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
    captions = {
        caption
        for shard in Manifest.load(fresh_project.cache).shards
        for origin in read_origins(fresh_project.cache / "shards" / shard.file)
        for caption in origin.captions
    }
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
        build_caches(fresh_project.load(), Launch())
    assert not fresh_project.cache.exists()
