"""The cache stage: reproducible bytes, only missing or stale samples encoded, bad inputs rejected."""

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from sd3_light.cache import identity
from sd3_light.cache.build_folder import BuildFolder
from sd3_light.cache.freshness import CacheState, check_freshness, last_manifest, render_state
from sd3_light.cache.identity import decides_shards, is_trusted
from sd3_light.cache.shard_builder import ShardBuilder
from sd3_light.cache.verb import make_identity
from sd3_light.check.count import count_samples
from sd3_light.check.verb import disk_faults
from sd3_light.config import ConfigFaults
from sd3_light.config.faults import UserError
from sd3_light.data import manifest as manifest_module
from sd3_light.data.cache_plan import make_cache_plan
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.data.shards import CaptionFeatures, read_origins
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.encoding.vae import load_vae, raw_moments
from sd3_light.engines import Launch
from sd3_light.engines.feed import make_order, open_cache
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.families.sd3.prepare import LightSD3Pipeline
from sd3_light.journeys import build_caches
from sd3_light.report.inspect import verb as inspect
from sd3_light.report.inspect.cache_page import write_cache_page
from sd3_light.sources import catalogue
from sd3_light.sources.claims import Claims
from tests.cases import combinations
from tests.project import Project, with_nan
from tests.refusals import refused
from tests.unit.cache.samples import (
    captions_of,
    change_caption,
    change_image,
    contents,
    harm,
    readers,
    reject_lines,
    shard_of,
    write_captions,
)

NUM_IMAGES = 40


def rebuild_and_diff(project: Project) -> set[str]:
    """Build the cache; return the shards by which the old and the new manifest differ."""
    before = set(shard_files(project))
    project.build_cache()
    return before ^ set(shard_files(project))


def shard_files(project: Project) -> list[str]:
    return [shard.file for shard in Manifest.load(project.cache).shards]


def rejects(project: Project) -> dict[str, str]:
    return {entry["key"].rsplit("/", 1)[1]: entry["reason"] for entry in reject_lines(project)}


def text_of(project: Project) -> dict[int, list[CaptionFeatures]]:
    features: dict[int, list[CaptionFeatures]] = {}
    for entry, shard in readers(project):
        for row in range(entry.count):
            features[shard.identity(row)] = [shard.caption(row, number) for number in range(shard.num_captions(row))]
    return features


def open_dataset(project: Project, *overrides: str) -> CachedDataset:
    loaded = project.load(*overrides)
    return open_cache(loaded.dataset, loaded.train, Launch())


def epoch_of(project: Project, *overrides: str, epoch: int = 0) -> list[dict[str, Any]]:
    loaded = project.load(*overrides)
    data = open_dataset(project, *overrides)
    order = make_order(data, loaded, Launch())
    batches = MicroBatches(data, order, 0, 1, 1)
    first = epoch * order.steps_per_epoch
    return [batches[step] for step in range(first, first + order.steps_per_epoch)]


def current_state(project: Project, *overrides: str) -> CacheState:
    loaded = project.load(*overrides)
    with Claims(project.cache / "claims") as claims:
        inputs = catalogue.Catalogue(project.cache, claims)
        listings = inputs.refresh(catalogue.make_sources(loaded.dataset.directories), lambda _: None)
        inputs.probe_images(listings, 0, lambda _: None)
        current = make_identity(loaded.train.model)
        plan = make_cache_plan(inputs, listings, decides_shards(current), loaded.train.sd3_shard_size)
        last = last_manifest(project.cache)
        return check_freshness(project.cache, plan, current, last and last[0])


def test_auto_precision_keeps_caches_and_another_one_encodes_again(cached_project: Project) -> None:
    assert "vae_dtype" not in Manifest.load(cached_project.cache).recipe
    assert current_state(cached_project, 'model.vae_dtype="auto"').stale == 0
    state = current_state(cached_project, 'model.vae_dtype="float16"')
    assert state.fresh == 0
    assert dict(state.causes) == {"changed: vae_dtype": state.stale}


def test_a_trusted_cache_of_another_precision_is_refused(cached_project: Project, tmp_path: Path) -> None:
    project = cached_project.copy(tmp_path / "project")
    manifest = Manifest.load(project.cache)
    replace(manifest, recipe={**manifest.recipe, "vae_dtype": "bfloat16"}).save(project.cache)
    loaded = project.load()
    with pytest.raises(UserError, match=r"vae_dtype = 'bfloat16', the config says 'auto'; run without --trust-cache"):
        is_trusted(loaded.dataset, loaded.train)


def add_image(project: Project, name: str) -> None:
    folder = project.folder / name
    folder.mkdir()
    Image.new("RGB", (64, 64), "red").save(folder / "a.png")
    (folder / "a.txt").write_text("a red image")


@pytest.fixture
def no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Mock(side_effect=AssertionError("nothing should be encoded"))
    monkeypatch.setattr(FrozenParts, "encode_images", never)
    monkeypatch.setattr(FrozenParts, "encode_captions", never)


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


def test_missing_and_truncated_shards_alone_are_encoded(project: Project) -> None:
    before = contents(project)
    files = shard_files(project)
    lost = [shard for shard in Manifest.load(project.cache).shards if shard.file in (files[1], files[5])]
    for shard in lost:
        (project.cache / "shards" / shard.file).unlink()
    (project.cache / MANIFEST).unlink()
    refused("no cache at", open_dataset, project)
    (report,) = project.build_cache()
    count = sum(shard.count for shard in lost)
    assert (report.encoded, report.reused) == (count, NUM_IMAGES - count)
    assert contents(project) == before
    shards = [project.cache / "shards" / file for file in files]
    shards[3].write_bytes(b"short")
    shards[4].with_suffix(".json").unlink()  # as by a prune that was killed between a shard's side files and the shard
    project.build_cache()
    assert contents(project) == before


@pytest.mark.parametrize(
    ("change", "cause"), [(change_caption, "the caption changed"), (change_image, "the image or its mask changed")]
)
def test_a_changed_sample_re_encodes_only_its_shard(project: Project, change: Any, cause: str) -> None:
    old = shard_of(project, "000007.png").name
    change(project)
    state = current_state(project)
    assert state.causes[cause] == 1
    assert (state.missing, state.fresh + state.stale) == (0, NUM_IMAGES)
    (new,) = rebuild_and_diff(project) - {old}
    assert new == shard_of(project, "000007.png").name


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("model.t5_max_length=12", "t5_max_length"),
        pytest.param('model.text_tokens="real"', "text_tokens", marks=pytest.mark.slow),
    ],
)
def test_a_changed_text_setting(project: Project, override: str, cause: str, capfd: pytest.CaptureFixture[str]) -> None:
    state = current_state(project, override)
    assert (state.fresh, state.stale, state.missing) == (0, NUM_IMAGES, 0)
    assert any(cause in text for text in state.causes)
    (report,) = project.build_cache(override)
    assert (report.encoded, report.reused) == (NUM_IMAGES, 0)
    warned = "cache: warning: of 80 captions " in (printed := capfd.readouterr().err.replace("\n", " "))
    assert warned == (cause == "t5_max_length"), "longer captions are cut"
    assert ("exceed t5_max_length = 12: the rest of each is cut" in printed) == warned
    (back,) = project.build_cache()
    assert (back.encoded, back.reused) == (0, NUM_IMAGES), "the old shards still exist"


@pytest.mark.parametrize(
    ("part", "cause"), [("vae", "the VAE"), ("text_encoder_2", "CLIP-G"), ("text_encoder_3", "T5")]
)
def test_a_changed_encoder_makes_all_samples_stale(project: Project, tmp_path: Path, part: str, cause: str) -> None:
    model = Path(shutil.copytree(project.model, tmp_path / "other"))
    (weights,) = (model / part).glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    state = current_state(project, f'model.diffusers_path="{model}"')
    assert (state.fresh, state.stale) == (0, NUM_IMAGES)
    assert any(cause in text for text in state.causes)


def test_the_state_table_lists_all_kinds(project: Project) -> None:
    (project.images / "000007.png").unlink()
    add_image(project, "images/new")
    console = Console(width=100)
    with console.capture() as screen:
        console.print(render_state(current_state(project)))
    text = screen.get()
    for word in ("fresh", "stale", "missing", "orphaned", "--prune"):
        assert word in text, text


def test_orphans_are_kept_until_pruned_shards_first(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed prune leaves no shard without its entry, which would be unknown to every later run."""
    deleted: list[str] = []
    real = BuildFolder.delete

    def delete(self: BuildFolder, paths: Sequence[Path]) -> None:
        deleted.extend(path.suffix for path in paths)
        real(self, paths)

    monkeypatch.setattr(BuildFolder, "delete", delete)
    old = shard_of(project, "000007.png").name
    change_caption(project)
    project.build_cache()
    assert (project.cache / "shards" / old).is_file(), "another run may still read it"
    assert deleted == []
    project.build_cache(prune=True)
    listed = {Path(file).stem for file in (*shard_files(project), Manifest.load(project.cache).empty.file)}
    assert {path.name.split(".")[0] for path in (project.cache / "shards").iterdir()} == listed
    shards = deleted.count(".safetensors")
    assert 0 < shards < len(deleted)
    assert set(deleted[:shards]) == {".safetensors"}


def test_a_dry_run_changes_nothing(project: Project, no_encoding: None) -> None:
    change_caption(project)
    (project.cache / "shards" / shard_files(project)[3]).write_bytes(b"short")
    before = contents(project)
    (report,) = project.build_cache(dry_run=True)
    assert contents(project) == before
    assert report.missing == 2


def test_verify_repairs_shards_their_tables_and_the_empty_caption(project: Project) -> None:
    before = contents(project)
    harm(project.cache / "shards" / shard_files(project)[3])
    project.build_cache()
    assert contents(project) != before, "a run without --verify does not hash shards of the right size"
    for path in project.cache.glob("shards/images*.arrow"):
        path.write_bytes(b"")
    project.build_cache(verify=True)
    assert contents(project) == before
    harm(project.cache / "shards" / Manifest.load(project.cache).empty.file)
    refused("damaged", open_dataset(project).empty_text)
    project.build_cache()
    assert contents(project) == before, "reading it has marked it"


METADATA = {
    "shards/images*.json": b"{}",
    "shards/empty*.json": b"",
    "catalogue/images*.json": b"[]",
    "catalogue/plan*.json": b"\xff",
    "catalogue/plan*.arrow": b"",
}


@pytest.mark.parametrize(
    ("name", "content"), combinations(METADATA, (b"", b"{}", b"[]", b"\xff"), fast=list(METADATA.items()))
)
def test_damaged_metadata_is_rebuilt(project: Project, name: str, content: bytes) -> None:
    before = contents(project)
    next(project.cache.glob(name)).write_bytes(content)
    project.build_cache()
    assert contents(project) == before


def around_build(patch: pytest.MonkeyPatch, before: Any = lambda: None, after: Any = lambda: None) -> None:
    """Call a function before the shards are built, or after."""
    real = ShardBuilder.build

    def build(self: ShardBuilder, *args: Any) -> None:
        before()
        real(self, *args)
        after()

    patch.setattr(ShardBuilder, "build", build)


def test_a_source_that_disappears_stops_the_run(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    around_build(monkeypatch, before=lambda: fresh_project.images.rename(fresh_project.folder / "moved"))
    refused("disappeared while it was being cached", fresh_project.build_cache, "caching_num_workers=0")
    assert not (fresh_project.cache / MANIFEST).exists()


def test_a_shard_that_disappears_is_an_error(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    around_build(monkeypatch, after=(project.cache / "shards" / shard_files(project)[3]).unlink)
    refused("disappeared, perhaps because another run pruned it", project.build_cache)


def test_an_image_that_changed_meanwhile_is_retried(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fresh_project.images / "000007.png"
    whole = path.read_bytes()
    around_build(monkeypatch, lambda: path.write_bytes(b"something else"), lambda: path.write_bytes(whole))
    (first,) = fresh_project.build_cache("caching_num_workers=0")
    assert rejects(fresh_project) == {"000007.png": "changed_meanwhile"}
    monkeypatch.undo()
    (second,) = fresh_project.build_cache()
    assert (first.counts["used"], second.counts["used"]) == (39, 40)
    assert rejects(fresh_project) == {}


def test_small_buckets_are_reported_by_occurrences(project: Project) -> None:
    (report,) = project.build_cache("micro_batch_size_per_gpu=16")
    assert report.small_buckets == {"48x80 of 48x80": 10, "80x48 of 80x48": 10}
    project.data(project.data_toml.read_text() + "num_repeats = 4\n")
    (report,) = project.build_cache("micro_batch_size_per_gpu=16")
    assert report.small_buckets == {}


def test_a_cache_of_an_earlier_format_is_encoded_again(
    fresh_project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its shards have other names, and training and `--trust-cache` refuse it in one line."""
    with monkeypatch.context() as patch:
        for module in (manifest_module, identity):
            patch.setattr(module, "CACHE_FORMAT", 2)
        fresh_project.build_cache()
        old = shard_files(fresh_project)
    path, remedy = fresh_project.cache / MANIFEST, "`sd3-light cache CONFIG` encodes it again"
    line = f"{path} has format 2, this version reads 5; {remedy}"
    refused(re.escape(line), open_dataset, fresh_project)
    loaded = fresh_project.load()
    refused(re.escape(line), is_trusted, loaded.dataset, loaded.train)
    capsys.readouterr()
    (report,) = fresh_project.build_cache()
    assert (report.encoded, report.reused) == (NUM_IMAGES, 0)
    assert " ".join(capsys.readouterr().err.split()).count("has format 2, this version reads 5") == 1
    assert not set(old) & set(shard_files(fresh_project))
    fresh_project.build_cache(prune=True)
    assert not any((fresh_project.cache / "shards" / file).exists() for file in old)
    assert len(epoch_of(fresh_project)) > 0


def test_trust_ignores_sources_and_rejects_other_encoders(project: Project, tmp_path: Path, no_encoding: None) -> None:
    (project.images / "000003.png").unlink()
    before = contents(project)
    assert project.build_cache(trust=True) == []
    assert contents(project) == before
    with pytest.raises(UserError, match=r"built with t5_max_length = 16, the config says 12; run without --trust"):
        project.build_cache("model.t5_max_length=12", trust=True)
    model = Path(shutil.copytree(project.model, tmp_path / "other"))
    (weights,) = (model / "vae").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match=r"built with another vae; run without --trust-cache"):
        project.build_cache(f'model.diffusers_path="{model}"', trust=True)


def test_trust_builds_a_missing_cache(fresh_project: Project) -> None:
    (report,) = fresh_project.build_cache(trust=True)
    assert report.encoded == NUM_IMAGES


def test_a_damaged_shard_is_found_in_a_trusted_cache_and_the_suggested_command_repairs_it(project: Project) -> None:
    before = contents(project)
    path = project.cache / "shards" / shard_files(project)[0]
    harm(path)
    project.build_cache(trust=True)
    refused(rf"shard {path} is damaged.*run `sd3-light cache CONFIG`", epoch_of, project)
    project.build_cache()
    assert contents(project) == before
    epoch_of(project)


def test_a_read_only_cache_can_be_used_for_training(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a read-only mount (permissions do not apply to root)."""
    real = Path.mkdir

    def fail(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.is_relative_to(project.cache):
            raise OSError(30, "Read-only file system")
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", fail)
    monkeypatch.setattr("sd3_light.check.disk._cannot_create", lambda path: "cannot be written to")
    faults = [fault.key for fault in disk_faults(project.load())]
    assert faults == ["output_dir"], "a finished cache need not be writable"
    refused(r"cannot write to .*Read-only file system; .*--trust-cache", project.build_cache)
    assert project.build_cache(trust=True) == []
    epoch_of(project)


def test_bad_inputs_are_listed_and_the_rest_is_used(fresh_project: Project) -> None:
    images = fresh_project.images
    (images / "000001.png").write_bytes(b"not an image at all")
    whole = (images / "000002.png").read_bytes()
    (images / "000002.png").write_bytes(whole[: len(whole) // 2])  # its header is valid: only decoding fails
    captions = captions_of(fresh_project)
    del captions["000003.png"]
    write_captions(fresh_project, captions)
    (report,) = fresh_project.build_cache()
    reasons = rejects(fresh_project)
    assert reasons["000001.png"] == "not_an_image"
    assert reasons["000002.png"] in ("truncated", "broken_image")
    assert reasons["000003.png"] == "no_caption"
    assert len(reasons) == 3
    assert report.counts["used"] == report.counts["pictures"] == report.encoded == 37
    assert sum(count for name, count in report.counts.items() if name.startswith("rejected")) == 3
    ids = {number for batch in epoch_of(fresh_project) for number in batch["sample_id"].tolist()}
    assert len(ids) == 37


def test_rejects_are_listed_again_by_a_run_without_encoding(fresh_project: Project, cached_project: Project) -> None:
    whole = (fresh_project.images / "000002.png").read_bytes()
    (fresh_project.images / "000002.png").write_bytes(whole[:-40])
    fresh_project.build_cache()
    first = rejects(fresh_project)
    assert list(first) == ["000002.png"]
    (report,) = fresh_project.build_cache()
    assert report.encoded == 0
    assert rejects(fresh_project) == first
    texts, expected = text_of(fresh_project), text_of(cached_project)
    assert len(texts) == NUM_IMAGES - 1
    for number, captions in texts.items():  # one rejected image does not shift the captions of its shard
        for caption, same in zip(captions, expected[number], strict=True):
            for name, values in caption.items():
                torch.testing.assert_close(values, same[name])


def test_a_dataset_with_only_rejects_is_an_error(fresh_project: Project) -> None:
    for path in sorted(fresh_project.images.glob("*.png"))[:-1]:
        path.unlink()
    (only,) = fresh_project.images.glob("*.png")
    only.write_bytes(only.read_bytes()[:-40])
    refused(r"every sample was rejected; see the reasons in (.*rejects\.jsonl)", fresh_project.build_cache)
    assert rejects(fresh_project)[only.name] in ("truncated", "broken_image")


def test_an_empty_dataset_is_an_error(fresh_project: Project) -> None:
    for path in fresh_project.images.iterdir():
        path.unlink()
    refused(r"no usable sample found", fresh_project.build_cache)
    add_image(fresh_project, "images/new")
    (fresh_project.images / "new" / "a.txt").unlink()
    (fresh_project.images / "labels.csv").write_text("id,words\n1,a cat\n")
    refused(r"\(1 no_caption\); the first has no \.txt .*; labels\.csv is not read: none of", fresh_project.build_cache)


DIRECTORY = 'resolutions = [64]\n[[directory]]\npath = "images"\n'


def test_masks_reach_the_loss(fresh_project: Project) -> None:
    """Some images have a mask, the others use the default; an empty mask is rejected."""
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
    pipeline = LightSD3Pipeline(loaded.train.model, 0, open_dataset(fresh_project).empty_text())
    for batch in epoch_of(fresh_project):
        _, (_, mask) = pipeline.prepare_inputs(batch)
        assert mask is not None
        for row in mask:
            halves = (round(float(row[:, :4].mean()), 2), round(float(row[:, 4:].mean()), 2))
            sides[halves] += 1
    assert set(sides) == {(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)}, "the image's mask, the mirrored mask, the default"


def test_flipped_moments_are_those_of_the_mirrored_image(fresh_project: Project) -> None:
    fresh_project.data(DIRECTORY + "flip = true\n")
    fresh_project.build_cache()
    data = open_dataset(fresh_project)
    entry = data.manifest.shards[0]
    reader = data.new_reader(entry)
    assert reader.num_variants == 2
    vae = load_vae(fresh_project.model, torch.device("cpu"), torch.float32)
    origin = read_origins(fresh_project.cache / "shards" / entry.file)[0]
    pixels = np.array(Image.open(fresh_project.images / origin.key.rsplit("/", 1)[1]))[None]
    plain = raw_moments(vae, torch.from_numpy(pixels))[0]
    mirrored = raw_moments(vae, torch.from_numpy(pixels[:, :, ::-1].copy()))[0]
    for variant, (same, other) in enumerate(((plain, mirrored), (mirrored, plain))):
        moments = reader.images(0, variant)["moments"]
        # the batch affects rounding, which shows in fp16
        assert (moments - same).abs().max() < 0.05 < (moments - other).abs().max(), variant
    drawn = {
        torch.equal(moments, reader.images(0, 1)["moments"])
        for epoch in range(8)
        for batch in epoch_of(fresh_project, epoch=epoch)
        for number, moments in zip(batch["sample_id"].tolist(), batch["moments"], strict=True)
        if number == reader.identity(0)
    }
    assert drawn == {True, False}


def test_repeats_tags_and_prefix_are_applied(fresh_project: Project) -> None:
    tags = fresh_project.folder / "tags"
    tags.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (40 * number, 0, 0)).save(tags / f"{number}.png")
        (tags / f"{number}.txt").write_text("red; circle; small; left")
    fresh_project.data(
        'resolutions = [64]\n[[directory]]\npath = "tags"\nnum_repeats = 2.5\nshuffle_tags = true\n'
        'cache_shuffle_num = 3\ncache_shuffle_delimiter = "; "\ncaption_prefix = "a photo of "\n'
    )
    fresh_project.build_cache()
    captions = {
        caption
        for shard in Manifest.load(fresh_project.cache).shards
        for origin in read_origins(fresh_project.cache / "shards" / shard.file)
        for caption in origin.captions
    }
    assert len(captions) > 3, "each sample has three different shuffles"
    for caption in captions:
        assert caption.startswith("a photo of ")
        assert sorted(caption.removeprefix("a photo of ").split("; ")) == ["circle", "left", "red", "small"]
    batches = epoch_of(fresh_project)
    occurrences = Counter(number for batch in batches for number in batch["sample_id"].tolist())
    # 10 occurrences of 4 samples fill 3 batches of 4, with 2 repeated
    assert len(batches) == 3
    assert len(occurrences) == 4
    assert sum(occurrences.values()) == 12
    assert min(occurrences.values()) >= 2
    texts = {t5.view(torch.uint8).numpy().tobytes() for batch in batches for t5 in batch["t5"]}
    assert len(texts) > 4, "samples appear with several of their shuffles"


def test_a_missing_folder_is_reported_before_anything_is_encoded(fresh_project: Project) -> None:
    fresh_project.data('resolutions = [64]\n[[directory]]\npath = "nowhere"\n')
    with pytest.raises(ConfigFaults, match="nowhere"):
        build_caches(fresh_project.load(), Launch())
    assert not fresh_project.cache.exists()


@pytest.mark.parametrize(
    "part",
    combinations(
        ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"),
        fast=[("vae",), ("text_encoder_2",), ("text_encoder_3",)],
    ),
)
def test_an_encoder_that_returns_nan_stops_the_cache(fresh_project: Project, tmp_path: Path, part: str) -> None:
    """At the first batch, and nothing that contains NaN is written."""
    model = with_nan(fresh_project.model, tmp_path / "nan", part)
    with pytest.raises(UserError, match=rf"the encoder {model / part}, computed in float32, returned NaN or infinity"):
        fresh_project.build_cache(f'model.diffusers_path="{model}"')
    assert not list(fresh_project.cache.glob("shards/*.safetensors"))
    assert not (fresh_project.cache / MANIFEST).exists()


def test_samples_outside_where_are_reported(fresh_project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = sorted(max(map(len, texts)) for texts in captions_of(fresh_project).values())
    text = fresh_project.data_toml.read_text(encoding="utf-8")
    num_short = sum(length <= lengths[-5] for length in lengths)
    fresh_project.data(f"where = 'caption_length > {lengths[-5]} and width > 1'\n{text}")
    (report,) = fresh_project.build_cache()
    assert (report.counts["pictures"], report.counts["unmatched"]) == (NUM_IMAGES - num_short, num_short)
    assert rejects(fresh_project) == {}
    assert f"{num_short} samples do not match `where` and are left out" in capsys.readouterr().err
    console = Console(width=120, record=True)
    console.print(inspect.render(inspect.run(fresh_project.cache)))
    assert re.search(rf"unmatched +{num_short}\b", console.export_text())
    names = sorted(path.name for path in fresh_project.images.glob("*.png"))
    (fresh_project.folder / "exclude.txt").write_text(f"{fresh_project.images.name}#0/{names[0]}\n")
    fresh_project.data(f"exclude = 'exclude.txt'\n{text}")
    (report,) = fresh_project.build_cache()
    assert (report.counts["pictures"], report.counts["excluded"]) == (NUM_IMAGES - 1, 1)
    assert "1 sample is listed in `exclude` and left out" in capsys.readouterr().err
    fresh_project.data(f"where = 'width > 9999'\n{text}")
    refused(f"no usable sample found .{NUM_IMAGES} do not match where.$", fresh_project.build_cache)


def test_dropped_similar_images_are_shown_in_pairs(fresh_project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    captions = captions_of(fresh_project)
    first, second = sorted(captions)[:2]
    shutil.copy(fresh_project.images / first, fresh_project.images / "zz.png")
    with Image.open(fresh_project.images / second) as image:
        image.resize((200, 200)).save(fresh_project.images / "zzz.png")
    write_captions(fresh_project, {**captions, "zz.png": "a copy", "zzz.png": "a larger copy"})
    fresh_project.data(f"duplicates = 'drop_similar'\n{fresh_project.data_toml.read_text(encoding='utf-8')}")
    assert count_samples(fresh_project.load().dataset, 0).samples == NUM_IMAGES  # from a scan
    (report,) = fresh_project.build_cache()
    assert report.counts["pictures"] == report.counts["used"] == NUM_IMAGES
    assert (report.counts["duplicates dropped"], report.counts["similar dropped"]) == (1, 1)
    log = capsys.readouterr().err
    assert "1 images have the same bytes as an earlier one: they are left out" in log
    assert "1 images are similar to an earlier one: they are left out; see" in log
    assert f"comparing images {NUM_IMAGES + 2}/{NUM_IMAGES + 2}" in log
    assert count_samples(fresh_project.load().dataset, 0).samples == NUM_IMAGES  # from the catalogue
    page = fresh_project.folder / "page.html"
    content = write_cache_page(fresh_project.cache, page, samples=0)
    pairs = {group.name: group.shown for group in content.duplicates.groups}
    names = {kind: [(Path(pair.first).name, Path(pair.key).name) for pair in pairs[kind]] for kind in pairs}
    assert names == {"duplicates dropped": [(first, "zz.png")], "similar dropped": [(second, "zzz.png")]}
    assert all(pair.image and pair.first_image for shown in pairs.values() for pair in shown)
    assert "similar dropped: 1" in " ".join(page.read_text(encoding="utf-8").split())
    (fresh_project.images / "zzz.png").unlink()
    (fresh_project.cache / "duplicates.jsonl").open("a").write("not json\n")
    content = write_cache_page(fresh_project.cache, page, samples=0)
    assert content.notes == ["Damaged lines in duplicates.jsonl: 1."]
    assert [pair.image for group in content.duplicates.groups for pair in group.shown].count("") == 1
